"""Runs the trials of plans: each loaded beside the deployed plan, with requests in turns on both, while no client waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial

from coordinator.deploy.beside import loaded_beside, trial_name
from coordinator.deploy.deployment import RunResult
from coordinator.deploy.graph import Arrays, GraphDeployment
from coordinator.plan.graph.learning.elites import Elite
from coordinator.plan.graph.learning.halving import FIRST_REQUESTS, Arm, SuccessiveHalving
from coordinator.serve.kinds.graph import GraphKind
from coordinator.serve.kinds.kind import SharedServices
from coordinator.serve.planning.measurements import Measurements
from coordinator.serve.requests.admission import Admission
from hearth.errors import HearthError
from hearth.plan.plan import GraphPlan
from hearth.platform.asyncio_tools import loop_time
from hearth.wire.messages import PlanTrial, TrialOutcome

MAX_TRIAL_SHARE = 0.05  # of all requests may run on plans under trial, unless a user has asked to learn
# Time without a request of a client, after which a plan is loaded beside the deployed one, and the requests after which it is
# unloaded: loading, and a second worker on each device, make requests up to twice as slow (measured).
_IDLE_SECONDS, _MAX_CLIENT_REQUESTS = 5.0, 3
_QUEUE_PATIENCE_SECONDS = 5.0  # for which a loaded trial waits while requests queue, before it is unloaded
_QUEUE_POLL_SECONDS = 0.1


@dataclass
class Trials:
    """Plans under trial, for the devices that were usable when they were found."""

    elites: Sequence[Elite]
    usable: frozenset[str]
    halving: SuccessiveHalving = field(init=False)

    def __post_init__(self) -> None:
        self.halving = SuccessiveHalving(len(self.elites))

    def results(self) -> list[tuple[GraphPlan, PlanTrial]]:
        """Each plan with its result. `running` until `halving` has no next plan."""
        is_over, winner = self.halving.next() is None, self.halving.winner()
        found = []
        for number, (elite, arm) in enumerate(zip(self.elites, self.halving.arms, strict=True)):
            outcome: TrialOutcome = "not better"
            if not is_over or arm.has_failed:
                outcome = "failed" if arm.has_failed else "running"
            elif number == winner:
                outcome = "deployed"
            found.append((elite.plan, _result(elite, arm, outcome)))
        return found


class TrialRunner:
    """Runs trials on the devices. `is_asked()`: whether a user has asked to learn: then the home need not be idle."""

    def __init__(
        self,
        kind: GraphKind,
        services: SharedServices,
        admission: Admission[GraphDeployment],
        is_asked: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._kind = kind
        self._services = services
        self._admission = admission
        self._is_asked = is_asked
        self._clock = clock
        self._idle_since, self._num_requests = clock(), 0  # of clients, until then

    def may_begin(self, measured: Measurements) -> bool:
        """Whether a plan may be loaded now: the home is idle, and a first round is allowed."""
        if measured.num_requests != self._num_requests:
            self._idle_since, self._num_requests = self._clock(), measured.num_requests
        is_idle = self._is_asked() or self._clock() - self._idle_since >= _IDLE_SECONDS
        return is_idle and not self._admission.num_waiting and self._allows(FIRST_REQUESTS, measured)

    async def run(self, deployment: GraphDeployment, trials: Trials, measured: Measurements) -> None:
        """Load the plan whose turn it is, and run its requests of this round, as long as the guards allow it.

        Raises if the deployed plan fails; of a plan under trial, that only ends its trial.
        """
        number = trials.halving.next()
        assert number is not None
        most_requests = measured.num_requests + _MAX_CLIENT_REQUESTS
        measured.paused = True  # loading takes time from requests that run meanwhile
        try:
            async with self._loaded(deployment, trials.elites[number].plan) as trial:
                await self.timed(trial)  # a warm-up
                measured.paused = False
                while trials.halving.next() == number and await self._may_go_on(measured, most_requests):
                    seconds, incumbent_seconds = await self.timed(trial), await self.timed(deployment)
                    measured.count_trial_request(self._is_asked())
                    trials.halving.observe(number, seconds, incumbent_seconds)
        except HearthError as error:
            deployment.check_may_run()
            self._services.report(f"a plan could not be tried: {error}")
            trials.halving.fail(number)
        finally:
            measured.paused = False

    async def measure(self, deployment: GraphDeployment, measured: Measurements, num_requests: int) -> None:
        """Run requests of our own on the deployed plan until so many are measured, or one of a client waits."""
        while measured.num_observed_of(deployment.plan) < num_requests and not self._admission.num_waiting:
            result = await self._run_alone(deployment)
            measured.observe(deployment.plan, result, result.latency_seconds)

    async def timed(self, deployment: GraphDeployment) -> float:
        """The seconds of a request of our own, which runs alone."""
        return (await self._run_alone(deployment)).latency_seconds

    async def _run_alone(self, deployment: GraphDeployment) -> RunResult[Arrays]:
        async with self._admission.exclusively():
            return await self._kind.run_zeros(deployment)

    def _loaded(self, deployment: GraphDeployment, plan: GraphPlan) -> AbstractAsyncContextManager[GraphDeployment]:
        services = self._services
        make = partial(self._kind.deployment, name=trial_name(deployment.name))
        links, settings = services.profiler.links, services.settings
        return loaded_beside(services.fleet, plan, make, self._kind.weights, links, settings.encrypt_data_plane)

    def _allows(self, num_requests: int, measured: Measurements) -> bool:
        """Whether so many requests may run on a plan under trial now."""
        allowed = MAX_TRIAL_SHARE * measured.num_requests - measured.num_trial_requests
        return self._is_asked() or allowed >= num_requests

    async def _may_go_on(self, measured: Measurements, most_requests: int) -> bool:
        """Whether a loaded trial may run its next request; waits a little while requests of clients queue.

        Clients may have had `most_requests` until then.
        """
        if measured.num_requests > most_requests and not self._is_asked():
            return False
        until = loop_time() + _QUEUE_PATIENCE_SECONDS
        while self._admission.num_waiting and loop_time() < until:
            await asyncio.sleep(_QUEUE_POLL_SECONDS)
        return not self._admission.num_waiting and self._allows(1, measured)


def _result(elite: Elite, arm: Arm, outcome: TrialOutcome) -> PlanTrial:
    is_measured = arm.num_requests > 1
    return plan_trial(
        elite, arm.num_requests, arm.gain if is_measured else 0.0, arm.standard_error if is_measured else 0.0, outcome
    )


def plan_trial(elite: Elite, num_requests: int, gain: float, standard_error: float, outcome: TrialOutcome) -> PlanTrial:
    """The result of a plan's trial, as it is saved and shown."""
    return PlanTrial(
        planner=elite.plan.planner,
        devices=tuple(device.name for device in elite.plan.devices),
        predicted_seconds=elite.seconds,
        num_requests=num_requests,
        gain=gain,
        standard_error=standard_error,
        outcome=outcome,
    )
