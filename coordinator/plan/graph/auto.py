"""Plan a graph for a cluster: a strategy places the operators, the graph is cut to match, the simulator prices the cut.

`auto` takes the plan that the simulator predicts to be the fastest; one device alone is always among the candidates.
Pure: `clock` returns seconds and is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from coordinator.plan.graph.candidates import (
    GraphCandidate,
    local_candidates,
    try_method,
    with_reserved_bytes,
    without_plan,
)
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.methods import GRAPH_METHODS, LOCAL
from coordinator.plan.graph.placing import solve_placement
from coordinator.plan.graph.request import GraphRequest, objective_seconds
from coordinator.plan.graph.stored import restricted, stored_weights
from coordinator.plan.methods import Method
from coordinator.plan.solution import Candidate, PlanningResult, SearchOptions, choose_candidate, with_reasons
from coordinator.plan.stores import StorePlanning, plan_within_stores
from hearth.errors import HearthError, ModelDoesNotFit, NoPlacement
from hearth.plan.plan import GraphPlan

if TYPE_CHECKING:
    from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy

_TIE_TOLERANCE = 1.01  # within 1 % of the fastest, fewer devices win: each device is one more that can fail
# Of a search for which requests wait: with the rest of planning and the start of a planner process, a plan of 500 operators
# takes less than a second of processor time.
_RECOVERY_SECONDS = 0.52
_PROVEN_RATIO = 1 + 1e-6  # of value to bound, up to which a plan counts as proven optimal; allows for rounding
Clock = Callable[[], float]


def plan_graph(
    request: GraphRequest,
    clock: Clock,
    progress: Callable[[str], None] = lambda strategy: None,
    policy: HomePolicy | None = None,
) -> PlanningResult[GraphPlan]:
    """Plan with the requested strategy, or with the best one for `auto`; return the plan and all other candidates.

    `policy` is that of `doppler`, which plans without one if it is None.

    With a single device in the cluster, the result is that device alone, whatever the strategy. Devices get no more weights
    than their stores have room for. Raises ModelDoesNotFit, StoresTooSmall, NoPlacement and BadSetting.
    """
    planning = StorePlanning[GraphRequest, GraphPlan](
        lambda each: _plan_graph(each, clock, policy, progress), restricted, partial(stored_weights, request.spec)
    )
    held = stored_weights(request.spec, request.held)
    return plan_within_stores(planning, request, request.cluster.devices, held)


def _plan_graph(
    request: GraphRequest, clock: Clock, policy: HomePolicy | None, progress: Callable[[str], None]
) -> PlanningResult[GraphPlan]:
    """As `plan_graph`, whatever the stores have room for."""
    has_several_devices = len(request.cluster.devices) > 1
    candidates = list(local_candidates(request))

    def is_eligible(each: GraphCandidate) -> bool:
        return each.plan is not None and (not has_several_devices or request.strategy in ("auto", each.strategy))

    for methods in _in_order_of_urgency(request):
        for each in methods:
            if each.name != LOCAL and has_several_devices and not _is_superfluous(each, request.strategy, candidates):
                progress(each.name)
                limit = _time_limit(each, request.strategy, request.time_limit_seconds)
                if request.recovering and each.recovers:
                    limit = min(limit, _RECOVERY_SECONDS)
                candidates.append(try_method(request, each, SearchOptions(limit, request.seed, clock), policy))
        chosen = choose_candidate(candidates, is_eligible, _TIE_TOLERANCE)
        if chosen is not None:
            break
    else:
        raise _no_plan_error(request, candidates)
    others = [each for each in candidates if each is not chosen]
    return with_reasons(_with_bound(chosen, candidates), others, request.strategy)


def _in_order_of_urgency(request: GraphRequest) -> list[list[Method]]:
    """The methods to try: those of each list only if those before found no plan."""
    methods = GRAPH_METHODS.select(request.strategy, request.objective)
    first = [each for each in methods if each.recovers] if request.recovering else []
    return [first, [each for each in methods if each not in first]] if first else [methods]


def _is_superfluous(method: Method, strategy: str, candidates: Iterable[GraphCandidate]) -> bool:
    """Whether `auto` leaves out a method, since one before it has proven its placement to be optimal."""
    is_limited = strategy == "auto" and method.auto_seconds < math.inf
    return is_limited and any(each.solution is not None and each.solution.proven for each in candidates)


def _time_limit(method: Method, strategy: str, seconds: float) -> float:
    return min(seconds, method.auto_seconds) if strategy == "auto" else seconds


def _with_bound(chosen: GraphCandidate, candidates: Iterable[GraphCandidate]) -> GraphCandidate:
    """The chosen candidate with the best lower bound: a bound proven by one planner holds for all of them."""
    solution, plan = chosen.solution, chosen.plan
    assert solution is not None
    bound = min(max(each.solution.bound for each in candidates if each.solution), solution.value)
    proven = solution.proven or (bound > 0 and solution.value <= bound * _PROVEN_RATIO)
    chosen = replace(chosen, solution=replace(solution, bound=bound, proven=proven))
    if plan is None:
        return chosen
    predicted = plan.predicted.model_copy(
        update={
            "bound_seconds": bound or None,
            "proven_optimal": bound > 0 and objective_seconds(plan) <= bound * _PROVEN_RATIO,
        }
    )
    return replace(chosen, plan=plan.model_copy(update={"predicted": predicted}))


def _no_plan_error(request: GraphRequest, candidates: Iterable[GraphCandidate]) -> HearthError:
    """The error to raise: nothing fits, or the requested strategy found no placement."""
    spec = request.spec
    weights = spec.parameter_bytes(range(spec.num_operators))
    missing = weights - sum(device.room_bytes(weights) for device in with_reserved_bytes(request).cluster.devices)
    if missing > 0:
        return ModelDoesNotFit(model=spec.name, missing_bytes=missing)
    if request.strategy == LOCAL:
        return ModelDoesNotFit(model=spec.name, missing_bytes=min(each.missing_bytes for each in candidates))
    return NoPlacement(graph=spec.name, strategy=request.strategy)


def plan_instance(
    problem: PlacementProblem,
    strategy: str,
    time_limit_seconds: float,
    clock: Clock,
    progress: Callable[[str], None] = lambda strategy: None,
) -> PlanningResult[GraphPlan]:
    """Like `plan_graph`, but for a placement problem without a graph: candidates have no plan.

    Raises ModelDoesNotFit, NoPlacement and BadSetting.
    """
    candidates: list[GraphCandidate] = []
    for each in GRAPH_METHODS.select(strategy, "latency"):
        if _is_superfluous(each, strategy, candidates):
            continue
        progress(each.name)
        try:
            limit = _time_limit(each, strategy, time_limit_seconds)
            solution = solve_placement(problem, each.name, SearchOptions(limit, 0, clock))
            used = tuple(problem.devices[device] for device in dict.fromkeys(solution.assignment.devices))
            candidates.append(Candidate(each.name, each.name, used, solution.value, solution=solution))
        except (ModelDoesNotFit, NoPlacement) as error:
            candidates.append(without_plan(each.name, error))
            failure = error
    chosen = min(candidates, key=lambda each: each.seconds)
    if chosen.solution is None:
        raise failure
    return with_reasons(_with_bound(chosen, candidates), (each for each in candidates if each is not chosen), strategy)
