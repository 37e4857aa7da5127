"""Kind `fuzz`: damaged frames, floods and idle connections at every socket of a home, beside clients that behave.

Each attack runs for some seconds after as many without: the clients' rates of both are paired. A worker of the plan is trusted
with its values, so wrong answers do not count while one is malicious.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from hearth.client.connection import COORDINATOR_PORT
from hearth.errors import InternalError
from hearth.platform.units import format_bytes, format_seconds
from tools.bench.census import Census, take_census
from tools.bench.experiment import Context, Experiment
from tools.bench.fault_home import FaultHome, LoadName, served_home
from tools.bench.findings import COUNT, PERCENT, Finding, at_least, at_most, equal, summarise, without_target
from tools.bench.processes import HubProcess
from tools.bench.results import REPOSITORY, Summary, Table

_MALICIOUS = "malicious worker"  # of the plan; the last device's
_FLOOD = "app flood"
# No attack: as much processor time as the flood before it takes. The attacker shares the processor with the home, and what it
# takes of that is no fault of the home.
_CONTROL = "processor only"
ATTACKS = ("raw", "stranger", "app", "app, answers unread", _FLOOD, _CONTROL, "admin at agents", _MALICIOUS,
           "idle connections")  # fmt: skip
LEAST_SHARE = 0.8  # target: rate of the clients during an attack over that before it
MOST_GROWTH_BYTES = 64 << 20  # target: growth of a process's memory over all attacks
_MALICIOUS_CODE = Path(__file__).parent / "malicious"
_ANSWER_SECONDS = 60.0  # added to the duration of an attack
_CONTROL_PORT = 47800  # of an agent
_SPARE = "hearth.platform.spare_child"  # a process that waits for one piece of work, and ends with it
_LISTEN = "0A"  # state of a listening socket in /proc


class FuzzRow(BaseModel):
    """One attack. Rates: answers per second of the clients that behave."""

    model_config = ConfigDict(frozen=True)

    attack: str
    round: int
    seconds: float
    frames: int  # that a socket took; of idle connections: connections made
    cpu_seconds: float = 0.0  # of the attacker
    ports: tuple[int, ...] = ()  # that were attacked
    answers: int = 0  # to the attacker
    errors: int = 0  # of these, that refuse
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


class Fuzz(Experiment):
    """Rounds of all attacks, until `frames` have been sent in all, with `--resume` over several runs."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(FuzzRow)

    attacks: tuple[str, ...] = ATTACKS
    frames: int = Field(10_000_000, ge=1)
    rounds: int = Field(20, ge=1)  # of one run, at most
    seconds: float = Field(10.0, gt=0)  # of an attack
    quiet_seconds: float = Field(10.0, gt=0)  # without one, before it
    rate: float = Field(0.0, ge=0)  # most frames a second; 0: any
    connections: int = Field(2000, ge=1)  # idle ones, per port
    load: LoadName = "embed"
    devices: int = Field(2, ge=2, le=8)
    mbit: float = Field(1000.0, ge=1)  # real rate of every link
    seed: int = 1

    def measure(self, context: Context) -> Iterator[FuzzRow]:
        yield from context.known
        sent = sum(row.frames for row in context.known)
        first = 1 + max((row.round for row in context.known), default=0)
        with (
            served_home(self.load, context, self.devices, self.mbit) as home,
            HubProcess(home.testbed, "fuzzer") as fuzzer,
        ):
            coordinator = home.testbed.address(home.testbed.scenario.coordinator_device)
            app = json.loads(home.testbed.hearth("key", "add-app", "fuzzer", "--json", "--address", coordinator))["key"]
            if _MALICIOUS in self.attacks:
                _make_malicious(home, context)
            else:
                home.begin()
            for number in range(first, first + self.rounds):
                cores = 0.0  # that the last flood took
                for attack in self.attacks:
                    context.report(f"round {number}, {attack}; {sent} of {self.frames} frames")
                    row = self._measure_one(home, fuzzer, attack, number, app, cores if attack == _CONTROL else 0.0)
                    cores = row.cpu_seconds / row.seconds if attack == _FLOOD else cores
                    sent += row.frames
                    yield row
                if sent >= self.frames:
                    return

    def _measure_one(
        self, home: FaultHome, fuzzer: HubProcess, attack: str, number: int, app: str, cores: float
    ) -> FuzzRow:
        before = take_census(home.testbed, time.monotonic())
        targets = _targets(home, attack)
        home.take()
        time.sleep(self.quiet_seconds)
        quiet = sum(kind == "answer" for _, _, kind, _ in home.take())
        dropped = home.look().dropped
        flag = _flag(home)
        if attack == _MALICIOUS:
            flag.touch()
        fuzzer.begin(
            "attack", kind=attack, targets=targets, seconds=self.seconds, rate=self.rate, seed=self.seed + number, app=app,
            many=self.connections, cores=cores,
        )  # fmt: skip
        time.sleep(self.seconds / 2)
        new_client_seconds = home.connect_once()
        counts = counts_of(fuzzer, self.seconds + _ANSWER_SECONDS)
        flag.unlink(missing_ok=True)
        happened, state = home.take(), home.look()
        if attack == _MALICIOUS:  # counted by those who receive them
            counts["frames"] = max(state.dropped - dropped, 0)
        after = take_census(home.testbed, time.monotonic())
        during = sum(kind in ("answer", "wrong") for _, _, kind, _ in happened)
        return FuzzRow(
            attack=attack, round=number, seconds=self.seconds, **counts, ports=tuple(sorted({port for _, port in targets})),
            quiet_rate=quiet / self.quiet_seconds, rate=during / self.seconds, failed=_details(happened, "failed"),
            wrong=_details(happened, "wrong"), new_client_seconds=new_client_seconds, ended=ended(before, after),
            serves=state.serves, resident={role: int(max(after.of_role(role, _resident))) for role in after.roles},
            descriptors=after.descriptors,
        )  # fmt: skip

    def summary(self, rows: Sequence[FuzzRow]) -> Summary:
        findings = [
            equal("programs that ended", sum(len(row.ended) for row in rows), 0, COUNT),
            equal("calls that failed, of clients that behave", sum(len(row.failed) for row in rows), 0, COUNT),
            equal("wrong answers", sum(len(row.wrong) for row in rows if row.attack != _MALICIOUS), 0, COUNT),
            equal("attacks after which the home did not serve", sum(not row.serves for row in rows), 0, COUNT),
            without_target(
                "attacks that ended early with their attacker", sum(row.attacker_ended for row in rows), COUNT
            ),
            equal("new clients shut out", sum(row.new_client_seconds is None for row in rows), 0, COUNT),
            *_growth(rows),
        ]
        shares = {attack: _shares(attack, rows) for attack in dict.fromkeys(row.attack for row in rows)}
        for attack, each in shares.items():
            if each:
                figure, share = f"rate beside it, {attack}", statistics.median(each)
                detail = f"median of {len(each)}; least {min(each):.0%}"
                if (
                    attack == _CONTROL or not self.rate
                ):  # without a limit, the attacker takes all processor time that it gets
                    findings.append(without_target(figure, share, PERCENT, detail))
                else:
                    findings.append(at_least(figure, share, LEAST_SHARE, PERCENT, detail))
        if self.rate and shares.get(_FLOOD) and shares.get(_CONTROL):
            share = statistics.median(shares[_FLOOD]) / statistics.median(shares[_CONTROL])
            figure = f"rate beside {_FLOOD}, over that beside as much use of the processor"
            findings.append(at_least(figure, share, LEAST_SHARE, PERCENT))
        frames = sum(row.frames for row in rows)
        columns = (
            "attack",
            "ports",
            "frames",
            "a second",
            "processor",
            "answers",
            "refusals",
            "broken",
            "new client, worst",
        )
        table = Table.of("Attacks", columns, (_line(name, rows) for name in dict.fromkeys(r.attack for r in rows)))
        return summarise(f"{frames} frames", findings, table)


def counts_of(fuzzer: HubProcess, timeout_seconds: float) -> dict[str, Any]:
    """What an attack did. An attacker that has ended starts again, because its end harms nobody."""
    try:
        return fuzzer.answer(timeout_seconds)
    except InternalError:
        fuzzer.restart()
        return {"frames": 0, "attacker_ended": True}


def _make_malicious(home: FaultHome, context: Context) -> None:
    """Start the last device's agent so that its workers can attack, deploy again and start the load."""
    name = home.names[-1]
    path = os.pathsep.join([str(_MALICIOUS_CODE), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "MALICIOUS_FLAG": str(_flag(home))}
    context.report("making a worker malicious")
    home.stop_agent(name)
    home.testbed.start_agent(name, environment=environment)
    home.redeploy()


def _flag(home: FaultHome) -> Path:
    return home.testbed.folder / home.names[-1] / "store" / "malicious"


def _targets(home: FaultHome, attack: str) -> list[tuple[str, int]]:
    """The hosts and ports that an attack is aimed at: strangers and idle connections try all that listen."""
    coordinator = (home.testbed.address(home.testbed.scenario.coordinator_device), COORDINATOR_PORT)
    if attack in (_MALICIOUS, _CONTROL):
        return []
    if attack.startswith("app"):
        return [coordinator]
    if attack.startswith("admin"):
        return [(home.testbed.address(name), _CONTROL_PORT) for name in home.names]
    of_devices = [
        (home.testbed.address(name), port)
        for name in home.names
        for port in listening_ports(Path(f"/proc/{home.testbed.network.pids(name)[0]}/net"))
    ]
    return [coordinator, *of_devices]


def listening_ports(folder: Path) -> list[int]:
    """TCP ports of a network namespace on which somebody listens; `folder`: /proc/PID/net of a process in it."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in (folder / name).read_text().splitlines()[1:]]
    return sorted({int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == _LISTEN})


def ended(before: Census, after: Census) -> tuple[str, ...]:
    """The programs of which a process has ended."""
    left = {process.pid for process in after.processes}
    return tuple(
        f"{process.role} on {process.device}"
        for process in before.processes
        if process.pid not in left and process.role != _SPARE
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
    return (attack, ports, str(sums[0]), f"{sums[0] / seconds:.0f}", processor, *map(str, sums[1:]), worst)


def _shares(attack: str, rows: Sequence[FuzzRow]) -> list[float]:
    """The clients' rates during an attack, over those before it."""
    return [row.rate / row.quiet_rate for row in rows if row.attack == attack and row.quiet_rate]


def _details(happened: Sequence[tuple[float, int, str, str]], kind: str) -> tuple[str, ...]:
    return tuple(what for _, _, each, what in happened if each == kind)


def _resident(process: Any) -> float:
    return float(process.resident_bytes)
