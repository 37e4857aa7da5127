"""A controller that serves a model on a fake fleet, with a settable clock and captured log lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from support.fleets import FakeFleet
from support.planning import in_process_planning
from support.waiting import WAIT_LIMIT_SECONDS, until

from coordinator.devices.profiling import Profiler
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.goal import open_model
from coordinator.serve.kinds.kind import SharedServices
from coordinator.serve.model.controller import Controller
from coordinator.serve.replan import replanner as replanning
from coordinator.serve.state import Goal, SavedDeployment, StateFile
from hearth.plan.plan import Plan
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.messages import GetHiddenStates


def tools_for(folder: Path, fleet: Any, lines: list[str], provisional: bool = False, **settings: Any) -> SharedServices:
    made = CoordinatorSettings.model_validate({"state_dir": folder, "settle_seconds": 0, **settings})
    profiler = Profiler(fleet, folder / "profiles", lines.append, provisional)
    return SharedServices(fleet, profiler, made, StateFile(folder), lines.append, lambda name, done, total: None)


class ServedController:
    """A controller with its fleet. `now` is the time of its clock; `lines` are the reported lines."""

    def __init__(
        self,
        fleet: FakeFleet,
        folder: Path,
        goal: Goal,
        plan: Plan | None,
        running: Plan | None = None,
        **settings: Any,
    ) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.fleet = fleet
        self.tools = tools_for(folder, fleet, self.lines, **settings)
        self.controller = Controller(
            DEFAULT_DEPLOYMENT, SavedDeployment(goal=goal, plan=plan), open_model(goal), self.tools,
            clock=lambda: self.now, running=running,
        )  # fmt: skip

    @property
    def kind(self) -> Any:
        return self.controller.kind

    @property
    def plan(self) -> Any:
        return self.controller.plan

    @property
    def ready(self) -> bool:
        """Whether requests run at once: the queue is opened after the phase has begun."""
        return self.controller.lifecycle.phase == "serving" and self.controller.requests.admission.is_open

    async def until(self, what: Callable[[], object]) -> None:
        try:
            await until("what was waited for", what)
        except AssertionError as error:
            raise AssertionError(self.lines) from error

    async def hidden_states(self, num_tokens: int, timeout_seconds: float = 10.0) -> Any:
        """Send one request to an encoder; returns its rows [T,H]."""
        request = GetHiddenStates(timeout_seconds=timeout_seconds)
        reply = await self.kind.hidden_states(request, pack_array(np.ones(num_tokens, np.int32)))
        return unpack_array(reply.payload)

    async def wait_for_replanner(self) -> None:
        """Wait until the re-planner has checked at the present time and has completed any change of plan.

        It waits for a new plan before its next check, so the third check from now begins after the work of the first.
        """
        assert self.ready
        seen = self.fleet.num_usable_calls
        await self.until(lambda: self.fleet.num_usable_calls >= seen + 3)

    async def until_replanned(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Send requests until there is a new plan, and no more: later times would count as drift from the new plan."""
        before = self.plan

        async def asking() -> None:
            while self.plan is before:
                await ask()

        await asyncio.wait_for(asking(), WAIT_LIMIT_SECONDS)
        await self.until(lambda: self.ready and self.plan is not before)

    def names(self) -> str:
        return "".join(sorted(device.name for device in self.plan.devices))

    def count_lines(self, text: str) -> int:
        return sum(text in line for line in self.lines)

    def kill(self, name: str) -> None:
        """Let the device fall silent, and report it to the controller."""
        self.controller.device_changed(self.fleet.kill(name))

    def phases(self) -> list[str]:
        return [move.phase for move in self.controller.lifecycle.history]


@asynccontextmanager
async def serving(
    fleet: FakeFleet, folder: Path, goal: Goal, plan: Plan | None = None, **settings: Any
) -> AsyncIterator[ServedController]:
    """A served model until the context ends; the controller must not end before.

    It plans in this process. Searches stop when proven, however busy the machine: their clock stands still.
    """
    with in_process_planning(lambda: 0.0), mock.patch.object(replanning, "_POLL_SECONDS", 0.002):
        served = ServedController(fleet, folder, goal, plan, **settings)
        running = asyncio.create_task(served.controller.run())
        try:
            await served.until(lambda: served.ready or running.done())
            yield served
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await served.tools.spare_planners.close()
