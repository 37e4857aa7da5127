"""Searches for plans of a served graph with the times that requests have taught: when one is due, and what it finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from coordinator.deploy.graph import GraphDeployment
from coordinator.devices.registry import Device
from coordinator.plan.graph.learning.elites import Elite, choose_elites, fits_beside, placement_key
from coordinator.plan.graph.learning.measured_plans import MeasuredPlan
from coordinator.plan.limits import NamedDevice
from coordinator.serve.kinds.graph import Alternatives, GraphKind
from coordinator.serve.planning.measurements import Measurements
from hearth.plan.plan import GraphPlan

_MOVED = 1.10  # a device's factor that changes by as much is a reason to plan again
# Between two searches. The first requests of a deployment may be slower than later ones: plans made ahead take processor time.
_SEARCH_AGAIN_SECONDS = 15.0


class PlanSearch:
    """Searches of one served graph; outlives its deployments. Every search has another seed."""

    def __init__(self, kind: GraphKind, clock: Callable[[], float]) -> None:
        self._kind = kind
        self._clock = clock
        self._seed = 0
        # Of the last search of this deployment: when, for which devices, and with which factors.
        self._searched: tuple[float, frozenset[str], dict[str, float]] | None = None
        # For what the policy of the planner has learnt: devices, and the measured plans of which it has learnt.
        self._learnt: tuple[frozenset[str], tuple[MeasuredPlan, ...]] | None = None

    def begin(self) -> None:
        """Begin with another deployment."""
        self._searched = None

    def is_due(self, usable: frozenset[str], measured: Measurements) -> bool:
        """Whether there are new times or other devices since the last search of this deployment."""
        if self._searched is None:
            return True
        at, before, factors = self._searched
        if self._clock() - at < _SEARCH_AGAIN_SECONDS:
            return False
        now = measured.calibration.device_factors()
        moved = any(not 1 / _MOVED < now[each] / factors.get(each, 1.0) < _MOVED for each in now)
        return moved or usable != before

    def is_policy_due(self, usable: frozenset[str], measured: Measurements) -> bool:
        """Whether there are other devices, or more plans were measured, since the planner's policy learnt."""
        return self._kind.learn_seconds > 0 and len(usable) > 1 and (usable, measured.plans) != self._learnt

    async def search(
        self, devices: Sequence[Device], deployment: GraphDeployment, measured: Measurements
    ) -> Alternatives | None:
        """Search with the calibrated times. Returns what `_find` does."""
        self._searched = (self._clock(), device_ids(devices), measured.calibration.device_factors())
        return await self._find(devices, deployment, measured)

    async def learn_policy(
        self, devices: Sequence[Device], deployment: GraphDeployment, measured: Measurements
    ) -> Alternatives | None:
        """Let the planner's policy learn on the devices, and keep it. Returns what `_find` does."""
        before, self._learnt = self._learnt, (device_ids(devices), measured.plans)
        try:
            return await self._find(devices, deployment, measured, self._kind.learn_seconds)
        except asyncio.CancelledError:  # the deployment ended: it learns in the next one
            self._learnt = before
            raise

    async def worth_a_trial(self, plan: GraphPlan, found: Alternatives) -> list[Elite]:
        """Of the plans found, those to try beside the deployed `plan`: in place, and of about the same price."""
        elites = choose_elites(found.elites, found.incumbent) if plan.body.objective == "latency" else []
        elites = [each for each in elites if fits_beside(each.plan, plan, found.budget_bytes)]
        return [each for each in elites if await self._kind.is_in_place(each.plan)]

    async def _find(
        self, devices: Sequence[Device], deployment: GraphDeployment, measured: Measurements, learn_seconds: float = 0.0
    ) -> Alternatives | None:
        """Plans that had no trial against the deployed one; None if a device of that one cannot be measured."""
        cluster = await self._kind.profile(devices, deployment.plan)
        if not device_ids(deployment.plan.devices) <= device_ids(cluster.devices):
            return None
        found = await self._kind.alternatives(cluster, deployment, self._seed, learn_seconds)
        self._seed += 1
        tried = measured.tried(deployment.plan)
        return found._replace(elites=[each for each in found.elites if placement_key(each.plan) not in tried])


def device_ids(devices: Iterable[NamedDevice]) -> frozenset[str]:
    """The ids of devices, to compare sets of devices."""
    return frozenset(each.device_id for each in devices)
