"""From a graph and a cluster to plans: a strategy places operators, the graph is cut by it, the simulator prices the cut.

`auto` takes the best under the simulator, "one device" included. Pure: `clock` returns seconds and is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from coordinator.models.onnx.cutting import cut
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.latency import moirai
from coordinator.plan.graph.latency.baselines import BASELINES
from coordinator.plan.graph.latency.coarsening import coarsen
from coordinator.plan.graph.latency.problem import PlacementProblem, problem_of
from coordinator.plan.graph.latency.schedule import Placement
from coordinator.plan.graph.memory import memory_use, reserved_bytes
from coordinator.plan.graph.price import home_seconds, price, segment_seconds, transfers_of
from coordinator.plan.graph.rebalance import balanced
from coordinator.plan.graph.request import AUTO, Answer, Candidate, GraphRequest, Planned, check_strategy, seconds_of
from coordinator.plan.graph.throughput.planners import SearchOptions, plan_pipeline
from coordinator.plan.graph.wire import on_wire
from hearth.errors import HearthError, ModelDoesNotFit, NoPlacement
from hearth.plan.graph import GraphModel, GraphSegments, Segment
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.parts import Alternative, MemoryUse, PlannedDevice, Prediction
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_bytes
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES

_A_HAIR = 1.01  # one more device is one more that can fail
_MAX_REFITS = 4  # what a device holds beside weights is known only when it is known what runs there
_PROVEN = 1 + 1e-6
Clock = Callable[[], float]


# ---- graphs -----------------------------------------------------------------------------------------------------------


def plan_graph(request: GraphRequest, clock: Clock, progress: Callable[[str], None] = lambda strategy: None) -> Planned:
    """The plan that was asked for, beside "one device" and what else was looked at.

    Raises ModelDoesNotFit, BadSetting.
    """
    check_strategy(request.strategy, request.objective)
    asked = AUTO[request.objective] if request.strategy == "auto" else (request.strategy,)
    found = [*_locals(request)]
    for strategy in asked:
        if strategy != "local" and len(request.cluster.devices) > 1:
            progress(strategy)
            found.append(_candidate(request, strategy, clock))
    return _choose(request, found)


def seconds_now(request: GraphRequest, plan: GraphPlan) -> float:
    """Seconds of a plan on the request's cluster, which must have all of its devices; comparable with `seconds_of`."""
    members = request.cluster.members(plan)
    priced = price(request.spec, plan.body.segments, request.cluster, members, request.congestion, request.wire.values)
    return priced.latency_seconds if plan.body.objective == "latency" else priced.bottleneck_seconds


def _choose(request: GraphRequest, found: Sequence[Candidate]) -> Planned:
    """Of the plans that may be taken the best; of those as good but for a hair, the one on the fewest devices."""
    objective = request.objective
    ordered = sorted(found, key=lambda each: each.seconds(objective))
    takes = [each for each in ordered if each.answer and request.strategy in ("auto", each.answer.strategy)]
    if not takes and len(request.cluster.devices) == 1:  # there is nothing to share
        takes = [each for each in ordered if each.answer]
    if not takes:
        raise _why_none(request)
    least = takes[0].seconds(objective)
    chosen = min(
        (each for each in takes if each.seconds(objective) <= _A_HAIR * least),
        key=lambda each: (each.num_devices, each.seconds(objective)),
    )
    bound = max((each.answer.bound for each in found if each.answer), default=0.0)
    chosen = _with_bound(chosen, bound)
    others = tuple(
        Alternative(
            strategy=each.label,
            predicted_seconds=each.seconds(objective) if each.answer else None,
            reason=_why_not(each, chosen, request),
        )
        for each in ordered
        if each.label != chosen.label
    )
    assert chosen.plan is not None
    chosen = chosen._replace(plan=chosen.plan.model_copy(update={"alternatives": others}))
    return Planned(chosen, tuple(chosen if each.label == chosen.label else each for each in ordered))


def _with_bound(chosen: Candidate, bound: float) -> Candidate:
    """What any strategy has proven holds for all of them."""
    answer, plan = chosen.answer, chosen.plan
    assert answer is not None
    assert plan is not None
    bound = min(bound, answer.objective_value)
    proven = answer.proven_optimal or (bound > 0 and answer.objective_value <= bound * _PROVEN)
    predicted = plan.predicted.model_copy(
        update={"bound_seconds": bound or None, "proven_optimal": bound > 0 and seconds_of(plan) <= bound * _PROVEN}
    )
    return chosen._replace(
        answer=answer._replace(bound=bound, proven_optimal=proven),
        plan=plan.model_copy(update={"predicted": predicted}),
    )


def _why_not(other: Candidate, chosen: Candidate, request: GraphRequest) -> str:
    if other.answer is None:
        return other.reason
    seconds, best = other.seconds(request.objective), chosen.seconds(request.objective)
    if request.strategy not in ("auto", other.answer.strategy) and seconds < best:
        return f"'{request.strategy}' was asked for"
    if seconds > best:
        return f"slower by {seconds / best:.2f}x" if best > 0 else "slower"
    return "the same" if other.num_devices == chosen.num_devices else "no faster worth mentioning, on more devices"


def _why_none(request: GraphRequest) -> HearthError:
    """Nothing fits, or the one strategy that was asked for has no answer."""
    spec = request.spec
    weights = spec.parameter_bytes(range(spec.num_operators))
    missing = weights - sum(device.room_bytes(weights) for device in _with_rooms(request).cluster.devices)
    if missing > 0:
        return ModelDoesNotFit(model=spec.name, missing_bytes=missing)
    if request.strategy == "local":
        return ModelDoesNotFit(model=spec.name, missing_bytes=min(map(_lacking, _alone(request))))
    return NoPlacement(graph=spec.name, strategy=request.strategy)


# ---- one device -------------------------------------------------------------------------------------------------------


class _Alone(NamedTuple):
    device: int
    segments: tuple[Segment, ...]
    memory: MemoryUse
    budget_bytes: int


def _lacking(alone: _Alone) -> int:
    return max(alone.memory.total - alone.budget_bytes, 0)


def _alone(request: GraphRequest) -> list[_Alone]:
    """The whole graph on each device."""
    spec, cluster = request.spec, request.cluster
    segments = cut(spec, [0] * spec.num_operators)
    return [
        _Alone(index, segments, memory_use(spec, segments, cluster, [index])[0], device.budget_bytes)
        for index, device in enumerate(cluster.devices)
    ]


def _locals(request: GraphRequest) -> list[Candidate]:
    found = []
    for alone in _alone(request):
        label = f"local on {request.cluster.devices[alone.device].name}"
        if lacking := _lacking(alone):
            found.append(Candidate(label, reason=f"does not fit: {format_bytes(lacking)} are missing"))
            continue
        seconds = sum(row[alone.device] for row in request.cluster.seconds)
        answer = Answer("local", (alone.device,) * request.spec.num_operators, seconds)
        found.append(Candidate(label, answer, _build(request, answer)))
    return found


# ---- strategies -------------------------------------------------------------------------------------------------------


def _candidate(request: GraphRequest, strategy: str, clock: Clock) -> Candidate:
    """Ask one strategy; where its plan holds more than weights and finds no room, once more with less of it."""
    request = _with_rooms(request)
    try:
        for _ in range(_MAX_REFITS):
            answer = _answer(request, strategy, clock)
            plan = _build(request, answer)
            if too_large := _cannot_travel(request, plan):
                return Candidate(strategy, reason=too_large)
            over = {device.device_id: device.memory.total - device.budget_bytes for device in plan.devices}
            if max(over.values()) <= 0:
                return Candidate(strategy, answer, plan)
            request = replace(
                request,
                cluster=request.cluster.with_rooms(
                    [
                        device.reserved_bytes + max(over.get(device.device_id, 0), 0)
                        for device in request.cluster.devices
                    ]
                ),
            )
    except (ModelDoesNotFit, NoPlacement) as error:
        return Candidate(strategy, reason=_no_plan(error))
    return Candidate(strategy, reason="does not fit: what it holds beside weights finds no room")


def _cannot_travel(request: GraphRequest, plan: GraphPlan) -> str:
    """What forbids a cut on real devices: one message has room for one tensor."""
    if not request.cluster.measured:
        return ""
    largest = max(transfers_of(request.spec, plan.body.segments), key=lambda each: each.num_bytes, default=None)
    if largest is None or largest.num_bytes <= MAX_PAYLOAD_FRAME_BYTES:
        return ""
    return f"would send {largest.tensor}, whose {format_bytes(largest.num_bytes)} are more than a message takes"


def _no_plan(error: ModelDoesNotFit | NoPlacement) -> str:
    if isinstance(error, ModelDoesNotFit) and error.missing_bytes:
        return f"does not fit: {format_bytes(error.missing_bytes)} are missing"
    return "found no placement within the devices' memory"


def _with_rooms(request: GraphRequest) -> GraphRequest:
    reserved = reserved_bytes(request.spec, request.cluster)
    return replace(request, cluster=request.cluster.with_rooms(reserved))


def _answer(request: GraphRequest, strategy: str, clock: Clock) -> Answer:
    """For latency, operators that onnxruntime runs as one are placed as one, and bounds are of such placements. Raises
    ModelDoesNotFit, NoPlacement."""
    spec, cluster = request.spec, request.cluster
    weights = spec.parameter_bytes(range(spec.num_operators))
    rooms = [device.room_bytes(weights) for device in cluster.devices]
    spec = on_wire(spec, request.wire.values)
    if request.objective == "latency":
        coarse = coarsen(spec)
        problem = problem_of(
            coarse.spec,
            coarse.seconds(cluster.seconds),
            rooms,
            cluster.bytes_per_second,
            cluster.latency_seconds,
            request.congestion,
        )
        answer = place(problem, strategy, request.time_limit_seconds, clock)
        assignment = coarse.spread(answer.assignment)
        return answer._replace(assignment=assignment, starts=coarse.starts(answer.starts, assignment, cluster.seconds))
    seconds = _with_home(request.spec, cluster)
    options = SearchOptions(request.time_limit_seconds, request.seed, clock)
    placed = plan_pipeline(spec, seconds, rooms, cluster.bytes_per_second, strategy, options)
    answer = Answer(
        strategy,
        tuple(placed.assignment),
        placed.bottleneck_seconds,
        placed.bound_seconds,
        placed.proven_optimal,
        placed.planning_seconds,
    )
    return balanced(request, answer, rooms) if strategy == "pipeline-exact" and cluster.measured else answer


def _with_home(spec: GraphSpec, cluster: GraphCluster) -> list[list[float]]:
    """[n][K]: seconds of each operator; of those that take the graph's inputs or make its outputs, with what it costs live
    devices to get them from the coordinator, or to hand them over."""
    seconds = [list(row) for row in cluster.seconds]
    if cluster.measured:
        ends = [(min(tensor.consumers), tensor) for tensor in spec.inputs if tensor.consumers]
        ends += [(tensor.source, tensor) for tensor in spec.outputs if tensor.source is not None]
        for operator, tensor in ends:
            for device in range(len(cluster.devices)):
                seconds[operator][device] += home_seconds(cluster, device, tensor.num_bytes)
    return seconds


def place(problem: PlacementProblem, strategy: str, time_limit_seconds: float, clock: Clock) -> Answer:
    """Ask one strategy for a schedule. Raises ModelDoesNotFit, NoPlacement."""
    if strategy == "moirai":
        placed = moirai.solve(problem, time_limit_seconds, clock)
    else:
        began = clock()
        schedule = BASELINES[strategy](problem)
        placed = Placement(strategy, schedule, planning_seconds=clock() - began)
    return Answer(
        strategy,
        tuple(placed.assignment),
        placed.makespan,
        placed.bound,
        placed.proven_optimal,
        placed.planning_seconds,
        placed.schedule.starts,
    )


def plan_instance(
    problem: PlacementProblem,
    strategy: str,
    time_limit_seconds: float,
    clock: Clock,
    progress: Callable[[str], None] = lambda strategy: None,
) -> Planned:
    """As `plan_graph` for a placement problem without a graph. Raises ModelDoesNotFit, BadSetting."""
    check_strategy(strategy, "latency")
    found: list[Candidate] = []
    for each in AUTO["latency"] if strategy == "auto" else (strategy,):
        progress(each)
        try:
            found.append(Candidate(each, place(problem, each, time_limit_seconds, clock)))
        except (ModelDoesNotFit, NoPlacement) as error:
            found.append(Candidate(each, reason=_no_plan(error)))
            failure = error
    ordered = sorted(found, key=lambda each: each.seconds("latency"))
    if ordered[0].answer is None:
        raise failure
    bound = max(each.answer.bound for each in found if each.answer)
    best = ordered[0].answer
    proven = best.proven_optimal or (bound > 0 and best.objective_value <= bound * _PROVEN)
    chosen = ordered[0]._replace(answer=best._replace(bound=min(bound, best.objective_value), proven_optimal=proven))
    return Planned(chosen, (chosen, *ordered[1:]))


# ---- plans ------------------------------------------------------------------------------------------------------------


def _build(request: GraphRequest, answer: Answer) -> GraphPlan:
    """Cut the graph as the answer says; ranks are the devices in use, in the order in which they begin.

    For latency, of a cut into few segments and one in which no result waits the faster; a pipeline is busy anyway.
    """
    spec, cluster = request.spec, request.cluster
    members = list(dict.fromkeys(answer.assignment))
    ranks = {member: rank for rank, member in enumerate(members)}
    assignment = [ranks[device] for device in answer.assignment]
    ways = (False, True) if request.objective == "latency" and len(members) > 1 else (False,)
    cuts = [cut(spec, assignment, eager=eager) for eager in ways]
    values = request.wire.values
    prices = [price(spec, segments, cluster, members, request.congestion, values) for segments in cuts]
    best = min(range(len(cuts)), key=lambda way: prices[way].latency_seconds)
    segments, priced = cuts[best], prices[best]
    memory = memory_use(spec, segments, cluster, members)
    return GraphPlan(
        model=GraphModel(
            name=spec.name,
            sha256=request.model_hash,
            inputs=tuple(tensor.name for tensor in spec.inputs),
            outputs=tuple(tensor.name for tensor in spec.outputs),
        ),
        planner=answer.strategy,
        devices=tuple(
            PlannedDevice(
                device_id=cluster.devices[member].device_id,
                name=cluster.devices[member].name,
                memory=memory[rank],
                budget_bytes=cluster.devices[member].budget_bytes,
                compute_seconds=priced.busy_seconds[rank],
            )
            for rank, member in enumerate(members)
        ),
        wire=request.wire,
        predicted=Prediction(
            latency_seconds=priced.latency_seconds,
            compute_seconds=max(priced.busy_seconds),
            transfer_seconds=priced.transfer_seconds,
            bottleneck_seconds=priced.bottleneck_seconds,
        ),
        body=GraphSegments(
            objective=request.objective,
            segments=tuple(
                segment.model_copy(update={"seconds": segment_seconds(cluster, members[segment.rank], segment)})
                for segment in segments
            ),
        ),
    )
