"""Runs schedules and checks the invariants: `python -m simulation.run --seeds A:B`.

A failing seed is printed with its schedule and its violations; `--seeds N --verbose` repeats it exactly, with all it reported.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from simulation import model
from simulation.clock import Process, Stuck
from simulation.command import silence_process, start_reproducibly
from simulation.history import (
    Answer,
    exclusive_epochs,
    exclusive_leaders,
    in_time,
    no_request_lost,
    revoked_devices_idle,
)
from simulation.home import HOME, Home, app_key, device_public_key, simulated
from simulation.schedule import REQUEST_SECONDS, Call, Fault, Schedule, generate

from hearth.client.home import AsyncHome
from hearth.errors import AppRevoked, HearthError
from hearth.wire import messages as wire

SERVING_SECONDS = 60.0  # from the end of all faults until the home must serve
ALL_DEVICES_SECONDS = 400.0  # until all devices must be in use: quarantines and pauses between plans end
END_SECONDS = 90.0  # from SIGTERM in the middle of everything until the end: systemd's time before it kills
STOP_SECONDS = 30.0  # from SIGTERM to the end of a process
ABANDONED_SECONDS = 75.0  # until a worker has ended whose coordinator is gone: a lease, and the time for adoption
COPY_SECONDS = 0.6  # between two attempts of a change of keys that may be lost: two of the leader's signs of life
SURPLUS_SECONDS = 40.0  # until the workers of earlier plans have ended: the home may be changing its plan
SEEDS_PER_PROCESS = 25  # each leaves about 5 MB, which the end of the process frees sooner than garbage collection


@dataclass(frozen=True)
class Outcome:
    """The violations of one run by invariant, and what it reported."""

    schedule: Schedule
    violations: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    slowest_seconds: float  # the longest time that a client waited for its answer
    num_calls: int  # that were answered
    num_callbacks: int
    virtual_seconds: float


class Run:
    """One run of a home: `main` carries it out, and what it finds wrong is in `violations`."""

    def __init__(self, home: Home, schedule: Schedule) -> None:
        self.home = home
        self.schedule = schedule
        self.violations: list[tuple[str, str]] = []
        self._revoking = False  # whether the revocation was sent
        self._revoked = asyncio.Event()  # and whether it was answered
        self._asked = asyncio.Event()  # whether the home was asked if it serves

    def violated(self, invariant: str, text: str) -> None:
        self.violations.append((invariant, text))

    async def main(self) -> None:
        home, schedule = self.home, self.schedule
        for name in home.devices:
            home.start_agent(name)
        for name in home.coordinators:
            home.start_coordinator(name)
        running = [home.run_world(self._inject(fault)) for fault in schedule.faults]
        if schedule.lasting is not None:
            lasting = home.run_world(self._last(schedule.lasting))
        calls = []
        for name in schedule.clients:
            process = home.add_client(name)
            calls.append(process.run(self._client(process, name)))
        if schedule.revoke_at is not None:
            process = home.add_client("admin")
            calls.append(process.run(self._revoke(schedule.revoke_at)))
        if schedule.own_key:
            process = home.add_client("owner")
            calls.append(process.run(self._own_key(schedule.own_key, schedule.revoke_device_at)))
        if running:
            await asyncio.wait(running)
        await asyncio.sleep(max(schedule.seconds - home.loop.time(), 0.0))
        home.network.heal_all()
        home.note("all faults have ended")
        await self._converge()
        self._asked.set()
        if schedule.lasting is not None:
            await lasting
        _, late = await asyncio.wait(calls, timeout=REQUEST_SECONDS + 20)
        for call in late:
            self.violated("every call ends", f"{call} is still running at {home.loop.time():.1f} s")
        if schedule.thorough and not self.violations:
            await self._all_devices()
        if not self.violations:
            await self._no_other_workers()
        await self._stop()

    # ---- clients ------------------------------------------------------------------------------------------------------

    async def _client(self, process: Process, name: str) -> None:
        key: Any = HOME if name == "p0" else app_key(name)[0]
        if name == "p1":
            await self._admit_app(name)
        try:
            home = await self._connected(key)
        except AppRevoked:
            return
        waiting = [asyncio.create_task(self._call(home, call)) for call in self.schedule.calls if call.client == name]
        await asyncio.wait(waiting)
        await home.close()

    async def _admit_app(self, name: str) -> None:
        home = await self._connected(HOME)
        await self._change(lambda: home.add_app(name, app_key(name)[1], timeout_seconds=REQUEST_SECONDS), "was revoked")
        await home.close()

    async def _connected(self, key: Any) -> AsyncHome:
        while True:
            try:
                return await self.home.connect(key, 10.0)
            except HearthError as error:
                if error.code == "AppRevoked" and self._revoking:
                    raise
                self.home.note(f"a client could not connect: {error.code}")
                await asyncio.sleep(0.5)

    async def _call(self, home: AsyncHome, call: Call) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(call.at - loop.time(), 0.0))
        seconds = call.timeout_seconds
        answer = Answer(call.client, call.number, loop.time())
        answer.timeout_seconds, answer.may_fail = seconds, seconds < REQUEST_SECONDS
        self.home.history.answers.append(answer)
        revoked_before = self._revoked.is_set() and call.client == "p1"
        tokens = [call.first_token + step for step in range(3 if self.schedule.causal else call.length)]
        try:
            if self.schedule.causal:
                sampling = {"seed": call.number, "temperature": 0.5}
                generation = home.generate(
                    token_ids=tokens, max_tokens=call.length, timeout_seconds=seconds, **sampling
                )
                async with generation:
                    await generation.text()
                expected: Any = model.expected_answer(tokens, wire.Sampling(**sampling), call.length)
                found: Any = generation.token_ids
            else:
                found = (await home.hidden_states(tokens, seconds)).tolist()
                expected = model.hidden_rows(tokens, model.WEIGHTS_CHECKSUM).tolist()
        except HearthError as error:
            answer.result, answer.detail = error.code, error.explanation()
        except Exception as error:
            answer.result, answer.detail = type(error).__name__, str(error)
        else:
            answer.result = "correct" if found == expected else "wrong"
            answer.detail = "" if found == expected else f"{found} instead of {expected}"
        answer.ended = loop.time()
        if revoked_before or (self._revoking and call.client == "p1" and answer.result == "AppRevoked"):
            answer.deserved = "AppRevoked"
        self.home.note(f"{call.client}'s call {call.number}: {answer.result} {answer.detail}")

    async def _own_key(self, name: str, revoke_at: float | None) -> None:
        """Admit the key of a device, and revoke it later."""
        home = await self._connected(HOME)
        await self._change(
            lambda: home.add_device(name, device_public_key(name), timeout_seconds=REQUEST_SECONDS), "already"
        )
        if revoke_at is not None:
            await asyncio.sleep(max(revoke_at - asyncio.get_running_loop().time(), 0.0))
            await self._change(lambda: home.revoke_device(name, timeout_seconds=REQUEST_SECONDS), "no key of")
            self.home.history.revoked_devices[name] = self.home.loop.time()
            self.home.note(f"the key of {name} is revoked")
        await home.close()

    async def _change(self, change: Callable[[], Awaitable[str]], is_made: str) -> None:
        """Repeat a change of keys until it lasts, as its answer or the error `is_made` says."""
        while True:
            try:
                if not await change():
                    return
            except HearthError as error:
                if is_made not in str(error):
                    self.violated("no request is lost", f"a change of keys: {error}")
                return
            await asyncio.sleep(COPY_SECONDS)

    async def _revoke(self, at: float) -> None:
        home = await self._connected(HOME)
        await asyncio.sleep(max(at - asyncio.get_running_loop().time(), 0.0))
        self._revoking = True
        while True:
            try:
                if not await home.revoke_app("p1", timeout_seconds=REQUEST_SECONDS):
                    break
                await asyncio.sleep(COPY_SECONDS)
            except HearthError as error:
                if "no key of" not in str(error):
                    self.violated("no request is lost", f"revoke_app: {error}")
                    break
                await asyncio.sleep(1.0)  # p1 was not admitted yet
        self._revoked.set()
        self.home.note("p1 was revoked")
        await home.close()

    # ---- faults -------------------------------------------------------------------------------------------------------

    async def _inject(self, fault: Fault) -> None:
        home, network = self.home, self.home.network
        await asyncio.sleep(fault.at - home.loop.time())
        host = network.hosts[fault.host]
        home.note(f"FAULT {fault}")
        workers = [process for process in host.processes if process.name.endswith("worker")]
        match fault.kind:
            case "kill worker":
                for worker in workers:
                    worker.kill()
            case "stop worker":
                await self._pause(workers, fault.seconds)
            case "stop agent":
                await self._pause([home.agents[fault.host]], fault.seconds)
            case "stop host":
                await self._pause(list(host.processes), fault.seconds)
            case "kill agent":
                home.agents[fault.host].kill()
                await asyncio.sleep(fault.seconds)
                self._restart_agent(fault.host)
            case "power cut":
                network.power_off(host)
                await asyncio.sleep(fault.seconds)
                host.powered = True
                self._restart_agent(fault.host)
            case "cut":
                network.cut(fault.host, fault.other)
                await asyncio.sleep(fault.seconds)
                network.heal(fault.host, fault.other)
            case "isolate":
                network.isolate(fault.host)
                await asyncio.sleep(fault.seconds)
                network.reconnect(fault.host)
            case "reset":
                network.reset(fault.host, fault.other)
            case "slow link":
                network.slow_down(fault.host, fault.other, 0.4)
                await asyncio.sleep(fault.seconds)
                network.slow_down(fault.host, fault.other, 0.0)
            case "disk full" | "disk read-only" | "disk failing":
                host.disk.fault = fault.kind.removeprefix("disk ")  # type: ignore[assignment]
                await asyncio.sleep(fault.seconds)
                host.disk.fault = None
            case "rot":
                # What an agent has hashed stays in the kernel's page cache until its worker has read it, a moment later.
                while "daemon" in host.variables and any(
                    lock.locked() for lock in host.variables["daemon"]._load_locks.values()
                ):
                    await asyncio.sleep(0.1)
                chunks = sorted((host.disk.folder / "store").glob("??/*"))
                if chunks:
                    host.disk.damage(chunks[network.random.randrange(len(chunks))], network.random)
            case "restart agent":
                await self._end(home.agents[fault.host])
                await asyncio.sleep(fault.seconds)
                self._restart_agent(fault.host)
            case "restart coordinator":
                await self._end(home.serving[fault.host])
                await asyncio.sleep(fault.seconds)
                if not home.serving[fault.host].alive:
                    home.start_coordinator(fault.host, restart=True)
            case "kill coordinator":
                home.serving[fault.host].kill()
                await asyncio.sleep(fault.seconds)
                if not home.serving[fault.host].alive:
                    home.start_coordinator(fault.host, restart=True)
            case "reject coordinator":
                network.reject(fault.host, fault.other)
                await asyncio.sleep(fault.seconds)
                network.accept_again(fault.host)
            case "hang worker":
                for worker in workers:
                    if "worker" in worker.variables:
                        worker.variables["worker"].hangs = True
            case "stop coordinator":
                await self._pause([home.serving[fault.host]], fault.seconds)
        home.note(f"END OF {fault}")

    async def _last(self, fault: Fault) -> None:
        """A fault that lasts until the home was asked whether it serves."""
        host = self.home.network.hosts[fault.host]
        await asyncio.sleep(fault.at)
        self.home.note(f"LASTING FAULT {fault}")
        if fault.kind == "dying worker":
            while not self._asked.is_set():
                await asyncio.sleep(0.05)
                for process in [each for each in host.processes if "worker" in each.variables]:
                    if process.variables["worker"].port:  # it has loaded
                        process.kill()
        else:
            host.disk.fault = fault.kind.removeprefix("disk ")  # type: ignore[assignment]
            while not self._asked.is_set():
                await asyncio.sleep(0.2)
                host.disk.fault = fault.kind.removeprefix("disk ")  # type: ignore[assignment]
            host.disk.fault = None
        self.home.note(f"END OF {fault}")

    async def _pause(self, processes: Sequence[Process], seconds: float) -> None:
        for process in processes:
            process.stop()
            self.home.network.stopped(process)
        await asyncio.sleep(seconds)
        for process in processes:
            process.resume()

    async def _end(self, process: Process) -> None:
        """SIGTERM; then SIGKILL, as systemd does, if the process has not ended in time."""
        deadline = self.home.loop.time() + END_SECONDS
        if (handler := process.variables.get("signal 15")) is not None:
            handler()
            while process.alive and process.tasks and self.home.loop.time() < deadline:
                await asyncio.sleep(0.05)
            if process.alive and process.tasks and not process.stopped:
                text = f"{process} still runs {_task_names(process)} {END_SECONDS:g} s after SIGTERM"
                self.violated("a process ends when it is asked to", text)
        process.kill(0)

    def _restart_agent(self, name: str) -> None:
        if not self.home.agents[name].alive and self.home.network.hosts[name].powered:
            self.home.start_agent(name)

    # ---- the end ------------------------------------------------------------------------------------------------------

    async def _converge(self) -> None:
        """Wait until a new client is served."""
        home = self.home
        process = home.add_client("last")
        began = home.loop.time()

        async def ask() -> None:
            client = await self._connected(HOME)
            await self._call(client, Call(began, "last", 0, 2, 7))
            await client.close()

        asking = process.run(ask())
        await asyncio.wait({asking}, timeout=SERVING_SECONDS)
        if not asking.done():
            state = {name: service.deployments.state for name, service in home.leading.items()}
            self.violated("serving after all faults", f"not served {SERVING_SECONDS:g} s later: {state}")
            asking.cancel()

    async def _all_devices(self) -> None:
        home = self.home
        deadline = home.loop.time() + ALL_DEVICES_SECONDS
        used, num_admitted = 0, len(home.devices) - len(home.history.revoked_devices)
        while home.loop.time() < deadline:
            for service in home.leading.values():
                for controller in service.deployments.controllers.values():
                    used = controller.plan.num_ranks if controller.plan else 0
                    if used == num_admitted and controller.lifecycle.phase == "serving":
                        return
            await asyncio.sleep(1.0)
        self.violated("all devices in use", f"{used} of {num_admitted} after {ALL_DEVICES_SECONDS:g} s")

    async def _no_other_workers(self) -> None:
        """Wait until each device of the plan has the worker of this plan, and the others have none."""
        deadline = self.home.loop.time() + SURPLUS_SECONDS
        while (surplus := self._surplus()) and self.home.loop.time() < deadline:
            await asyncio.sleep(0.5)
        if surplus:
            self.violated("no worker of another plan", f"{surplus} {SURPLUS_SECONDS:g} s after the last call")

    def _surplus(self) -> str:
        """Which worker does not belong to the plan that serves; empty if all do."""
        serving = [each.deployment for each in self.home.controllers() if each.lifecycle.phase == "serving"]
        plans = [each.plan for each in serving if each is not None]
        if len(plans) != 1:
            return f"{len(plans)} plans serve"
        planned = {device.name for device in plans[0].devices}
        for name in self.home.devices:
            if name in self.home.history.revoked_devices:
                continue  # its worker ends when no coordinator has taken it over for a while
            for worker in self.home.network.hosts[name].variables["daemon"]._workers.values():
                if worker.state != "failed" and (name not in planned or worker.epoch != plans[0].epoch):
                    return f"{name} has a worker of epoch {worker.epoch}, epoch {plans[0].epoch} serves on {planned}"
        return ""

    async def _stop(self) -> None:
        """Stop the coordinators, then the agents, and look for what they leave behind."""
        home = self.home
        for name in home.random.sample(home.coordinators, len(home.coordinators)):
            home.note(f"stopping {name}")
            await self._terminate(home.serving[name])
            # A leader that hands over to a standby that has just ended leaves its workers for a minute: often enough.
            await asyncio.sleep(home.random.choice((0.0, 3.0, 3.0, 3.0)))
        deadline = home.loop.time() + ABANDONED_SECONDS
        while workers := [
            process
            for host in home.network.hosts.values()
            for process in host.processes
            if process.name.endswith("worker")
        ]:
            if home.loop.time() > deadline:
                self.violated("nothing leaks", f"{workers} still run {ABANDONED_SECONDS:g} s after the coordinator")
                break
            await asyncio.sleep(1.0)
        await asyncio.sleep(1.0)  # for the agents to clean up
        for name in home.devices:
            daemon = home.network.hosts[name].variables["daemon"]
            status = home.agents[name].context.copy().run(daemon.status_line)
            while status != "works for no coordinator; workers: none" and home.loop.time() < deadline:
                await asyncio.sleep(1.0)  # it keeps the record of a failed worker, as it would the worker
                status = home.agents[name].context.copy().run(daemon.status_line)
            if status != "works for no coordinator; workers: none":
                self.violated("nothing leaks", f"the agent {name} {status}")
            await self._terminate(home.agents[name])

    async def _terminate(self, process: Process) -> None:
        """SIGTERM; the process must end its tasks."""
        deadline = self.home.loop.time() + STOP_SECONDS
        while "signal 15" not in process.variables and self.home.loop.time() < deadline:
            await asyncio.sleep(0.1)  # it is starting
        handler = process.variables.get("signal 15")
        if not process.alive or handler is None:
            self.violated("nothing leaks", f"{process} was not running at the end")
            return
        handler()
        while process.tasks and self.home.loop.time() < deadline:
            await asyncio.sleep(0.1)
        if process.tasks:
            self.violated(
                "nothing leaks", f"{process} still runs {_task_names(process)} {STOP_SECONDS:g} s after SIGTERM"
            )


def _task_names(process: Process) -> list[str]:
    return sorted(str(getattr(task.get_coro(), "__qualname__", task)) for task in process.tasks)


class _ErrorLog(logging.Handler):
    """Collects logged errors, which only a bug causes."""

    def __init__(self, run: Run) -> None:
        super().__init__(logging.ERROR)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._run.violated("no unexpected exception", f"{record.getMessage()}: {error!r}")


def run_seed(seed: int) -> Outcome:
    """Run the schedule of one seed."""
    return run_schedule(generate(seed))


def run_schedule(schedule: Schedule, run_type: type[Run] = Run) -> Outcome:
    """Run a schedule, and check what must always hold."""
    with simulated(schedule.seed) as (loop, random, folder):
        home = Home(loop, random, folder, schedule)
        run = run_type(home, schedule)
        handler = _ErrorLog(run)
        logging.root.addHandler(handler)

        def task_failed(_: Any, context: dict[str, Any]) -> None:
            if "destroyed" not in context["message"]:
                run.violated(
                    "no unexpected exception",
                    f"{context['message']}: {context.get('exception')!r} in {context.get('future')!r}",
                )

        loop.set_exception_handler(task_failed)
        try:
            loop.run_until_complete(loop.create_task(run.main()))
        except Stuck as error:
            run.violated("no endless loop", str(error))
        finally:
            logging.root.removeHandler(handler)
            for host in home.network.hosts.values():
                for process in list(host.processes):
                    process.kill()
        for text in exclusive_epochs(home.history):
            run.violated("one plan at a time", text)
        for text in home.history.stale_workers:
            run.violated("no worker of another plan", text)
        for text in exclusive_leaders(home.history):
            run.violated("one leader at a time", text)
        for text in revoked_devices_idle(home.history):
            run.violated("a revoked device does not compute", text)
        for text in in_time(home.history):
            run.violated("every call ends by its deadline", text)
        for text in no_request_lost(home.history):
            run.violated("no request is lost", text)
        return Outcome(
            schedule,
            tuple(run.violations),
            tuple(f"{at:9.3f} {line}" for at, line in home.history.lines),
            max((each.ended - each.began for each in home.history.answers if each.ended is not None), default=0.0),
            sum(each.ended is not None for each in home.history.answers),
            loop.num_callbacks,
            loop.time(),
        )


# ---- many seeds ---------------------------------------------------------------------------------------------------------


def run_seeds(seeds: Sequence[int]) -> list[Outcome]:
    """Run seeds one after the other."""
    silence_process()
    return list(map(run_seed, seeds))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.run", description=__doc__)
    parser.add_argument("--seeds", required=True, metavar="A:B", help="seeds A to B-1, or one seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes to use")
    parser.add_argument("--verbose", action="store_true", help="print everything that the runs reported")
    parser.add_argument("--failures", type=int, default=10, help="failing seeds to print in full")
    parser.add_argument("--waits", action="store_true", help="print how long clients waited, by fault")
    parser.add_argument("--only", action="append", default=[], help="check only invariants whose name contains this")
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    began = time.monotonic()
    parts = [seeds[start : start + SEEDS_PER_PROCESS] for start in range(0, len(seeds), SEEDS_PER_PROCESS)]
    failing, callbacks, virtual = [], 0, 0.0
    counts: Counter[str] = Counter()
    waits: defaultdict[str, list[float]] = defaultdict(list)
    for outcomes in _in_processes(parts, options.jobs):
        for outcome in outcomes:
            callbacks += outcome.num_callbacks
            virtual += outcome.virtual_seconds
            if len(outcome.schedule.faults) <= 1:
                kind = outcome.schedule.faults[0].kind if outcome.schedule.faults else "no fault"
                waits[kind].append(outcome.slowest_seconds)
            violations = [
                (invariant, text)
                for invariant, text in outcome.violations
                if not options.only or any(name in invariant for name in options.only)
            ]
            if options.verbose:
                print(outcome.schedule, *outcome.lines, sep="\n")
            if violations:
                failing.append(outcome.schedule.seed)
                counts.update({invariant for invariant, _ in violations})
                if len(failing) <= options.failures:
                    print(outcome.schedule)
                    print(*(f"  VIOLATED {invariant}: {text}" for invariant, text in violations), sep="\n", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{len(seeds)} schedules, {virtual:.0f} virtual seconds, {callbacks} callbacks in {seconds:.1f} s: "
        f"{len(failing)} failed"
    )
    for invariant, number in counts.most_common():
        print(f"  {number:6} {invariant}")
    if options.waits:
        print("longest wait of a client in schedules with one fault, seconds: median, maximum, number of schedules")
        for kind, times in sorted(waits.items()):
            print(f"  {kind:18} {statistics.median(times):7.2f} {max(times):7.2f} {len(times):6}")
    if failing:
        print(f"  seeds {failing[:40]}")
    return 1 if failing else 0


def _in_processes(parts: Sequence[Sequence[int]], jobs: int) -> Iterator[list[Outcome]]:
    """Run each part in a copy of this process."""
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        yield from pool.imap(run_seeds, parts)


if __name__ == "__main__":
    start_reproducibly("simulation.run", main)
