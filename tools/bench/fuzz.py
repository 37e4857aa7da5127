"""Kind `fuzz`: damaged frames, floods and idle connections at every socket of a home, beside clients that behave.

Each attack runs for some seconds after as many without: the clients' rates of both are paired. A control follows it: the same
without an attack, beside as much use of the processor. A worker of the plan is trusted with its values, so wrong answers do
not count while one is malicious.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, TypeAdapter

from hearth.client.connection import COORDINATOR_PORT
from hearth.errors import InternalError
from tools.bench.census import Census, take_census
from tools.bench.damaged_copies import Order
from tools.bench.experiment import Context, Experiment
from tools.bench.fault_home import FaultHome, LoadName, served_home
from tools.bench.fuzz_rows import CONTROL, FLOOD, MALICIOUS, FuzzRow, summarise_attacks
from tools.bench.malicious_worker import MaliciousWorker
from tools.bench.processes import HubProcess
from tools.bench.results import Summary

ATTACKS = ("raw", "stranger", "app", "app, answers unread", FLOOD, "admin at agents", MALICIOUS, "idle connections")
_ANSWER_SECONDS = 60.0  # added to the duration of an attack
_CONTROL_PORT = 47800  # of an agent
_SPARE = "hearth.platform.spare_child"  # a process that waits for one piece of work, and ends with it
_LISTEN = "0A"  # state of a listening socket in /proc


class Fuzz(Experiment):
    """Rounds of all attacks, until `frames` have been sent in all, with `--resume` over several runs."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(FuzzRow)

    attacks: tuple[str, ...] = ATTACKS
    controls: bool = True  # after each attack
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
            attackers = _Attackers(fuzzer, MaliciousWorker(home), app)
            if MALICIOUS in self.attacks:
                context.report("making a worker malicious")
                attackers.worker.install()
            else:
                home.begin()
            for number in range(first, first + self.rounds):
                for attack in self.attacks:
                    context.report(f"round {number}, {attack}; {sent} of {self.frames} frames")
                    row = self._measure_one(home, attackers, attack, number)
                    sent += row.frames
                    yield row
                    if self.controls and row.cpu_seconds:
                        context.report(f"round {number}, control of {attack}")
                        yield self._measure_one(home, attackers, attack, number, row.cpu_seconds / row.seconds)
                if sent >= self.frames:
                    return

    def _measure_one(
        self, home: FaultHome, attackers: _Attackers, attack: str, number: int, cores: float = 0.0
    ) -> FuzzRow:
        """One attack, or with `cores`, its control: the attacker uses that much of the processor instead."""
        before = take_census(home.testbed, time.monotonic())
        targets = [] if cores else _targets(home, attack)
        home.take()
        time.sleep(self.quiet_seconds)
        quiet = sum(kind == "answer" for _, _, kind, _ in home.take())
        attackers.begin(
            attack, cores, targets=targets, seconds=self.seconds, rate=self.rate, seed=self.seed + number,
            many=self.connections,
        )  # fmt: skip
        time.sleep(self.seconds / 2)
        new_client_seconds = home.connect_once()
        counts = attackers.end(attack, self.seconds + _ANSWER_SECONDS)
        happened, state = home.take(), home.look()
        counts |= attackers.report(attack)
        after = take_census(home.testbed, time.monotonic())
        during = sum(kind in ("answer", "wrong") for _, _, kind, _ in happened)
        return FuzzRow(
            attack=CONTROL if cores else attack, control_of=attack if cores else "", round=number, seconds=self.seconds,
            **counts, ports=tuple(sorted({port for _, port in targets})),
            quiet_rate=quiet / self.quiet_seconds, rate=during / self.seconds, failed=_details(happened, "failed"),
            wrong=_details(happened, "wrong"), new_client_seconds=new_client_seconds, ended=ended(before, after),
            serves=state.serves, resident={role: int(max(after.of_role(role, _resident))) for role in after.roles},
            descriptors=after.descriptors,
        )  # fmt: skip

    def summary(self, rows: Sequence[FuzzRow]) -> Summary:
        return summarise_attacks(rows, has_limit=bool(self.rate))


class _Attackers:
    """A process on the hub, and a worker of the plan. A control uses the processor where its attack did."""

    def __init__(self, fuzzer: HubProcess, worker: MaliciousWorker, app: str) -> None:
        """`app`: the key of an app."""
        self.worker = worker
        self._fuzzer, self._app = fuzzer, app

    def begin(self, attack: str, cores: float, *, rate: float, **how: Any) -> None:
        """Begin an attack, or with `cores` a control."""
        of_worker = attack == MALICIOUS
        if of_worker:
            self.worker.begin(Order(rate=rate, cores=cores))
        kind = CONTROL if cores else attack
        self._fuzzer.begin("attack", kind=kind, rate=rate, app=self._app, cores=0.0 if of_worker else cores, **how)

    def end(self, attack: str, timeout_seconds: float) -> dict[str, Any]:
        """Wait for the end. Returns what the process did: during a worker's attack, it only waits."""
        counts = counts_of(self._fuzzer, timeout_seconds)
        if attack == MALICIOUS:
            self.worker.end()
        return counts

    def report(self, attack: str) -> dict[str, Any]:
        """What the worker did, if the attack was its."""
        return self.worker.report() if attack == MALICIOUS else {}


def counts_of(fuzzer: HubProcess, timeout_seconds: float) -> dict[str, Any]:
    """What an attack did. An attacker that has ended starts again, because its end harms nobody."""
    try:
        return fuzzer.answer(timeout_seconds)
    except InternalError:
        fuzzer.restart()
        return {"frames": 0, "attacker_ended": True}


def _targets(home: FaultHome, attack: str) -> list[tuple[str, int]]:
    """The hosts and ports that an attack is aimed at: strangers and idle connections try all that listen."""
    coordinator = (home.testbed.address(home.testbed.scenario.coordinator_device), COORDINATOR_PORT)
    if attack == MALICIOUS:
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


def _details(happened: Sequence[tuple[float, int, str, str]], kind: str) -> tuple[str, ...]:
    return tuple(what for _, _, each, what in happened if each == kind)


def _resident(process: Any) -> float:
    return float(process.resident_bytes)
