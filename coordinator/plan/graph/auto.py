"""Plan a graph for a cluster: a strategy places the operators, the graph is cut to match, the simulator prices the cut.

Candidates are each device alone and the plan of each strategy, within the devices' memory. `auto` takes the plan that the
simulator predicts to be the fastest. Pure: `clock` returns seconds and is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from coordinator.plan.graph.build import build_plan
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.memory import MAX_GRAPH_CHUNK_BYTES, reserved_bytes
from coordinator.plan.graph.placing import place_in_blocks, place_operators, solve_placement
from coordinator.plan.graph.request import GraphRequest, objective_seconds, restricted, stored_weights
from coordinator.plan.graph.tasks import tensor_transfers
from coordinator.plan.methods import GRAPH_METHODS, LOCAL, Method
from coordinator.plan.solution import (
    Candidate,
    OperatorAssignment,
    PlanningResult,
    SearchOptions,
    Solution,
    choose_candidate,
    with_reasons,
)
from coordinator.plan.stores import StorePlanning, plan_within_stores
from hearth.errors import HearthError, ModelDoesNotFit, NoPlacement
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_bytes
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES

if TYPE_CHECKING:
    from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy


# Per strategy: memory other than weights is known only once the operators are placed. Each attempt is a whole search.
_MAX_ATTEMPTS = 4
_BLOCKS = "blocks"  # the strategy of a plan that `place_in_blocks` made
GraphCandidate = Candidate[GraphPlan]
_TIE_TOLERANCE = 1.01  # within 1 % of the fastest, fewer devices win: each device is one more that can fail
# Of a search for which requests wait: with the rest of planning and the start of a planner process, a plan of 500 operators
# takes less than a second of processor time.
_RECOVERY_SECONDS = 0.52
_PROVEN_RATIO = 1 + 1e-6  # of value to bound, up to which a plan counts as proven optimal; allows for rounding
Clock = Callable[[], float]


def local_candidates(request: GraphRequest) -> Iterator[GraphCandidate]:
    """One candidate per device: the whole graph on that device."""
    for index, device in enumerate(request.cluster.devices):
        label = f"{LOCAL} on {device.name}"
        seconds = sum(row[index] for row in request.cluster.seconds)
        solution = Solution(OperatorAssignment((index,) * request.spec.num_operators), seconds)
        plan = build_plan(request, solution, LOCAL)
        missing_bytes = plan.devices[0].memory.total - device.budget_bytes
        yield (
            GraphCandidate.too_large(label, LOCAL, missing_bytes)
            if missing_bytes > 0
            else _make_candidate(label, LOCAL, plan, solution)
        )


def try_method(
    request: GraphRequest, method: Method, options: SearchOptions, policy: HomePolicy | None
) -> GraphCandidate:
    """Run one strategy; if nothing fits with the first estimate of memory other than weights, with the least one."""
    deadline = options.clock() + options.time_limit_seconds
    try:
        return _fitted_candidate(request, with_reserved_bytes(request), method, options, policy)
    except (ModelDoesNotFit, NoPlacement) as error:
        if not request.cluster.measured:
            return without_plan(method.name, error)
    left = options._replace(time_limit_seconds=max(0.0, deadline - options.clock()))
    try:
        return _fitted_candidate(request, _with_least_reserved(request), method, left, policy)
    except (ModelDoesNotFit, NoPlacement) as error:
        return without_plan(method.name, error)


def _fitted_candidate(
    request: GraphRequest, searched: GraphRequest, method: Method, options: SearchOptions, policy: HomePolicy | None
) -> GraphCandidate:
    """The plan of a strategy for the request as `searched`. If it exceeds a device's budget, reserve the excess and repeat.

    Strategies budget for weights alone; activations and other memory are known only once the plan is built. All attempts
    together keep the time limit: where a device has no room for the whole graph, each but the last takes half of what is
    left. Raises ModelDoesNotFit and NoPlacement.
    """
    name, deadline = method.name, options.clock() + options.time_limit_seconds
    weights = request.spec.parameter_bytes(range(request.spec.num_operators))
    for attempt in range(_MAX_ATTEMPTS):
        is_last = attempt == _MAX_ATTEMPTS - 1 or not request.cluster.measured
        is_roomy = all(device.room_bytes(weights) >= weights for device in searched.cluster.devices)
        left = max(0.0, deadline - options.clock())
        limited = options._replace(time_limit_seconds=left if is_last or is_roomy else left / 2)
        solution = place_operators(searched, method, limited, policy)
        plan = build_plan(request, solution, name)
        if reason := _why_not_sendable(request, plan):
            return Candidate(name, name, reason=reason)
        over = {device.device_id: device.memory.total - device.budget_bytes for device in plan.devices}
        if max(over.values()) <= 0:
            return _make_candidate(name, name, plan, solution)
        devices = searched.cluster.devices
        reserved = [each.reserved_bytes + max(over.get(each.device_id, 0), 0) for each in devices]
        searched = replace(searched, cluster=searched.cluster.with_reserved_bytes(reserved))
    return Candidate(name, name, reason="does not fit: no room for the memory it needs besides the weights")


def _why_not_sendable(request: GraphRequest, plan: GraphPlan) -> str:
    """Why live devices cannot run the plan: a tensor must fit in one message. Empty if they can."""
    if not request.cluster.measured:
        return ""
    largest = max(tensor_transfers(request.spec, plan.body.segments), key=lambda each: each.num_bytes, default=None)
    if largest is None or largest.num_bytes <= MAX_PAYLOAD_FRAME_BYTES:
        return ""
    return f"would send {largest.tensor}, whose {format_bytes(largest.num_bytes)} exceed the size limit of a message"


def without_plan(name: str, error: ModelDoesNotFit | NoPlacement) -> GraphCandidate:
    """The candidate of a strategy that raised this error."""
    if isinstance(error, ModelDoesNotFit) and error.missing_bytes:
        return GraphCandidate.too_large(name, name, error.missing_bytes)
    return Candidate(name, name, reason="found no placement within the devices' memory")


def with_reserved_bytes(request: GraphRequest) -> GraphRequest:
    """The request with a first estimate of the memory of each device that is not for weights."""
    reserved = reserved_bytes(request.spec, request.cluster)
    return replace(request, cluster=request.cluster.with_reserved_bytes(reserved))


def _with_least_reserved(request: GraphRequest) -> GraphRequest:
    """The request with weights in place, each once per device, and nothing reserved for activations."""
    cluster = request.cluster
    devices = tuple(
        replace(each, reserved_bytes=each.process_bytes + MAX_GRAPH_CHUNK_BYTES, load_bytes=0, loading_bytes=0)
        for each in cluster.devices
    )
    return replace(request, cluster=replace(cluster, devices=devices))


def _make_candidate(
    label: str, strategy: str, plan: GraphPlan, solution: Solution[OperatorAssignment]
) -> GraphCandidate:
    names = tuple(device.name for device in plan.devices)
    return Candidate(label, strategy, names, objective_seconds(plan), plan, solution)


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
                candidates.append(try_method(request, each, SearchOptions(limit, 0, clock), policy))
        chosen = choose_candidate(candidates, is_eligible, _TIE_TOLERANCE)
        if chosen is not None:
            break
    else:
        chosen = _in_blocks(request) if request.strategy == "auto" and request.objective == "latency" else None
        if chosen is None:
            raise _no_plan_error(request, candidates)
        candidates.append(chosen)
    others = [each for each in candidates if each is not chosen]
    if not has_several_devices:
        return with_reasons(_as_only_plan(chosen), others, request.strategy)
    return with_reasons(_with_bound(chosen, candidates), others, request.strategy)


def _in_blocks(request: GraphRequest) -> GraphCandidate | None:
    """A plan for devices with so little memory that the tensors of every other plan have no room; None if it has none, too."""
    solution = Solution(OperatorAssignment(place_in_blocks(with_reserved_bytes(request))), math.inf)
    plan = build_plan(request, solution, _BLOCKS)
    budgets = {device.device_id: device.budget_bytes for device in request.cluster.devices}
    if _why_not_sendable(request, plan) or any(each.memory.total > budgets[each.device_id] for each in plan.devices):
        return None
    return _make_candidate(_BLOCKS, _BLOCKS, plan, replace(solution, value=objective_seconds(plan)))


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


def _as_only_plan(chosen: GraphCandidate) -> GraphCandidate:
    """The candidate of a cluster of one device: as nothing else is possible, it is optimal."""
    solution, plan = chosen.solution, chosen.plan
    assert solution is not None
    assert plan is not None
    update = {"bound_seconds": objective_seconds(plan), "proven_optimal": True}
    plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=update)})
    return replace(chosen, plan=plan, solution=replace(solution, bound=solution.value, proven=True))


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
