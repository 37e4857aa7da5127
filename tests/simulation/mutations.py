"""Deliberate defects, each of which some schedule must show: `python -m simulation.mutations [NAME...]`.

Only schedules to which a defect matters are run. It prints how many it took.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

from simulation.command import silence_process, start_reproducibly
from simulation.run import run_schedule
from simulation.schedule import Schedule, generate

import agent.daemon.daemon
import hearth.client.home
from agent.daemon.daemon import AgentDaemon
from agent.daemon.lease import Lease
from coordinator.deploy.deployment import Deployment
from coordinator.devices.fleet import Fleet
from coordinator.devices.quorum import Quorum
from coordinator.devices.registry import Device
from coordinator.serve.standby.followers import Followers

MAX_SCHEDULES = 100  # to which the defect matters


@dataclass(frozen=True)
class Mutation:
    """A defect: what replaces an attribute of a module or class, and the schedules to which it matters."""

    target: Any
    attribute: str
    replacement: Any
    matters: Callable[[Schedule], bool]


async def _nothing(*_: Any) -> None:
    pass


async def _answer_at_once(followers: Followers) -> None:
    followers.num_changes += 1
    followers.latest_is_copied = len(followers) > 0


def _has(*kinds: str) -> Callable[[Schedule], bool]:
    return lambda schedule: any(fault.kind in kinds for fault in schedule.faults)


def _loses_devices(schedule: Schedule) -> bool:
    return schedule.num_devices > 1 and _has("isolate", "cut", "stop host")(schedule)


def _rejects_most_devices(schedule: Schedule) -> bool:
    kinds = [fault for fault in schedule.faults if fault.kind == "reject coordinator"]
    return schedule.num_devices > 1 and any(fault.host == "c0" and fault.other for fault in kinds)


def _revokes_before_the_leader_is_lost(schedule: Schedule) -> bool:
    """Within half a second, and the standby is there."""
    revoke_at = schedule.revoke_at
    if not schedule.standby or revoke_at is None:
        return False
    return any(
        each.kind in ("isolate", "kill coordinator") and each.host == "c0" and 0.0 < each.at - revoke_at < 0.5
        for each in schedule.faults
    )


MUTATIONS = {
    "quarantine is ignored": Mutation(
        Device, "is_quarantined", lambda self, now: False, lambda schedule: schedule.lasting is not None
    ),
    "chunks are not checked before loading": Mutation(
        AgentDaemon, "_verify_chunks", _nothing, lambda schedule: _has("rot")(schedule) and schedule.num_devices > 1
    ),
    "a worker waits for adoption without end": Mutation(
        Lease, "is_abandoned", lambda self, now: False, lambda schedule: schedule.standby
    ),
    "a worker of any epoch is adopted": Mutation(
        agent.daemon.daemon, "keeps_worker", lambda previous, holder, adopt, deployment, epoch: True, _loses_devices
    ),
    "a leader needs no majority": Mutation(
        Quorum,
        "may_compute",
        lambda self, held: True,
        lambda schedule: schedule.standby and _has("isolate", "stop coordinator")(schedule),
    ),
    "a leader counts on leases over connections that were closed": Mutation(
        Fleet, "closed", lambda self, connection: None, _rejects_most_devices
    ),
    "a deployment does not ask whether it may run": Mutation(
        Deployment,
        "check_may_run",
        lambda self: None,
        lambda schedule: schedule.standby and _has("isolate", "stop coordinator")(schedule),
    ),
    "a change of keys is answered before the standby has it": Mutation(
        Followers, "copy_change", _answer_at_once, _revokes_before_the_leader_is_lost
    ),
    "a revoked device stays": Mutation(
        Fleet, "drop_revoked", _nothing, lambda schedule: schedule.revoke_device_at is not None
    ),
    "calls are not repeated": Mutation(hearth.client.home, "_REPEATED", (), _has("kill coordinator")),
}


def schedules_until_caught(mutation: Mutation) -> tuple[int, str] | None:
    """How many schedules it takes, and the first violation; None if no schedule shows the defect."""
    seeds = filter(mutation.matters, map(generate, itertools.count()))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mutation.target, mutation.attribute, mutation.replacement))
        for number, schedule in enumerate(itertools.islice(seeds, MAX_SCHEDULES), start=1):
            outcome = run_schedule(schedule)
            gc.collect()
            if outcome.violations:
                invariant, text = outcome.violations[0]
                return number, f"seed {schedule.seed}: {invariant}: {text}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Apply all defects, or those that are named, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m simulation.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(MUTATIONS))
    silence_process()
    missed = 0
    for name in parser.parse_args(arguments).names or MUTATIONS:
        caught = schedules_until_caught(MUTATIONS[name])
        missed += caught is None
        print(
            f"{name}: " + ("NOT CAUGHT" if caught is None else f"schedule {caught[0]}, {caught[1][:160]}"), flush=True
        )
    return 1 if missed else 0


if __name__ == "__main__":
    start_reproducibly("simulation.mutations", main)
