"""Quorum: rules by example, and two coordinators under random faults, of which never two may compute."""

from __future__ import annotations

import random

import pytest

from coordinator.devices.quorum import Quorum, has_majority, lacking, others_may_lead
from hearth.wire.messages import Configuration


def configuration(voters: str, tie_breaker: str = "", previous: str = "", number: int = 1) -> Configuration:
    return Configuration(
        number=number,
        leader="l",
        voters=tuple(voters),
        tie_breaker=tie_breaker,
        previous_voters=tuple(previous),
        previous_tie_breaker=previous[:1],
    )


def leader_of(voters: str, tie_breaker: str) -> Quorum:
    """A leader whose first configuration all voters have stored."""
    return stored_by_all(Quorum("l").change(voters, tie_breaker), voters)


def stored_by_all(quorum: Quorum, devices: str) -> Quorum:
    """Twice, since a change of voters has two steps."""
    for device in 2 * devices:
        quorum = quorum.stored(device, quorum.current.number)
    return quorum


@pytest.mark.parametrize(
    ("voters", "tie_breaker", "previous", "held", "expected"),
    [
        ("a", "a", "", "", False), ("a", "a", "", "a", True),
        ("ab", "a", "", "a", True), ("ab", "a", "", "b", False), ("ab", "a", "", "ab", True),
        ("abc", "a", "", "a", False), ("abc", "a", "", "bc", True), ("abc", "a", "", "axyz", False),
        ("abcd", "b", "", "ab", True), ("abcd", "b", "", "cd", False), ("abcd", "b", "", "acd", True),
        ("a", "a", "abc", "a", False), ("a", "a", "abc", "bc", False), ("a", "a", "abc", "ac", True),
    ],
)  # fmt: skip
def test_majority(voters: str, tie_breaker: str, previous: str, held: str, expected: bool) -> None:
    assert has_majority(configuration(voters, tie_breaker, previous), held) == expected


def test_coordinator_without_a_standby_may_compute_with_any_devices() -> None:
    assert Quorum("l").may_compute("a")
    assert Quorum("l").take_over("abc") is None  # a standby that no leader counted on never takes over


def test_leader_computes_with_a_majority_only() -> None:
    quorum = leader_of("abc", "a")
    assert quorum.may_compute("bc")
    assert not quorum.may_compute("a")


def test_standby_takes_over_with_a_majority_of_the_latest_configuration_that_its_devices_remember() -> None:
    old, new = configuration("abc", "a", number=1), configuration("ab", "a", number=2)
    standby = Quorum("s").heard(old)
    assert standby.granted("b", old).take_over("b") is None
    taken = standby.granted("b", old).granted("c", old).take_over("bc")
    assert taken.current.number > new.number
    assert not taken.may_compute("bc")  # until a majority has stored its configuration
    assert stored_by_all(taken, "bc").may_compute("bc")
    assert standby.granted("b", new).granted("c", old).take_over("bc") is None
    assert standby.granted("b", None).granted("c", old).take_over("bc") is None  # b has forgotten, and has no vote


def test_leader_that_hears_of_a_later_term_computes_no_more() -> None:
    quorum = leader_of("abc", "a")
    taken = Quorum("s", quorum.current, voting=frozenset("bc")).take_over("bc")
    assert not quorum.granted("a", taken.current).may_compute("abc")
    assert quorum.granted("a", configuration("abc", "a", number=0)).may_compute("abc")


def test_change_of_voters_needs_a_majority_of_the_previous_and_of_the_new_ones() -> None:
    quorum = leader_of("abc", "a").change("ad", "a")
    assert quorum.change("ad", "a") is quorum
    number = quorum.current.number
    quorum = quorum.stored("a", number).stored("d", number)
    assert quorum.current.previous_voters == ("a", "b", "c")
    assert not quorum.may_compute("ad")
    quorum = quorum.stored("b", number)
    assert (quorum.current.number, quorum.current.voters, quorum.current.previous_voters) == (
        number + 1,
        ("a", "d"),
        (),
    )
    assert quorum.may_compute("a")
    assert stored_by_all(quorum, "ad").change("ad", "a") == stored_by_all(quorum, "ad")


def test_change_that_a_voter_can_no_longer_store_is_replaced() -> None:
    quorum = leader_of("abc", "c").change("ac", "c")  # b is lost; then c is revoked, and b comes back
    assert not stored_by_all(quorum, "ab").may_compute("ab")
    replaced = quorum.change("ab", "a")
    assert replaced.current.previous_voters == ("a", "b", "c")
    assert not replaced.may_compute("a")  # which is a majority of the new voters only
    replaced = stored_by_all(replaced, "ab")
    assert (replaced.current.voters, replaced.current.previous_voters) == (("a", "b"), ())
    assert replaced.may_compute("ab")


def test_change_that_was_taken_over_is_not_replaced() -> None:
    """Its end may be in use: the one who began it would compute with c and d, the other one with a and b."""
    joint = leader_of("abc", "a").change("acd", "c").current
    taken = Quorum("s", joint, voting=frozenset("abcd")).take_over("ac")
    assert taken.change("ab", "a") is taken
    taken = stored_by_all(taken, "ac")
    assert (taken.current.voters, taken.current.previous_voters) == (("a", "c", "d"), ())


def test_change_that_no_previous_voter_has_stored_is_dropped_by_a_takeover() -> None:
    """The new voter has no vote yet, and could never get one: nobody leads who may store a configuration there."""
    before = leader_of("a", "a").current
    joint = leader_of("a", "a").change("b", "b").current  # a is lost while b joins, and comes back
    standby = Quorum("s").heard(joint)
    assert standby.granted("b", None).take_over("b") is None
    taken = standby.granted("a", before).granted("b", None).take_over("ab")
    assert (taken.current.voters, taken.current.previous_voters) == (("a",), ())
    assert stored_by_all(taken, "a").may_compute("a")
    # Its end may be in use: b alone leads.
    assert standby.granted("a", joint).granted("b", None).take_over("ab") is None


def test_all_devices_but_one_may_be_lost_one_after_the_other() -> None:
    quorum = leader_of("abcde", "a")
    for left in ("abcd", "abc", "ab", "a"):
        quorum = stored_by_all(quorum.change(left, "a"), left)
        assert quorum.may_compute(left)


def test_devices_that_never_voted_can_join_a_leader_with_a_majority_of_the_previous_voters() -> None:
    quorum = leader_of("b", "b")
    for device in "acd":
        quorum = quorum.granted(device, None)
    quorum = quorum.change("abcd", "b")
    assert not quorum.may_compute("abcd")
    assert lacking(quorum, dict.fromkeys("acd")) == []  # without the previous voter
    assert lacking(quorum, dict.fromkeys("abcd")) == ["a", "b", "c", "d"]
    assert stored_by_all(quorum, "abcd").may_compute("abc")


def test_forgetful_device_is_told_by_a_leader_that_has_a_majority_without_it() -> None:
    quorum = leader_of("abc", "a").granted("c", None)
    assert lacking(quorum, dict.fromkeys("abc")) == ["c"]
    assert lacking(quorum, dict.fromkeys("ac")) == []
    assert not quorum.may_compute("ac")


# ---- two coordinators --------------------------------------------------------------------------------------------

DEVICES = "abcd"


class Coordinator:
    """A coordinator with its leases. As in the program, it hears what a device has stored when it gets its lease."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.quorum = Quorum(name)
        self.leases: set[str] = set()
        self.num_runs = 1

    def computes(self) -> bool:
        return bool(self.leases) and self.quorum.may_compute(self.leases)

    def store(self, stored: dict[str, Configuration | None], device: str, answered: bool) -> None:
        made, known = self.quorum.current, stored[device]
        assert made is not None
        if known is None or made.number > known.number or made == known:
            stored[device] = made
            if answered:
                self.quorum = self.quorum.stored(device, made.number)

    def restart(self) -> None:
        self.num_runs += 1
        self.quorum = Quorum(f"{self.name}{self.num_runs}", self.quorum.current)
        self.leases.clear()


@pytest.mark.parametrize("with_failing_disks", [False, True])
def test_two_coordinators_never_both_compute(with_failing_disks: bool) -> None:
    """Leases end and are taken at random, answers are lost, coordinators restart, devices forget what they stored."""
    num_computing = {"one": 0, "two": 0}
    for seed in range(1500):
        drawn = random.Random(seed)
        stored: dict[str, Configuration | None] = dict.fromkeys(DEVICES)
        first, second = Coordinator("one"), Coordinator("two")
        first.leases = set(DEVICES)
        first.quorum = first.quorum.change(DEVICES, "a")

        for device in DEVICES:
            first.store(stored, device, answered=True)
        second.quorum = second.quorum.heard(first.quorum.current)
        for _ in range(120):
            actor, other = drawn.choice([(first, second), (second, first)])
            device = drawn.choice(DEVICES)
            faults = ["end", "restart", *(["forget"] if with_failing_disks else [])]
            match drawn.choice([*3 * ["lease"], *4 * ["store"], "take over", "change", "tell", *faults]):
                case "lease" if device not in other.leases:
                    actor.leases.add(device)
                    actor.quorum = actor.quorum.granted(device, stored[device])
                case "store" if device in lacking(actor.quorum, dict.fromkeys(actor.leases)):
                    actor.store(stored, device, answered=drawn.random() < 0.9)
                case "take over" if not actor.quorum.leads:
                    actor.quorum = actor.quorum.take_over(actor.leases) or actor.quorum
                case "change" if actor.leases and actor.quorum.leads:
                    voters = [each for each in sorted(actor.leases) if drawn.random() < 0.7] or sorted(actor.leases)
                    actor.quorum = actor.quorum.change(voters, drawn.choice(voters))
                case "tell" if actor.quorum.leads:
                    other.quorum = other.quorum.heard(actor.quorum.current)
                case "end":
                    actor.leases.discard(device)
                case "restart":
                    actor.restart()
                case "forget":  # the device restarts after its disk has failed
                    stored[device] = None
                    first.leases.discard(device)
                    second.leases.discard(device)
            assert not (first.computes() and second.computes()), seed
            for coordinator in (first, second):
                num_computing[coordinator.name] += coordinator.computes()
    assert min(num_computing.values()) > 0  # both have led


@pytest.mark.parametrize(
    ("voters", "previous", "busy", "expected"),
    [
        ("abc", "", "a", False), ("abc", "", "ab", True), ("ab", "", "a", True), ("ab", "", "b", False),
        # While a leader removes a lost device, another one may take over with the voters before.
        ("b", "ab", "a", True), ("b", "ab", "b", True), ("bc", "abc", "a", False), ("bc", "abc", "ab", True),
    ],
)  # fmt: skip
def test_leader_is_deposed_by_a_majority_of_the_voters_before_or_after_a_change(
    voters: str, previous: str, busy: str, expected: bool
) -> None:
    assert others_may_lead(configuration(voters, voters[0], previous), set(busy)) is expected
