"""Learns while a graph is served: plans again with calibrated times, and tries plans of about the same price when it is idle.

A plan is tried beside the deployed one, which goes on serving. Both run requests of the coordinator's own in turns, each only
when no request of a client waits. The stage of Doppler (arXiv 2505.23131) that learns on the real system, for a home.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.deploy.graph import GraphDeployment
from coordinator.devices.registry import Device
from coordinator.plan.graph.learning.elites import Elite, placement_key
from coordinator.plan.graph.learning.halving import MIN_STANDARD_ERRORS
from coordinator.serve.goal import allowed_devices
from coordinator.serve.kinds.graph import Alternatives, GraphKind
from coordinator.serve.kinds.kind import SharedServices
from coordinator.serve.planning.drift import REPLAN_SECONDS, is_clearly_faster
from coordinator.serve.planning.measurements import Latency, Measurements
from coordinator.serve.planning.plan_search import PlanSearch, device_ids
from coordinator.serve.planning.replanner import Replanner
from coordinator.serve.planning.trials import TrialRunner, Trials, plan_trial
from coordinator.serve.requests.admission import Admission
from coordinator.serve.requests.runner import as_hearth_error
from coordinator.serve.state import Goal
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_seconds
from hearth.wire import messages as wire

MIN_OBSERVED = 10  # measured requests of a plan before its times count: outliers no longer decide
_POLL_SECONDS = 1.0  # between looks at whether there is something to learn
_SAVE_SECONDS = 300.0  # between writes of what was learnt: an SD card wears out, and a restart loses little
_WORSE = 1.02  # times the latency before: a change of plan that made requests slower than that is taken back
_MAX_EMPTY_SEARCHES = 3  # in a row, with different seeds; then `hearth learn` has nothing left to try


@dataclass(frozen=True)
class _Change:
    """A change of plan that was predicted to gain: what was deployed before, and its measured latency.

    `key`: that of the new plan's placement.
    """

    plan: GraphPlan
    latency: Latency
    key: str


class Learner:
    """Learning of one served graph; outlives its deployments."""

    def __init__(
        self,
        kind: GraphKind,
        measurements: Measurements,
        services: SharedServices,
        admission: Admission[GraphDeployment],
        replanner: Replanner,
        clock: Callable[[], float],
    ) -> None:
        self._kind = kind
        self._measured = measurements  # of the graph that the deployed plan divides
        self._services = services
        self._replanner = replanner
        self._clock = clock
        self._asked_until = 0.0  # time until which a user has asked to learn
        self._num_empty = 0  # searches in a row that found nothing to try
        self._searches = PlanSearch(kind, clock)
        self._runner = TrialRunner(kind, services, admission, lambda: self.is_asked, clock)
        self._trials: Trials | None = None
        self._change: _Change | None = None
        self._misled: frozenset[str] = frozenset()  # devices for which a predicted gain was none: trials decide there
        self._deployed: GraphPlan | None = None
        self._doing = ""

    # ---- public API -----------------------------------------------------------------------------------------------

    def ask(self, seconds: float) -> None:
        """Learn now, for that long at most."""
        self._asked_until = self._clock() + seconds
        self._num_empty = 0

    @property
    def is_asked(self) -> bool:
        """Whether a user has asked to learn, and there is something left to learn."""
        return self._clock() < self._asked_until

    def status(self) -> wire.Learning:
        """What is shown to users."""
        measured, plan = self._measured, self._deployed
        num_requests = measured.num_observed_of(plan) if plan is not None else 0
        found = measured.agreement if num_requests else None
        trials = [each.trial for each in measured.trials]
        if self._trials is not None:
            trials += [trial for _, trial in self._trials.results() if trial.num_requests]
        return wire.Learning(
            state=self._doing or f"measures requests: {num_requests} so far",
            is_asked=self.is_asked,
            num_requests=num_requests,
            predicted_seconds=plan.predicted.latency_seconds if plan is not None else 0.0,
            measured_seconds=measured.median_seconds if num_requests else None,
            pearson=found.pearson if found else None,
            spearman=found.spearman if found else None,
            gain=1 - measured.remaining_time,
            trial_requests=measured.num_trial_requests + measured.num_asked_requests,
            trials=tuple(trials),
        )

    async def run(self, goal: Goal, deployment: GraphDeployment) -> GraphPlan:
        """Wait for a plan that is clearly better than the deployed one, and return it. Errors do not end the deployment."""
        self._trials, self._deployed = None, deployment.plan
        self._searches.begin()
        self._measured = self._kind.measurements(deployment.plan) or self._measured
        if self._change is not None and self._change.key != placement_key(deployment.plan):
            self._change = None  # another plan came, for instance because a device was lost
        save_at = self._clock() + _SAVE_SECONDS
        try:
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                if self._clock() >= save_at:
                    self._measured.save()
                    save_at = self._clock() + _SAVE_SECONDS
                try:
                    plan = await self._step(goal, deployment)
                except Exception as error:
                    self._services.report(f"the plan stays, because learning failed: {as_hearth_error(error)}")
                    self._trials = None
                    await asyncio.sleep(REPLAN_SECONDS)
                    continue
                if plan is not None:
                    return plan
        finally:
            self._trials, self._doing = None, ""
            self._measured.save()

    # ---- what to do next ------------------------------------------------------------------------------------------

    async def _step(self, goal: Goal, deployment: GraphDeployment) -> GraphPlan | None:
        """Do the next thing; returns a plan to deploy."""
        if (before := self._plan_before_a_bad_change(goal, deployment.plan)) is not None:
            await self._replanner.push(before, deployment.name)
            return before
        if self.is_asked and self._measured.num_observed_of(deployment.plan) < MIN_OBSERVED:
            self._doing = "measures the deployed plan"
            await self._runner.measure(deployment, self._measured, MIN_OBSERVED)
        elif (trials := self._trials) is not None:
            if not trials.usable <= self._usable(goal):
                self._services.report("a device was lost: all trials of plans end")
                self._trials = None
            elif trials.halving.next() is None:
                return self._conclude(deployment.plan, trials)
            else:
                await self._try_next(deployment, trials)
        elif self._is_policy_due(goal):
            return await self._learn_policy(goal, deployment)
        elif self._should_search(goal, deployment.plan):
            return await self._search(goal, deployment)
        return None

    def _plan_before_a_bad_change(self, goal: Goal, plan: GraphPlan) -> GraphPlan | None:
        """The plan before the last change, if requests take clearly longer since then."""
        now, change = self._measured.latency(plan, MIN_OBSERVED), self._change
        if now is None or change is None:
            return None
        self._change = None
        ratio, before = now.seconds / change.latency.seconds, change.latency
        error = (now.standard_error**2 + before.standard_error**2) ** 0.5
        is_worse = ratio > _WORSE and now.seconds - before.seconds >= MIN_STANDARD_ERRORS * error
        text = f"{format_seconds(now.seconds)} a request instead of {format_seconds(before.seconds)}"
        elite = Elite(plan, plan.predicted.latency_seconds)
        outcome: wire.TrialOutcome = "not better" if is_worse else "deployed"
        result = plan_trial(elite, MIN_OBSERVED, 1 - ratio, error / before.seconds, outcome)
        self._measured.record_trials(change.plan, [(plan, result)])
        if is_worse:
            self._misled = self._usable(goal)
            self._services.report(f"the new plan is taken back: {text}")
            return change.plan
        self._measured.remaining_time *= min(ratio, 1.0)
        self._services.report(f"the new plan is kept: {text}")
        return None

    def _should_search(self, goal: Goal, plan: GraphPlan) -> bool:
        """Whether there is a new reason to look for plans: new times, other devices, or a user who asks."""
        if len(self._usable(goal)) < 2:
            self._asked_until, self._doing = 0.0, "there is only one device"
            return False
        if self._measured.num_observed_of(plan) < MIN_OBSERVED or self._change is not None:
            return False
        return self.is_asked or self._searches.is_due(self._usable(goal), self._measured)

    def _is_policy_due(self, goal: Goal) -> bool:
        """Whether the planner's policy should learn: there are other devices, or more plans were measured."""
        return self._change is None and self._searches.is_policy_due(self._usable(goal), self._measured)

    def _usable(self, goal: Goal) -> frozenset[str]:
        return device_ids(allowed_devices(goal, self._services.fleet.usable()))

    # ---- looking for plans ----------------------------------------------------------------------------------------

    async def _learn_policy(self, goal: Goal, deployment: GraphDeployment) -> GraphPlan | None:
        """Let the planner's policy learn on the devices, and keep it. Returns a plan that is clearly faster."""
        devices = allowed_devices(goal, self._services.fleet.usable())
        self._doing = f"lets the planner learn for {format_seconds(self._kind.learn_seconds)}"
        found = await self._searches.learn_policy(devices, deployment, self._measured)
        self._doing = ""
        if found is None:
            return None
        for note in found.notes:
            self._services.report(note)
        return await self._faster(devices, deployment, found, "after learning")

    async def _search(self, goal: Goal, deployment: GraphDeployment) -> GraphPlan | None:
        """Search with the calibrated times. Returns a plan that is clearly faster, or prepares trials of some others."""
        self._doing = "looks for plans with the measured times"
        devices, plan = allowed_devices(goal, self._services.fleet.usable()), deployment.plan
        found = await self._searches.search(devices, deployment, self._measured)
        if found is None:
            return None
        if (faster := await self._faster(devices, deployment, found, "with the measured times")) is not None:
            return faster
        elites = await self._searches.worth_a_trial(plan, found)
        self._num_empty = 0 if elites else self._num_empty + 1
        if elites:
            self._trials = Trials(elites, device_ids(devices))
        if self._num_empty >= _MAX_EMPTY_SEARCHES:
            self._asked_until = 0.0
        self._doing = f"{len(elites)} plans to try" if elites else "no other plan is worth a trial"
        return None

    async def _faster(
        self, devices: Sequence[Device], deployment: GraphDeployment, found: Alternatives, when: str
    ) -> GraphPlan | None:
        """The best of the plans found, once its weights are sent, if it is predicted to be clearly faster."""
        incumbent = found.incumbent
        best = min(found.elites, key=lambda each: each.seconds, default=incumbent)
        if not is_clearly_faster(best.seconds, incumbent.seconds) or device_ids(devices) == self._misled:
            return None
        before = self._measured.latency(deployment.plan, MIN_OBSERVED)
        times = f"{format_seconds(best.seconds)} instead of {format_seconds(incumbent.seconds)}"
        self._services.report(f"{when}, another plan is predicted to take {times}: changing the plan")
        await self._replanner.push(best.plan, deployment.name)
        self._replanner.record_best_plan(devices, best.plan)
        self._change = _Change(deployment.plan, before, placement_key(best.plan)) if before is not None else None
        return best.plan

    # ---- trials ---------------------------------------------------------------------------------------------------

    async def _try_next(self, deployment: GraphDeployment, trials: Trials) -> None:
        """Run requests on the plan whose turn it is, if the guards allow it."""
        number = trials.halving.next()
        if number is None or not self._runner.may_begin(self._measured):
            return
        plan = trials.elites[number].plan
        names = ", ".join(device.name for device in plan.devices)
        self._doing = f"tries plan {number + 1} of {len(trials.elites)}: {plan.planner} on {names}"
        await self._runner.run(deployment, trials, self._measured)

    def _conclude(self, plan: GraphPlan, trials: Trials) -> GraphPlan | None:
        """Record the trials; returns the plan that won, if one did."""
        results, winner = trials.results(), trials.halving.winner()
        self._trials = None
        self._measured.record_trials(plan, results)
        self._doing = f"{len(results)} plans were tried"
        if winner is None:
            return None
        best, trial = results[winner]
        self._measured.remaining_time *= 1 - trial.gain
        gain, error = f"{100 * trial.gain:.1f} %", f"{100 * trial.standard_error:.1f} %"
        self._services.report(
            f"changing the plan: {trial.planner} on {', '.join(trial.devices)} takes {gain} less time "
            f"(standard error {error}, {trial.num_requests} requests)"
        )
        return best
