"""Idle planner processes: after the loss of a device, the plan need not wait for a process to import its libraries.

One process of each kind of model that is served waits for the next plan. It is used once, and another one starts when the
coordinator has had time to serve again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from hearth.platform.asyncio_tools import cancel_all, with_timeout
from hearth.platform.child import Child
from hearth.platform.child_main import READY_LINE, SPARE

log = logging.getLogger(__name__)

PlannerKind = Literal["transformer", "graph"]
# What a plan of each kind imports, the module with `main` first. With CP-SAT, which takes 0.3 s to import and which plans after
# a loss do without, an idle process would hold 100 MB (RSS) instead of 52 (transformer) or 64 (graph).
_MODULES: dict[PlannerKind, tuple[str, ...]] = {
    "transformer": ("coordinator.serve.planners.child", "coordinator.plan.transformer.choose"),
    "graph": ("coordinator.serve.planners.child", "coordinator.serve.planners.policies"),
}
# From the start of serving or the end of a plan until the next process starts: requests that waited go first.
_REST_SECONDS = 5.0
_START_SECONDS = 120.0  # until it is ready, with low priority on a busy Raspberry Pi; one that takes longer hangs
_ATTEMPTS = 3  # of a start: what fails for want of memory or threads may succeed later


async def start_planner(kind: PlannerKind) -> Child:
    """Start a process that imports with low priority what a plan of this kind needs, and then waits for its task."""
    return await Child.start(SPARE, *_MODULES[kind], pipe_stderr=True)


class SparePlanners:
    """Keeps one idle process for each kind of which a plan may be needed soon."""

    def __init__(self) -> None:
        self.ready: dict[PlannerKind, Child] = {}  # that wait for a plan
        self._starting: dict[PlannerKind, asyncio.Task[None]] = {}
        self._kept: set[PlannerKind] = set()

    def keep(self, kind: PlannerKind, at_once: bool = False) -> None:
        """Keep a process of this kind from now on. `at_once`: start it now, since a plan is needed soon."""
        self._kept.add(kind)
        self.replace(kind, at_once)

    def replace(self, kind: PlannerKind, at_once: bool = False) -> None:
        """Start the next process in a while, if this kind is kept and has none that lives."""
        starting, ready = self._starting.get(kind), self.ready.get(kind)
        if kind in self._kept and (starting is None or starting.done()) and (ready is None or not ready.runs):
            self._starting[kind] = asyncio.create_task(self._start(kind, 0.0 if at_once else _REST_SECONDS))

    def take(self, kind: PlannerKind) -> Child | None:
        """The idle process of this kind, for one plan of the caller's; None if none is ready."""
        child = self.ready.pop(kind, None)
        return child if child is not None and child.runs else None

    async def close(self) -> None:
        """End all idle processes, and start no more."""
        self._kept.clear()
        await cancel_all(self._starting.values())
        children = list(self.ready.values())
        self.ready.clear()
        await asyncio.gather(*(child.kill() for child in children))

    async def _start(self, kind: PlannerKind, rest_seconds: float) -> None:
        for _ in range(_ATTEMPTS):
            await asyncio.sleep(rest_seconds)
            child = None
            try:
                child = await start_planner(kind)
                await with_timeout(_START_SECONDS, child.wait_for_line(READY_LINE))
                self.ready[kind], child = child, None
                return
            except (OSError, RuntimeError, asyncio.TimeoutError) as error:
                log.warning("no planner process is kept ready: %s", error or f"none was within {_START_SECONDS:g} s")
            finally:
                if child is not None:
                    await child.kill()
            rest_seconds = _REST_SECONDS
