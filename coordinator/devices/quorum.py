"""Which coordinator of a home may compute, if there is a standby: the one with the leases of a majority of devices. Pure.

Every device has one vote, its lease, and grants it to one coordinator at a time. A configuration names the voters. It works
like the joint consensus of Raft (Ongaro and Ousterhout, 2014, section 6), with the devices as acceptors:

- A coordinator takes over with the leases of a majority of the voters of the latest configuration that it or any of these
  devices knows. It begins a new term, and leads once a majority has stored its first configuration: a device stores a number
  only once, so that each term has one leader.
- To change the voters, it first stores a joint configuration, which needs a majority of the previous and of the new voters;
  then the final one.
- A device that has forgotten its configuration, because its disk failed, has no vote until the leader, which has a majority
  without it, stores it there again.

With an even number of voters, exactly half of them are sufficient if the tie breaker is among them: of two devices, the one
with the tie breaker goes on alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hearth.wire.messages import Configuration

TERM = 1 << 20  # numbers of one term: a home changes its voters less often in the life of a coordinator


def has_majority(configuration: Configuration | None, held: Collection[str]) -> bool:
    """Whether `held` are a majority of the voters, and of the previous ones while they change. True without voters."""
    if configuration is None:
        return True
    return _is_majority(configuration.voters, configuration.tie_breaker, held) and (
        not configuration.previous_voters
        or _is_majority(configuration.previous_voters, configuration.previous_tie_breaker, held)
    )


def others_may_lead(configuration: Configuration, busy: Collection[str]) -> bool:
    """Whether another coordinator that holds the leases `busy` may have taken over.

    While the voters change, a majority of the previous ones is sufficient: it may not know of the change.
    """
    return _is_majority(configuration.voters, configuration.tie_breaker, busy) or (
        bool(configuration.previous_voters)
        and _is_majority(configuration.previous_voters, configuration.previous_tie_breaker, busy)
    )


def _is_majority(voters: Sequence[str], tie_breaker: str, held: Collection[str]) -> bool:
    num_held = len(set(voters) & set(held))
    if 2 * num_held == len(voters):
        return tie_breaker in held
    return 2 * num_held > len(voters)


def latest(configurations: Iterable[Configuration | None]) -> Configuration | None:
    """The one with the highest number; None if there is none."""
    return max((each for each in configurations if each is not None), key=lambda each: each.number, default=None)


@dataclass(frozen=True)
class Quorum:
    """What one coordinator knows about the voters. `leader` is its random id.

    `leads`: it may change the configuration, and compute while it holds the leases of a majority.
    """

    leader: str
    current: Configuration | None = None  # the latest that it has made or heard of; None: there is no standby
    leads: bool = False
    voting: frozenset[str] = frozenset()  # devices that remember a configuration
    stored_by: frozenset[str] = frozenset()  # devices that have stored `current`
    informed: frozenset[str] = frozenset()  # devices that remember a configuration as late as `current`, by any leader

    def may_compute(self, held: Collection[str]) -> bool:
        """Whether the coordinator that holds these leases may compute."""
        return self.current is None or (self.leads and has_majority(self.current, self.voting & set(held)))

    def heard(self, configuration: Configuration | None) -> Quorum:
        """Another coordinator has told its configuration. A later one ends the own term."""
        if configuration is None or (self.current is not None and configuration.number <= self.current.number):
            return self
        return self._with_current(configuration, leads=False)

    def granted(self, device: str, configuration: Configuration | None) -> Quorum:
        """A device has granted its lease, and returned the configuration that it remembers."""
        quorum = self.heard(configuration)
        if configuration is None:
            return replace(
                quorum,
                voting=quorum.voting - {device},
                stored_by=quorum.stored_by - {device},
                informed=quorum.informed - {device},
            )
        assert quorum.current is not None
        is_informed = configuration.number == quorum.current.number
        informed = quorum.informed | {device} if is_informed else quorum.informed - {device}
        return replace(quorum, voting=quorum.voting | {device}, informed=informed)

    def take_over(self, held: Collection[str]) -> Quorum | None:
        """Begin a term with the leases `held`; None if they are not sufficient, or if no leader counted on a standby.

        A change of voters that a majority of the previous ones has not stored was never in use, and is dropped: the new
        voters may have no vote yet.
        """
        current, votes = self.current, self.voting & set(held)
        if current is None:
            return None
        update: dict[str, object] = {"number": (current.number // TERM + 1) * TERM, "leader": self.leader}
        if not has_majority(current, votes):
            if not _is_majority(current.previous_voters, current.previous_tie_breaker, votes - self.informed):
                return None
            update |= {"voters": current.previous_voters, "tie_breaker": current.previous_tie_breaker}
            update |= {"previous_voters": (), "previous_tie_breaker": ""}
        configuration = current.model_copy(update=update)
        return self._with_current(configuration, leads=False)

    def change(self, voters: Collection[str], tie_breaker: str) -> Quorum:
        """Begin to change the voters, unless they are the same or the configuration is not stored yet.

        A change that this coordinator has begun in this term, and that is under way, is replaced: a voter of it that was
        revoked or lost meanwhile may be needed to end it. Every majority during both includes one of the previous voters. A
        change that was taken over is not, because its end, which needs no previous voter, may be in use elsewhere.
        """
        current, wanted = self.current, (tuple(sorted(voters)), tie_breaker)
        if not voters:
            return self
        if current is None:  # the first configuration: no other coordinator can lead yet
            first = Configuration(number=1, leader=self.leader, voters=wanted[0], tie_breaker=tie_breaker)
            return replace(self._with_current(first, leads=True), voting=frozenset(voters))
        previous = current.previous_voters, current.previous_tie_breaker
        if not current.previous_voters:
            if not has_majority(current, self.stored_by):
                return self
            previous = current.voters, current.tie_breaker
        if not self.leads or (current.voters, current.tie_breaker) == wanted:
            return self
        joint = Configuration(
            number=current.number + 1,
            leader=self.leader,
            voters=wanted[0],
            tie_breaker=tie_breaker,
            previous_voters=previous[0],
            previous_tie_breaker=previous[1],
        )
        return self._with_current(joint, leads=self.leads)

    def may_store(self, device: str, held: Collection[str]) -> bool:
        """Whether to store the configuration on a device that this coordinator holds."""
        return self.current is not None and (
            device in self.voting or self.may_compute(held) or self._is_joining(device, held)
        )

    def _is_joining(self, device: str, held: Collection[str]) -> bool:
        """Whether the device becomes a voter by a change that the leader may make. It has no vote yet that it could forget."""
        current = self.current
        return (
            current is not None
            and self.leads
            and bool(current.previous_voters)
            and device not in current.previous_voters
            and _is_majority(current.previous_voters, current.previous_tie_breaker, self.voting & set(held))
        )

    def stored(self, device: str, number: int) -> Quorum:
        """A device has stored the configuration `number` of this coordinator."""
        if self.current is None or (number, self.leader) != (self.current.number, self.current.leader):
            return self
        quorum = replace(
            self, voting=self.voting | {device}, stored_by=self.stored_by | {device}, informed=self.informed | {device}
        )
        if not has_majority(self.current, quorum.stored_by):
            return quorum
        if not self.current.previous_voters:
            return replace(quorum, leads=True)
        final = self.current.model_copy(
            update={"number": number + 1, "previous_voters": (), "previous_tie_breaker": ""}
        )
        return quorum._with_current(final, leads=True)

    def _with_current(self, configuration: Configuration, leads: bool) -> Quorum:
        """A later configuration, which no device has stored as far as is known."""
        return replace(self, current=configuration, leads=leads, stored_by=frozenset(), informed=frozenset())


def lacking(quorum: Quorum, leased: Mapping[str, object]) -> list[str]:
    """Devices with a lease of this coordinator on which it should store its configuration now."""
    mine = quorum.current is not None and quorum.current.leader == quorum.leader
    return [device for device in leased if mine and device not in quorum.stored_by and quorum.may_store(device, leased)]
