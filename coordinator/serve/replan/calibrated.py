"""Plans a served graph again with the times that its requests have calibrated, and takes back a change that made it slower."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from coordinator.deploy.graph import GraphDeployment
from coordinator.devices.registry import Device
from coordinator.plan.limits import NamedDevice
from coordinator.serve.goal import allowed_devices
from coordinator.serve.kinds.graph import GraphKind
from coordinator.serve.kinds.kind import SharedServices
from coordinator.serve.kinds.measurements import Latency, Measurements
from coordinator.serve.replan.drift import REPLAN_SECONDS, is_clearly_faster
from coordinator.serve.replan.replanner import Replanner
from coordinator.serve.requests.runner import as_hearth_error
from coordinator.serve.state import Goal
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_seconds

MIN_OBSERVED = 10  # measured requests of a plan before its times count: outliers no longer decide
_POLL_SECONDS = 1.0  # between looks at whether there are new times
_SAVE_SECONDS = 300.0  # between writes of the calibration: an SD card wears out, and a restart loses little
_MOVED = 1.10  # a device's factor that changes by as much is a reason to plan again
# Between two searches. The first requests of a deployment may be slower than later ones: plans made ahead take processor time.
_SEARCH_AGAIN_SECONDS = 15.0
_WORSE = 1.02  # times the latency before: a change of plan that made requests slower than that is taken back
_MIN_STANDARD_ERRORS = 2.0  # by which the latency must have grown for that


@dataclass(frozen=True)
class _Change:
    """A change of plan that was predicted to gain, with the measured latency before."""

    before: GraphPlan
    after: GraphPlan
    latency: Latency


class CalibratedReplanner:
    """Background planning of one graph with calibrated times; outlives its deployments."""

    def __init__(
        self, kind: GraphKind, services: SharedServices, replanner: Replanner, clock: Callable[[], float]
    ) -> None:
        self._kind = kind
        self._services = services
        self._replanner = replanner
        self._clock = clock
        # Of the last search of this deployment: when, for which devices, and with which factors.
        self._searched: tuple[float, frozenset[str], dict[str, float]] | None = None
        self._change: _Change | None = None
        # Devices for which a predicted gain was none: no more searches there.
        self._misled: frozenset[str] = frozenset()

    async def run(self, goal: Goal, deployment: GraphDeployment) -> GraphPlan:
        """Wait for a plan that is clearly better than the deployed one, and return it. Errors do not end the deployment."""
        plan, self._searched = deployment.plan, None
        measured = self._kind.measurements(plan)
        assert measured is not None
        if self._change is not None and self._change.after.with_epoch(plan.epoch) != plan:
            self._change = None  # another plan came, for instance because a device was lost
        save_at = self._clock() + _SAVE_SECONDS
        try:
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                if self._clock() >= save_at:
                    await measured.save()
                    save_at = self._clock() + _SAVE_SECONDS
                devices = allowed_devices(goal, self._services.fleet.usable())
                try:
                    if (
                        before := self._plan_before_a_bad_change(devices, measured.latency(plan, MIN_OBSERVED))
                    ) is not None:
                        await self._replanner.push(before, deployment.name)
                        return before
                    if self._should_search(devices, measured, plan):
                        found = await self._faster_plan(devices, deployment, measured)
                        if found is not None:
                            return found
                except Exception as error:
                    failure = as_hearth_error(error)
                    self._services.report(f"the plan stays, because planning with measured times failed: {failure}")
                    await asyncio.sleep(REPLAN_SECONDS)
        finally:
            await measured.save()

    def _plan_before_a_bad_change(self, devices: Iterable[NamedDevice], now: Latency | None) -> GraphPlan | None:
        """The plan before the last change, if requests take clearly longer since then."""
        change = self._change
        if now is None or change is None:
            return None
        self._change = None
        longer_seconds = now.seconds - change.latency.seconds
        error_seconds = math.hypot(now.standard_error, change.latency.standard_error)
        text = f"{format_seconds(now.seconds)} a request instead of {format_seconds(change.latency.seconds)}"
        if now.seconds > _WORSE * change.latency.seconds and longer_seconds >= _MIN_STANDARD_ERRORS * error_seconds:
            self._misled = _ids(devices)
            self._services.report(f"the new plan is taken back: {text}")
            return change.before
        self._services.report(f"the new plan is kept: {text}")
        return None

    def _should_search(self, devices: Sequence[Device], measured: Measurements, plan: GraphPlan) -> bool:
        """Whether the deployed plan is measured, and there are new times or other devices since the last search."""
        ids = _ids(devices)
        if measured.num_observed_of(plan) < MIN_OBSERVED or self._change is not None:
            return False
        if len(ids) < 2 or ids == self._misled:
            return False
        if self._searched is None:
            return True
        at, before, factors = self._searched
        if self._clock() - at < _SEARCH_AGAIN_SECONDS:
            return False
        now = measured.calibration.device_factors()
        return ids != before or any(not 1 / _MOVED < now[each] / factors.get(each, 1.0) < _MOVED for each in now)

    async def _faster_plan(
        self, devices: Sequence[Device], deployment: GraphDeployment, measured: Measurements
    ) -> GraphPlan | None:
        """A plan that is predicted to be clearly faster, once its weights are sent; None if a device cannot be measured."""
        plan = deployment.plan
        self._searched = (self._clock(), _ids(devices), measured.calibration.device_factors())
        cluster = await self._kind.profile(devices, plan)
        if not _ids(plan.devices) <= _ids(cluster.devices):
            return None
        found, seconds, current_seconds = await self._kind.revise(cluster, deployment, in_background=True)
        if not is_clearly_faster(seconds, current_seconds):
            return None
        before = measured.latency(plan, MIN_OBSERVED)
        times = f"{format_seconds(seconds)} instead of {format_seconds(current_seconds)}"
        self._services.report(f"with the measured times, another plan is predicted to take {times}: changing the plan")
        await self._replanner.push(found, deployment.name)
        self._replanner.record_best_plan(devices, found)
        self._change = _Change(plan, found, before) if before is not None else None
        return found


def _ids(devices: Iterable[NamedDevice]) -> frozenset[str]:
    return frozenset(each.device_id for each in devices)
