"""Faults that a benchmark does to a home: what happens at once, and how it is repaired later."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import psutil

from hearth.errors import InternalError
from tools.bench.fault_home import FaultHome
from tools.bench.homes import HUB, agent_of, template_of, worker_of
from tools.testbed import Testbed
from tools.testbed.network import run_command

_RESTART_SECONDS = 1.0  # RestartSec of the systemd units
_CUT_SECONDS = 10.0  # for which a link is cut
# For which processes are stopped, a device has no power or a store is full: longer than the silence that makes a device lost.
_GONE_SECONDS = (5.0, 8.0)
_NEXT_PHASE_SECONDS = 20.0  # most time to wait for the phase in which the second fault happens
_LOSSES = 10  # of devices, in a row
_RECOVERY_SECONDS = 60.0  # most time to wait for the next plan between them
_SERVED_SECONDS = 0.5  # for which the home serves between them: some tokens of each stream
# Limits of the pause of a killed agent, and of a device without power.
_AGENT_SECONDS, _POWER_SECONDS = 1.5, 2.0
_DATA_PORTS = range(47810, 47830)
_CONTROL_PORTS = range(47800, 47801)


class Repair(NamedTuple):
    """Something to do later, in seconds after the fault."""

    seconds: float
    act: Callable[[], object]


Find = Callable[[Testbed, str], psutil.Process | None]  # a process of a device
Act = Callable[[FaultHome, str, random.Random], list[Repair]]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    `act` does it to what `choose` chose, at once; `limit_seconds`: target of the pause.
    """

    act: Act
    limit_seconds: float | None = None
    standby_limit_seconds: float | None = None  # if the coordinator has a standby
    choose: Callable[[FaultHome, random.Random], str] = lambda home, chance: chance.choice(home.planned())
    parts_network: bool = False  # in two, with clients on both sides


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _other(home: FaultHome, target: str, chance: random.Random) -> str:
    """Another device of the plan."""
    others = [name for name in home.planned() if name != target]
    if not others:
        raise InternalError(where="the fault", reason=f"the plan has no device but {target}")
    return chance.choice(others)


# ---- processes --------------------------------------------------------------------------------------------------------


def _pid(home: FaultHome, target: str, find: Find) -> int:
    if (process := find(home.testbed, target)) is None:
        raise InternalError(where="the fault", reason=f"{target} has no such process: {find.__name__}")
    return process.pid


def _template_or_worker(testbed: Testbed, device: str) -> psutil.Process | None:
    """The process from which workers are forked; the worker, if there is none."""
    return template_of(testbed, device) or worker_of(testbed, device)


def _kills(find: Find) -> Act:
    def act(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
        _signal([_pid(home, target, find)], signal.SIGKILL)
        return []

    return act


def _kill_agent(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    _signal([_pid(home, target, agent_of)], signal.SIGKILL)
    return [Repair(_RESTART_SECONDS, lambda: _restart(home, target))]


def _restart(home: FaultHome, target: str) -> None:
    """Start the agent of a device, and its coordinator if that has ended, too."""
    home.testbed.start_agent(target)
    if target in home.coordinators and home.coordinators[target].poll() is not None:
        home.start_coordinator(target)


def _stop_worker(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    return _stopped([_pid(home, target, worker_of)], chance)


def _stopped(pids: list[int], chance: random.Random) -> list[Repair]:
    _signal(pids, signal.SIGSTOP)
    return [Repair(chance.uniform(*_GONE_SECONDS), lambda: _signal(pids, signal.SIGCONT))]


def _stop_device(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    return _stopped(home.testbed.pids(target), chance)


def _power_cycle(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    """End all processes of a device at once, and its link."""
    home.testbed.network.cut(target)
    _signal(home.testbed.pids(target), signal.SIGKILL)

    def power_on() -> None:
        home.testbed.network.mend(target)
        _restart(home, target)

    return [Repair(chance.uniform(*_GONE_SECONDS), power_on)]


# ---- links ------------------------------------------------------------------------------------------------------------


def _cut_link(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    home.testbed.network.cut(target)
    return [Repair(_CUT_SECONDS, lambda: home.testbed.network.mend(target))]


def _part_peers(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    return _part(home, [target], [_other(home, target, chance)])


def _part(home: FaultHome, near: Sequence[str], far: Sequence[str]) -> list[Repair]:
    """Cut the network between two groups of devices."""
    pairs = list(product(near, far))
    for pair in pairs:
        home.testbed.network.part(*pair)

    def rejoin() -> None:
        for pair in pairs:
            home.testbed.network.rejoin(*pair)

    return [Repair(_CUT_SECONDS, rejoin)]


def _reset_data(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    """The connection may have been accepted by any device of the plan."""
    found = [(name, each) for name in home.names for each in home.testbed.network.connections(name, _DATA_PORTS)]
    if not found:
        raise InternalError(where="the fault", reason="no worker has a connection to another one")
    device, connection = chance.choice(found)
    home.testbed.network.reset(device, connection)
    return []


def _reset_control(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    connection = chance.choice(home.testbed.network.connections(target, _CONTROL_PORTS))
    home.testbed.network.reset(target, connection)
    return []


# ---- disks ------------------------------------------------------------------------------------------------------------


def _fill_store(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    """Fill the store of the target to the last byte, then kill another device's agent: the target needs more chunks."""
    ballast = home.testbed.folder / target / "store" / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    repairs = _kill_agent(home, _other(home, target, chance), chance)
    return [*repairs, Repair(chance.uniform(*_GONE_SECONDS), lambda: ballast.unlink(missing_ok=True))]


def _freeze(folder: Path, chance: random.Random) -> list[Repair]:
    """Hold everything that writes to the disk of this folder."""
    run_command("fsfreeze", "--freeze", str(folder))
    return [Repair(chance.uniform(*_GONE_SECONDS), lambda: run_command("fsfreeze", "--unfreeze", str(folder)))]


def _hang_device_disk(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    return _freeze(home.testbed.folder / target / "store", chance)


def _hang_coordinator_disk(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    """Change keys meanwhile, which are written there."""
    repairs = _freeze(home.testbed.folder / "coordinator", chance)
    home.change_keys(f"app-{chance.randrange(1 << 32)}")
    return repairs


# ---- several at once ---------------------------------------------------------------------------------------------------


def _await_phase(home: FaultHome, *phases: str) -> None:
    """Wait for one of these phases of the deployment; goes on after a time, because a short phase may be missed."""
    deadline = time.monotonic() + _NEXT_PHASE_SECONDS
    while home.look(devices=False).phase not in phases and time.monotonic() < deadline:
        time.sleep(0.01)  # as short as the shortest phase


def _loses_two(*phases: str) -> Act:
    """Kill an agent, and another one in one of these phases of the recovery."""

    def act(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
        other = _other(home, target, chance)
        repairs = _kill_agent(home, target, chance)
        _await_phase(home, *phases)
        return [*repairs, *_kill_agent(home, other, chance)]

    return act


def _lose_while_changing(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    """Lose a device while the plan changes because another one has come back."""
    other = _other(home, target, chance)
    _kill_agent(home, target, chance)
    home.wait_for(lambda state: state.serves and target not in state.planned, _NEXT_PHASE_SECONDS)
    _restart(home, target)
    _await_phase(home, "draining", "loading")
    return _kill_agent(home, other, chance)


def _lose_ten(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    """Kill an agent ten times, each time as soon as the home has served for a moment; every agent starts again at once.

    A stream of 100 tokens lives through several of them.
    """
    for _ in range(_LOSSES):
        if not home.wait_for(lambda state: state.serves, _RECOVERY_SECONDS):
            break
        time.sleep(_SERVED_SECONDS)
        lost = chance.choice(home.planned())
        if (agent := agent_of(home.testbed, lost)) is not None:
            _signal([agent.pid], signal.SIGKILL)
            _restart(home, lost)
    return []


def _lose_all_but_one(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    """The target is the one that is left."""
    lost = [name for name in home.names if name != target]
    return [repair for name in lost for repair in _power_cycle(home, name, chance)]


# ---- the coordinator ---------------------------------------------------------------------------------------------------


def _kill_coordinator(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    leader = home.leader()
    process = home.coordinators[leader]
    process.kill()
    process.wait()
    return [Repair(_RESTART_SECONDS, lambda: home.start_coordinator(leader))]


def _stop_coordinator(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    return _stopped([home.coordinators[home.leader()].pid], chance)


def _choose_side(home: FaultHome, chance: random.Random) -> str:
    """The devices that are cut off from the hub: that of the standby, and any others."""
    *others, standby = home.names
    return ",".join([*(name for name in others if chance.random() < 0.5), standby])


def _part_coordinators(home: FaultHome, target: str, chance: random.Random) -> list[Repair]:
    """Part the network in two, with a coordinator on each side."""
    far = target.split(",")
    return _part(home, [HUB, *(name for name in home.names if name not in far)], far)


# Limits: targets on wired links and an idle machine. Those of several losses are the sums of the single ones. That of all
# devices but one is the longest time without power, and the limit of one device.
FAULTS: dict[str, Fault] = {
    "worker killed": Fault(_kills(worker_of), 1.0),
    "template killed": Fault(_kills(_template_or_worker), 1.0),
    "agent killed": Fault(_kill_agent, _AGENT_SECONDS),
    "worker stopped": Fault(_stop_worker, 2.0),
    "device stopped": Fault(_stop_device, 2.0),
    "link cut": Fault(_cut_link, 2.0),
    "link between two cut": Fault(_part_peers, 2.0),
    "data connection reset": Fault(_reset_data, 0.5),
    "control connection reset": Fault(_reset_control, 0.5),
    "store full": Fault(_fill_store),
    "disk of a device hung": Fault(_hang_device_disk, 0.5),
    "disk of the coordinator hung": Fault(_hang_coordinator_disk, 0.5, choose=lambda home, chance: HUB),
    "power cycled": Fault(_power_cycle, _POWER_SECONDS),
    "second loss": Fault(_loses_two("settling", "profiling", "planning", "pushing"), 2 * _AGENT_SECONDS),
    "loss while loading": Fault(_loses_two("loading", "warming"), 2 * _AGENT_SECONDS),
    "loss while the plan changes": Fault(_lose_while_changing, 2 * _AGENT_SECONDS),
    "ten losses in a row": Fault(_lose_ten, _LOSSES * _AGENT_SECONDS),
    "all but one lost": Fault(_lose_all_but_one, _GONE_SECONDS[1] + _POWER_SECONDS),
    "coordinator killed": Fault(_kill_coordinator, 5.0, 3.0),
    "coordinator stopped": Fault(_stop_coordinator, None, 3.0),
    "coordinator parted": Fault(_part_coordinators, choose=_choose_side, parts_network=True),
}
