"""Rows of attacks and their controls, and what they say. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from hearth.platform.units import format_bytes, format_seconds
from tools.bench.findings import COUNT, PERCENT, Finding, at_least, at_most, equal, summarise, without_target
from tools.bench.results import Summary, Table

MALICIOUS = "malicious worker"  # of the plan; the last device's
# No attack, but as much processor time as the one before it takes. An attacker shares the processor with the home, and what
# it takes of that is no fault of the home.
CONTROL = "processor only"
FLOOD = "app flood"
LEAST_SHARE = 0.8  # target: rate of the clients during an attack over that before it, or over that of its control
MOST_GROWTH_BYTES = 64 << 20  # target: growth of a process's memory over all attacks
_COLUMNS = (
    "attack", "ports", "frames", "a second", "processor", "answers", "refusals", "broken", "new client, worst",
    "rate beside it", "beside as much use of the processor", "first over second",
)  # fmt: skip


class FuzzRow(BaseModel):
    """One attack, or its control. Rates: answers per second of the clients that behave."""

    model_config = ConfigDict(frozen=True)

    attack: str
    control_of: str = ""  # of a control: the attack before it
    round: int
    seconds: float
    frames: int  # that a socket took; of idle connections: connections made
    cpu_seconds: float = 0.0  # of the attacker; of a malicious worker, without what it does for the plan
    ports: tuple[int, ...] = ()  # that were attacked
    answers: int = 0  # to the attacker
    errors: int = 0  # of these, that refuse; of a malicious worker: its messages that others refused
    broken: int = 0  # connections that the home refused or broke
    quiet_rate: float
    rate: float
    failed: tuple[str, ...] = ()  # calls of the clients that behave
    wrong: tuple[str, ...] = ()
    attacker_ended: bool = False  # by libzmq, as `harden` describes; its frames are not counted then
    new_client_seconds: float | None = None  # for another client to connect and ask, during the attack; None: it failed
    ended: tuple[str, ...] = ()  # programs that ended
    serves: bool = True  # after the attack
    resident: dict[str, int] = {}  # bytes of the largest process of each program, after the attack
    descriptors: int = 0  # of all processes

    @property
    def share(self) -> float | None:
        """The clients' rate over that before; None if they had no answers before."""
        return self.rate / self.quiet_rate if self.quiet_rate else None

    @property
    def controlled(self) -> str:
        """The attack whose control this is; empty if it is none. Rows of earlier versions are controls of the flood."""
        return (self.control_of or FLOOD) if self.attack == CONTROL else ""


class Shares:
    """Shares of their rate that the clients kept, beside one attack and beside its controls."""

    def __init__(self, attack: str, rows: Sequence[FuzzRow]) -> None:
        self._attack = {row.round: row.share for row in rows if row.attack == attack and row.share is not None}
        self._control = {row.round: row.share for row in rows if row.controlled == attack and row.share is not None}

    @property
    def attack(self) -> list[float]:
        return list(self._attack.values())

    @property
    def control(self) -> list[float]:
        return list(self._control.values())

    @property
    def paired(self) -> list[float]:
        """Beside the attack over beside the control, of the rounds that have both."""
        return [share / self._control[number] for number, share in self._attack.items() if self._control.get(number)]


def summarise_attacks(rows: Sequence[FuzzRow], has_limit: bool) -> Summary:
    """The figures of all attacks, and a table.

    `has_limit`: of the attackers' rates. Without one they take all processor time that they get, and shares have no target.
    """
    findings = [
        equal("programs that ended", sum(len(row.ended) for row in rows), 0, COUNT),
        equal("calls that failed, of clients that behave", sum(len(row.failed) for row in rows), 0, COUNT),
        equal("wrong answers", sum(len(row.wrong) for row in rows if row.attack != MALICIOUS), 0, COUNT),
        equal("attacks after which the home did not serve", sum(not row.serves for row in rows), 0, COUNT),
        without_target("attacks that ended early with their attacker", sum(row.attacker_ended for row in rows), COUNT),
        equal("new clients shut out", sum(row.new_client_seconds is None for row in rows), 0, COUNT),
        *_growth(rows),
    ]
    attacks = list(dict.fromkeys(row.attack for row in rows if row.attack != CONTROL))
    for attack in attacks:
        shares = Shares(attack, rows)
        for figure, each in (
            (f"rate beside it, {attack}", shares.attack),
            (f"rate beside {attack}, over that beside as much use of the processor", shares.paired),
        ):
            if each:
                detail = f"median of {len(each)}; least {min(each):.0%}"
                share = statistics.median(each)
                findings.append(
                    at_least(figure, share, LEAST_SHARE, PERCENT, detail)
                    if has_limit
                    else without_target(figure, share, PERCENT, detail)
                )
    table = Table.of("Attacks", _COLUMNS, (_line(attack, rows) for attack in attacks))
    summary = summarise(f"{sum(row.frames for row in rows)} frames", findings, table)
    return summary.model_copy(update={"conclusions": (*summary.conclusions, *_conclusion(attacks, rows))})


def _conclusion(attacks: Sequence[str], rows: Sequence[FuzzRow]) -> Iterator[str]:
    """The attack that costs the clients most, apart from the processor that it uses."""
    costs = {attack: statistics.median(paired) for attack in attacks if (paired := Shares(attack, rows).paired)}
    if costs:
        worst = min(costs, key=lambda attack: costs[attack])
        which = "each attack" if len(costs) == len(attacks) else ", ".join(costs)
        yield (
            f"beside {which}, clients that behave keep at least {costs[worst]:.0%} ({worst}) of their rate beside a "
            "process that uses as much of the processor"
        )


def _growth(rows: Sequence[FuzzRow]) -> Iterator[Finding]:
    roles = Counter(role for row in rows for role in row.resident)
    for role in sorted(roles):
        sizes = [row.resident[role] for row in rows if role in row.resident]
        first, last, most = map(format_bytes, (sizes[0], sizes[-1], max(sizes)))
        detail = f"{first} after the first attack, {last} after the last one, {most} at most"
        grown = max(sizes) - sizes[0]
        yield at_most(f"memory of {role}, growth", grown, MOST_GROWTH_BYTES, format_bytes, detail)


def _line(attack: str, rows: Sequence[FuzzRow]) -> tuple[str, ...]:
    own = [row for row in rows if row.attack == attack]
    sums = [sum(values) for values in zip(*((r.frames, r.answers, r.errors, r.broken) for r in own), strict=True)]
    seconds = sum(row.seconds for row in own)
    connected = [row.new_client_seconds for row in own if row.new_client_seconds is not None]
    worst = format_seconds(max(connected)) if len(connected) == len(own) else "shut out"
    ports = ", ".join(map(str, sorted({port for row in own for port in row.ports}))) or "-"
    processor = f"{sum(row.cpu_seconds for row in own) / seconds:.0%}"
    shares = Shares(attack, rows)
    medians = (f"{statistics.median(s):.0%}" if s else "-" for s in (shares.attack, shares.control, shares.paired))
    return (attack, ports, str(sums[0]), f"{sums[0] / seconds:.0f}", processor, *map(str, sums[1:]), worst, *medians)
