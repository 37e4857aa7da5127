"""Plans anew in the background, while requests go on, when devices drifted or came; moves only where it pays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from coordinator.deploy.transformer import Deployment
from coordinator.devices.fleet import Fleet
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.plan.transformer.make import make_plan
from coordinator.plan.transformer.request import on_subset, price
from coordinator.serve.drift import COMPUTE_DRIFT, DriftMonitor, Reasons, Watch, explain, pays
from coordinator.serve.goal import Model, allowed, plan_request
from coordinator.serve.state import TransformerGoal
from hearth.errors import DeviceLost, HearthError, InternalError
from hearth.plan.plan import TransformerPlan
from hearth.plan.value_formats import Values
from hearth.platform.units import format_seconds

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between two looks for reasons to plan anew
_LINK_PAUSE_SECONDS = 5.0  # requests wait at most this long for the links of two devices to be measured


@dataclass(frozen=True)
class Served:
    """What runs now, and may be replaced by a better plan."""

    goal: TransformerGoal
    model: Model
    deployment: Deployment
    monitor: DriftMonitor
    values: Values | None  # the format of activations that an accuracy budget chose

    @property
    def plan(self) -> TransformerPlan:
        return self.deployment.plan


def failure_of(error: Exception) -> HearthError:
    """What is no HearthError is a fault of ours: it is logged whole, and the server lives on."""
    if isinstance(error, HearthError):
        return error
    log.error("a fault", exc_info=error)
    return InternalError(where="the coordinator", reason=f"{type(error).__name__}: {error}")


class Replanner:
    """One per server: it outlives deployments.

    `served` says what may be replaced now (None: nothing), `push` sends a plan's weights ahead, and `swap` moves to it;
    `stepping` is held by who uses the workers.
    """

    def __init__(
        self,
        fleet: Fleet,
        profiler: Profiler,
        stepping: asyncio.Lock,
        served: Callable[[], Served | None],
        push: Callable[[TransformerPlan], Awaitable[object]],
        swap: Callable[[Served, TransformerPlan], None],
        report: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._profiler = profiler
        self._stepping = stepping
        self._served = served
        self._push = push
        self._swap = swap
        self._report = report
        self._clock = clock
        self._watch = Watch()
        self._task: asyncio.Task[None] | None = None

    def lost(self, device_id: str) -> None:
        """A device was lost while it was in use."""
        self._watch.lost(device_id, self._clock())

    def restored(self, plan: TransformerPlan) -> None:
        """A saved plan is used: every other device is a newcomer."""
        self._watch.planned([device.device_id for device in plan.devices], self._clock())

    def considered(self, devices: Sequence[Device], plan: TransformerPlan) -> None:
        """`plan` is the best that could be made of `devices`."""
        ids = {device.device_id for device in devices}
        left_out = ids - {device.device_id for device in plan.devices}
        slow = [device_id for device_id in left_out if self._profiler.factor(device_id) > COMPUTE_DRIFT]
        self._watch.planned(ids, self._clock(), slow)

    async def run(self) -> None:
        """Look for reasons until cancelled."""
        try:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                served = self._served()
                if served is None:
                    continue
                usable = [device.device_id for device in allowed(served.goal, self._fleet.usable())]
                reasons = self._watch.due(usable, served.monitor.finding, self._clock())
                if reasons is not None:
                    self._task = asyncio.create_task(self._replan(served, reasons))
                    await asyncio.wait({self._task})
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Give up a new plan that is being made: what it would replace is going already."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _replan(self, served: Served, reasons: Reasons) -> None:
        """Move to a better plan, if there is one; its weights are pushed first. Nothing that fails here ends serving."""
        try:
            plan = await self._better_plan(served, reasons)
            if plan is not None:
                await self._push(plan)
                async with self._stepping:
                    self._swap(served, plan)
        except Exception as error:
            self._report(f"the plan stays, for no better one could be made: {failure_of(error)}")
        finally:
            if reasons.finding is not None:
                served.monitor.rebase()

    async def _better_plan(self, served: Served, reasons: Reasons) -> TransformerPlan | None:
        """A plan that gains enough over the one that is deployed, both priced under what is known now."""
        goal, model, plan = served.goal, served.model, served.plan
        devices = allowed(goal, self._fleet.usable())
        self.considered(devices, plan)  # now, so that one that cannot be measured is not tried again and again
        await self._refresh_profiles(devices, served, reasons)
        cluster = await self._profiler.cluster(devices, model.spec, model.seq_len)
        request = plan_request(goal, model, cluster, served.values, deployed=plan)
        members = tuple(device.device_id for device in plan.devices)
        if missing := set(members) - {device.device_id for device in cluster.devices}:
            names = [device.name for device in plan.devices if device.device_id in missing]
            raise DeviceLost(device=", ".join(names), reason="it could not be measured")
        new = await asyncio.to_thread(make_plan, request)
        old = price(on_subset(request, members), plan.body, plan.planner)
        before, after = seconds_of(old), seconds_of(new)
        why = explain(reasons, {device.device_id: device.name for device in devices})
        compared = f"a new one is predicted to take {format_seconds(after)} instead of {format_seconds(before)}"
        if not pays(after, before):
            self._report(f"{why}: the plan stays; {compared}")
            return None
        self.considered(devices, new)
        self._report(f"{why}: changing the plan; {compared}")
        return new

    async def _refresh_profiles(self, devices: Sequence[Device], served: Served, reasons: Reasons) -> None:
        """Bring in what was found, and measure what is new: links between requests, so that neither disturbs the other."""
        model, profiler = served.model, self._profiler
        if reasons.finding is not None:
            for device_id, factor in reasons.finding.factors.items():
                profiler.scale_device(device_id, factor)
            if reasons.finding.links_suspect:
                profiler.forget_links([device.device_id for device in served.plan.devices])
        for device in devices:
            if device.device_id in reasons.joined and profiler.factor(device.device_id) != 1.0:
                await profiler.look_again(device, model.spec, model.seq_len)
        for one, other in combinations(devices, 2):
            a, b = one.device_id, other.device_id
            if {(a, b), (b, a)} <= profiler.links.keys():
                continue
            async with self._stepping:
                try:
                    await asyncio.wait_for(profiler.measure_links([one, other]), _LINK_PAUSE_SECONDS)
                except asyncio.TimeoutError:
                    pass  # once more with all the others, while requests go on
