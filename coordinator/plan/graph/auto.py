"""Plan a graph for a cluster: a strategy places the operators, the graph is cut to match, the simulator prices the cut.

`auto` takes the plan that the simulator predicts to be the fastest; one device alone is always among the candidates.
Pure: `clock` returns seconds and is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from coordinator.models.onnx.cutting import cut
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.latency.coarsening import coarsen
from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from coordinator.plan.graph.learning.measured_plans import MeasuredPlacement, measured_placements
from coordinator.plan.graph.memory import memory_by_rank, reserved_bytes
from coordinator.plan.graph.methods import GRAPH_METHODS, LOCAL
from coordinator.plan.graph.predict import predict_segments
from coordinator.plan.graph.rebalance import rebalance
from coordinator.plan.graph.request import GraphRequest, objective_seconds
from coordinator.plan.graph.stored import held_devices, restricted, stored_weights
from coordinator.plan.graph.tasks import coordinator_cpu_seconds, lone_cpu_seconds, segment_seconds, tensor_transfers
from coordinator.plan.graph.throughput.planners import plan_pipeline
from coordinator.plan.graph.wire import with_wire_sizes
from coordinator.plan.methods import Method
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
from hearth.plan.graph import GraphModel, GraphSegments
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.parts import PlannedDevice, Prediction
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_bytes
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES

if TYPE_CHECKING:
    from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy

_TIE_TOLERANCE = 1.01  # within 1 % of the fastest, fewer devices win: each device is one more that can fail
# Per strategy: memory other than weights is known only once the operators are placed. Each attempt is a whole search.
_MAX_ATTEMPTS = 4
# Of a search for which requests wait: with the rest of planning, a plan of 500 operators takes less than a second.
_RECOVERY_SECONDS = 0.4
_PROVEN_RATIO = 1 + 1e-6  # of value to bound, up to which a plan counts as proven optimal; allows for rounding
Clock = Callable[[], float]
GraphCandidate = Candidate[GraphPlan]


# ---- graphs -----------------------------------------------------------------------------------------------------------


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
    candidates = list(_local_candidates(request))

    def is_eligible(each: GraphCandidate) -> bool:
        return each.plan is not None and (not has_several_devices or request.strategy in ("auto", each.strategy))

    for methods in _in_order_of_urgency(request):
        for each in methods:
            if each.name != LOCAL and has_several_devices and not _is_superfluous(each, request.strategy, candidates):
                progress(each.name)
                limit = _time_limit(each, request.strategy, request.time_limit_seconds)
                if request.recovering and each.recovers:
                    limit = min(limit, _RECOVERY_SECONDS)
                candidates.append(_try_method(request, each, SearchOptions(limit, request.seed, clock), policy))
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


def _make_candidate(
    label: str, strategy: str, plan: GraphPlan, solution: Solution[OperatorAssignment]
) -> GraphCandidate:
    names = tuple(device.name for device in plan.devices)
    return Candidate(label, strategy, names, objective_seconds(plan), plan, solution)


def _no_plan_error(request: GraphRequest, candidates: Iterable[GraphCandidate]) -> HearthError:
    """The error to raise: nothing fits, or the requested strategy found no placement."""
    spec = request.spec
    weights = spec.parameter_bytes(range(spec.num_operators))
    missing = weights - sum(device.room_bytes(weights) for device in _with_reserved_bytes(request).cluster.devices)
    if missing > 0:
        return ModelDoesNotFit(model=spec.name, missing_bytes=missing)
    if request.strategy == LOCAL:
        return ModelDoesNotFit(model=spec.name, missing_bytes=min(each.missing_bytes for each in candidates))
    return NoPlacement(graph=spec.name, strategy=request.strategy)


def _local_candidates(request: GraphRequest) -> Iterator[GraphCandidate]:
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


# ---- strategies -------------------------------------------------------------------------------------------------------


def _try_method(
    request: GraphRequest, method: Method, options: SearchOptions, policy: HomePolicy | None
) -> GraphCandidate:
    """Run one strategy. If its plan exceeds a device's budget, reserve the excess there and run it again.

    Strategies budget for weights alone; activations and other memory are known only once the plan is built.
    """
    name = method.name
    request = _with_reserved_bytes(request)
    try:
        for _ in range(_MAX_ATTEMPTS):
            solution = _solve(request, method, options, policy)
            plan = build_plan(request, solution, name)
            if reason := _why_not_sendable(request, plan):
                return Candidate(name, name, reason=reason)
            over = {device.device_id: device.memory.total - device.budget_bytes for device in plan.devices}
            if max(over.values()) <= 0:
                return _make_candidate(name, name, plan, solution)
            devices = request.cluster.devices
            reserved = [each.reserved_bytes + max(over.get(each.device_id, 0), 0) for each in devices]
            request = replace(request, cluster=request.cluster.with_reserved_bytes(reserved))
    except (ModelDoesNotFit, NoPlacement) as error:
        return _without_plan(name, error)
    return Candidate(name, name, reason="does not fit: no room for the memory it needs besides the weights")


def _why_not_sendable(request: GraphRequest, plan: GraphPlan) -> str:
    """Why live devices cannot run the plan: a tensor must fit in one message. Empty if they can."""
    if not request.cluster.measured:
        return ""
    largest = max(tensor_transfers(request.spec, plan.body.segments), key=lambda each: each.num_bytes, default=None)
    if largest is None or largest.num_bytes <= MAX_PAYLOAD_FRAME_BYTES:
        return ""
    return f"would send {largest.tensor}, whose {format_bytes(largest.num_bytes)} exceed the size limit of a message"


def _without_plan(name: str, error: ModelDoesNotFit | NoPlacement) -> GraphCandidate:
    if isinstance(error, ModelDoesNotFit) and error.missing_bytes:
        return GraphCandidate.too_large(name, name, error.missing_bytes)
    return Candidate(name, name, reason="found no placement within the devices' memory")


def _with_reserved_bytes(request: GraphRequest) -> GraphRequest:
    reserved = reserved_bytes(request.spec, request.cluster)
    return replace(request, cluster=request.cluster.with_reserved_bytes(reserved))


def _solve(
    request: GraphRequest, method: Method, options: SearchOptions, policy: HomePolicy | None
) -> Solution[OperatorAssignment]:
    """Assign operators to devices with one strategy.

    For latency, operators that onnxruntime fuses are placed together, and bounds hold for such placements only.
    Raises ModelDoesNotFit and NoPlacement.
    """
    spec, cluster, rates = request.spec, request.cluster, request.cluster.bytes_per_second
    weights = spec.parameter_bytes(range(spec.num_operators))
    rooms = [device.room_bytes(weights) for device in cluster.devices]
    spec = with_wire_sizes(spec, request.wire.values)
    if request.objective == "throughput":
        solution = plan_pipeline(
            spec, _with_coordinator_transfers(request.spec, cluster), rooms, rates, method.name, options
        )
        return rebalance(request, solution, rooms) if method.rebalances and cluster.measured else solution
    coarse = coarsen(spec)
    seconds = coarse.group_seconds(cluster.seconds)
    problem = placement_problem(
        coarse.spec,
        seconds,
        rooms,
        rates,
        cluster.latency_seconds,
        request.congestion,
        partial(lone_cpu_seconds, cluster),
    )
    held = held_devices(request)
    pins = {index: held[group[0]] for index, group in enumerate(coarse.groups) if group[0] in held}
    ids = [device.device_id for device in cluster.devices]
    measured = measured_placements(request.measured, ids, coarse.groups)
    solution = _solve_placement(problem, method.name, options, pins, policy, measured)
    devices = coarse.expand_assignment(solution.assignment.devices)
    starts = coarse.operator_starts(solution.assignment.starts, devices, cluster.seconds)
    return solution.with_assignment(OperatorAssignment(devices, starts))


def _with_coordinator_transfers(spec: GraphSpec, cluster: GraphCluster) -> list[list[float]]:
    """[n][K]: seconds of each operator on each device.

    On live devices, operators that consume the graph's inputs or produce its outputs also pay for the transfer from or
    to the coordinator.
    """
    seconds = [list(row) for row in cluster.seconds]
    if cluster.measured:
        transfers = [(min(tensor.consumers), tensor) for tensor in spec.inputs if tensor.consumers]
        transfers += [(tensor.source, tensor) for tensor in spec.outputs if tensor.source is not None]
        for operator, tensor in transfers:
            for device in range(len(cluster.devices)):
                seconds[operator][device] += coordinator_cpu_seconds(cluster, device, tensor.num_bytes)
    return seconds


def _solve_placement(
    problem: PlacementProblem,
    strategy: str,
    options: SearchOptions,
    held: Mapping[int, int] | None = None,
    policy: HomePolicy | None = None,
    measured: Sequence[MeasuredPlacement] = (),
) -> Solution[OperatorAssignment]:
    """Solve a placement problem with one latency strategy. `held`: the devices of operators in the deployed plan.

    Solvers are imported on first use, since the import takes half a second. Raises ModelDoesNotFit and NoPlacement.
    """
    if strategy == "moirai":
        from coordinator.plan.graph.latency.moirai import solve_moirai

        solution = solve_moirai(problem, options.time_limit_seconds, options.clock)
    elif strategy == "doppler":
        from coordinator.plan.graph.latency.doppler.planner import solve_doppler
        from coordinator.plan.graph.latency.doppler.starts import repaired

        starts = repaired(problem, held) if held else ()
        if policy is None:
            solution = solve_doppler(problem, options, starts)
        else:
            solution = policy.solve(problem, options, starts, measured)
    elif strategy == "placeto":
        from coordinator.plan.graph.latency.placeto import solve_placeto

        solution = solve_placeto(problem, options)
    else:
        from coordinator.plan.graph.latency.baselines import solve_baseline

        solution = solve_baseline(strategy, problem, options)
    return solution.with_assignment(OperatorAssignment(solution.assignment.assignment, solution.assignment.starts))


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
            solution = _solve_placement(problem, each.name, SearchOptions(limit, 0, clock))
            used = tuple(problem.devices[device] for device in dict.fromkeys(solution.assignment.devices))
            candidates.append(Candidate(each.name, each.name, used, solution.value, solution=solution))
        except (ModelDoesNotFit, NoPlacement) as error:
            candidates.append(_without_plan(each.name, error))
            failure = error
    chosen = min(candidates, key=lambda each: each.seconds)
    if chosen.solution is None:
        raise failure
    return with_reasons(_with_bound(chosen, candidates), (each for each in candidates if each is not chosen), strategy)


# ---- plans ------------------------------------------------------------------------------------------------------------


def build_plan(request: GraphRequest, solution: Solution[OperatorAssignment], planner: str) -> GraphPlan:
    """Cut the graph by the assignment; ranks are the devices in use, in the order of their first operators.

    For latency, take the faster of two cuts: few segments, or an eager cut whose results are sent as soon as they exist.
    For throughput, devices are busy anyway: take the first.
    """
    spec, cluster = request.spec, request.cluster
    rank_devices = list(dict.fromkeys(solution.assignment.devices))
    ranks = {member: rank for rank, member in enumerate(rank_devices)}
    assignment = [ranks[device] for device in solution.assignment.devices]
    eager_options = (False, True) if request.objective == "latency" and len(rank_devices) > 1 else (False,)
    starts = solution.assignment.starts
    cuts = [cut(spec, assignment, eager=eager, starts=starts) for eager in eager_options]
    values = request.wire.values
    predictions = [
        predict_segments(spec, segments, cluster, rank_devices, request.congestion, values) for segments in cuts
    ]
    best = min(range(len(cuts)), key=lambda index: predictions[index].latency_seconds)
    segments, predicted = cuts[best], predictions[best]
    memory = memory_by_rank(spec, segments, cluster, rank_devices)
    return GraphPlan(
        model=GraphModel(
            name=spec.name,
            sha256=request.model_hash,
            inputs=tuple(tensor.name for tensor in spec.inputs),
            outputs=tuple(tensor.name for tensor in spec.outputs),
            tiles=request.tiles,
        ),
        planner=planner,
        devices=tuple(
            PlannedDevice(
                device_id=cluster.devices[member].device_id,
                name=cluster.devices[member].name,
                memory=memory[rank],
                budget_bytes=cluster.devices[member].budget_bytes,
                compute_seconds=predicted.busy_seconds[rank],
            )
            for rank, member in enumerate(rank_devices)
        ),
        wire=request.wire,
        predicted=Prediction(
            latency_seconds=predicted.latency_seconds,
            compute_seconds=max(predicted.busy_seconds),
            transfer_seconds=predicted.transfer_seconds,
            bottleneck_seconds=predicted.bottleneck_seconds,
        ),
        body=GraphSegments(
            objective=request.objective,
            segments=tuple(
                segment.model_copy(update={"seconds": segment_seconds(cluster, rank_devices[segment.rank], segment)})
                for segment in segments
            ),
        ),
    )
