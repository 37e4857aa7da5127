"""Hours in a home whose devices come and go: `python -m simulation.churn --hours 6`.

Every 20 s a device fails: its agent or its worker is killed, its power or its links are cut, or it is stopped for a while.
Two clients call all the time. No call may fail, and nothing may grow.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from simulation.command import silence_process, start_reproducibly
from simulation.home import HOME, Home
from simulation.run import Run, run_schedule
from simulation.schedule import Call, Fault, FaultKind, Schedule, generate

NUM_DEVICES = 4
KINDS = ("power cut", "kill agent", "kill worker", "isolate", "stop host")
FAULT_SECONDS = 20.0  # from one fault to the next
AWAY_SECONDS = (1.0, 15.0)  # how long a device is away
START_SECONDS = 10.0  # until the home serves
CALL_SECONDS = 1.0  # from an answer to the client's next call
SETTLED_SECONDS = 10.0  # after the end of a fault, until sizes are read
NUM_SAMPLES = 30  # of sizes, over the whole time
# With so many, a size that only varies is larger throughout the last third than ever in the first one once in 12,870 runs.
MIN_SAMPLES = 24
MIN_HOURS = 0.3  # which give as many

assert set(KINDS) <= set(get_args(FaultKind))


class Churn(Run):
    """One run. `samples`: how much there was of everything that could grow, in the order of time."""

    def __init__(self, home: Home, schedule: Schedule) -> None:
        super().__init__(home, schedule)
        self.samples: list[dict[str, int]] = []

    async def main(self) -> None:
        home = self.home
        for name in home.devices:
            home.start_agent(name)
        for name in home.coordinators:
            home.start_coordinator(name)
        clients = [home.add_client(name).run(self._calls(name)) for name in ("p0", "p2")]
        await asyncio.sleep(START_SECONDS)
        await self._faults()
        await asyncio.wait(clients)
        self._compare()
        await self._stop()

    async def _calls(self, name: str) -> None:
        home = await self._connected(HOME)
        number = 0
        while self.home.loop.time() < self.schedule.seconds:
            await self._call(home, Call(self.home.loop.time(), name, number, 4, 1 + number % 900))
            number += 1
            await asyncio.sleep(CALL_SECONDS)
        await home.close()

    async def _faults(self) -> None:
        home, random = self.home, self.home.random
        while home.loop.time() < self.schedule.seconds:
            fault = Fault(
                home.loop.time(),
                random.choice(KINDS),
                random.choice(home.devices),
                seconds=random.uniform(*AWAY_SECONDS),
            )
            await self._inject(fault)
            await asyncio.sleep(max(fault.at + FAULT_SECONDS - home.loop.time(), 0.0))
            is_due = home.loop.time() >= (len(self.samples) + 1) * self.schedule.seconds / NUM_SAMPLES
            if is_due and all(home.agents[name].alive for name in home.devices):
                await asyncio.sleep(SETTLED_SECONDS)
                self.samples.append(sizes(home))
                print(f"{home.loop.time():8.0f} s  {self.samples[-1]}", flush=True)

    def _compare(self) -> None:
        """A size has grown if it was larger throughout the last third than ever in the first third."""
        third = len(self.samples) // 3
        if len(self.samples) < MIN_SAMPLES:
            self.violated("nothing grows", f"only {len(self.samples)} samples: too few to tell growth from chance")
            return
        for name in self.samples[0]:
            first, last = ([each[name] for each in part] for part in (self.samples[:third], self.samples[-third:]))
            if min(last) > max(first):
                self.violated("nothing grows", f"{name}: {first} at first, {last} at last")


def sizes(home: Home) -> dict[str, int]:
    """How much there is of everything that could grow."""
    hosts = [home.network.hosts[name] for name in home.devices]
    processes = [process for host in home.network.hosts.values() for process in host.processes]
    daemons = [host.variables["daemon"] for host in hosts]
    controllers = home.controllers()
    return {
        "processes": len(processes),
        "tasks": sum(len(process.tasks) for process in processes),
        "connections": len(home.network.connections),
        "listeners": len(home.network.listeners),
        "timers": sum(not timer[2].cancelled() for timer in home.loop._timers),
        # A store keeps the chunks of earlier plans while there is room.
        "files next to the store": sum(
            "store" not in path.relative_to(host.disk.folder).parts
            for host in hosts
            for path in host.disk.folder.rglob("*")
        ),
        "leases": sum(daemon._lease is not None for daemon in daemons),
        "workers": sum(len(daemon._workers) for daemon in daemons),
        "pinned chunks": sum(len(chunks) for daemon in daemons for chunks in daemon._store._pinned.values()),
        "retired deployments": sum(len(each._retired) + len(each._closing) for each in controllers),
        "requests": sum(len(each.requests._running) + each.requests.admission.num_waiting for each in controllers),
        "records of the fleet": sum(_records(service._fleet) for service in home.leading.values()),
    }


def _records(thing: Any) -> int:
    return sum(len(value) for value in vars(thing).values() if isinstance(value, dict | set | list))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it once; print the sizes, how long calls took, and what was violated."""
    parser = argparse.ArgumentParser(prog="python -m simulation.churn", description=__doc__)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.hours < MIN_HOURS:
        parser.error(f"--hours must be at least {MIN_HOURS:g}: a shorter time cannot tell growth from chance")
    silence_process()
    schedule = replace(
        generate(options.seed), seconds=options.hours * 3600, num_devices=NUM_DEVICES, causal=False, standby=False,
        lasting=None, faults=(), calls=(), step_seconds=0.05, revoke_at=None, thorough=False,
        own_key="", revoke_device_at=None,
    )  # fmt: skip
    outcome = run_schedule(schedule, Churn)
    print(
        f"{outcome.num_calls} calls, the longest {outcome.slowest_seconds:.2f} s; {outcome.virtual_seconds:.0f} virtual "
        f"seconds, {outcome.num_callbacks} callbacks, {time.process_time():.0f} s of processor time"
    )
    print(*(f"VIOLATED {invariant}: {text}" for invariant, text in outcome.violations[:10]), sep="\n")
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    start_reproducibly("simulation.churn", main)
