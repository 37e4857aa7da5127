"""Assignments of a graph's operators to devices, by one strategy each. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from coordinator.models.onnx.cutting import cut
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.latency.coarsening import coarsen
from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from coordinator.plan.graph.predict import predict_segments
from coordinator.plan.graph.request import GraphRequest, held_devices
from coordinator.plan.graph.tasks import coordinator_cpu_seconds, lone_cpu_seconds, with_wire_sizes
from coordinator.plan.graph.throughput.planners import plan_pipeline
from coordinator.plan.graph.throughput.points import fine_chain
from coordinator.plan.methods import Method
from coordinator.plan.solution import OperatorAssignment, SearchOptions, Solution, Stop
from hearth.plan.graph_spec import GraphSpec

if TYPE_CHECKING:
    from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy

# These bound the number of simulations: up to 2 x 24 moves of each cut in each sweep.
_MAX_MOVE_OPERATORS = 24  # the longest single move of a cut
_MAX_SWEEPS = 4  # passes over all cuts
# A move must bring the bottleneck below this fraction of its value; less is not worth more sweeps.
_MAX_TIME_RATIO = 0.998


def place_operators(
    request: GraphRequest, method: Method, options: SearchOptions, policy: HomePolicy | None
) -> Solution[OperatorAssignment]:
    """Assign operators to devices with one strategy.

    For latency, operators that onnxruntime fuses are placed together, and bounds hold for such placements only.
    Raises ModelDoesNotFit and NoPlacement.
    """
    deadline = options.clock() + options.time_limit_seconds
    spec, cluster, rates = request.spec, request.cluster, request.cluster.bytes_per_second
    weights = spec.parameter_bytes(range(spec.num_operators))
    rooms = [device.room_bytes(weights) for device in cluster.devices]
    spec = with_wire_sizes(spec, request.wire.values)
    media = cluster.media_crossed if cluster.media else ()
    if request.objective == "throughput":
        solution = plan_pipeline(
            spec,
            _with_coordinator_transfers(request.spec, cluster),
            rooms,
            rates,
            method.name,
            options,
            media if request.congestion else (),
        )
        if not (method.rebalances and cluster.measured):
            return solution
        return _rebalance(request, solution, rooms, lambda: options.clock() >= deadline)
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
        media,
    )
    held = held_devices(request)
    pins = {index: held[group[0]] for index, group in enumerate(coarse.groups) if group[0] in held}
    left = options._replace(time_limit_seconds=max(0.0, deadline - options.clock()))
    solution = solve_placement(problem, method.name, left, pins, policy)
    devices = coarse.expand_assignment(solution.assignment.devices)
    starts = coarse.operator_starts(solution.assignment.starts, devices, cluster.seconds)
    return solution.with_assignment(OperatorAssignment(devices, starts))


def place_in_blocks(request: GraphRequest) -> tuple[int, ...]:
    """[n]: devices of operators in blocks by depth, one block a device, with weights in proportion to its room.

    Where memory is short this needs the least: with few segments, few requests are in flight, and hardly a weight is on two
    devices.
    """
    coarse, cluster = coarsen(request.spec), request.cluster
    spec, depths = coarse.spec, list[int]()
    for before in spec.predecessors:
        depths.append(max((depths[each] + 1 for each in before), default=0))
    weights = max(spec.parameter_bytes(range(spec.num_operators)), 1)
    ends = list(accumulate(device.room_bytes(weights) for device in cluster.devices))
    devices, placed_bytes, homes = [0] * spec.num_operators, 0, dict[int, int]()  # by weight: its first device
    for operator in sorted(range(spec.num_operators), key=lambda each: (depths[each], each)):
        used = spec.operators[operator].parameters
        device = min(bisect_right(ends, placed_bytes / weights * ends[-1]), len(ends) - 1)
        devices[operator] = max((homes.get(each, device) for each in used), default=device)
        placed_bytes += sum(spec.parameters[each].num_bytes for each in set(used) - homes.keys())
        homes |= dict.fromkeys(used, devices[operator])
    return coarse.expand_assignment(devices)


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


def _rebalance(
    request: GraphRequest,
    solution: Solution[OperatorAssignment],
    room_bytes: Sequence[int],
    stop: Stop,
) -> Solution[OperatorAssignment]:
    """A pipeline planner's solution with the bottleneck as simulated, or a better one with cuts moved until `stop()`.

    The planners' search cannot see the CPU cost of a transfer, which depends on both sides of a cut. With it, the middle
    stages, which both receive and send, have too much work, and moving the cuts passes some of it on. The planner's bound
    remains valid: that cost only adds to the bottleneck.
    """
    order = fine_chain(request.spec).points
    devices = [solution.assignment.devices[operator] for operator in order]
    ends = [index for index in range(1, len(devices)) if devices[index] != devices[index - 1]]
    stages = [devices[0], *(devices[end] for end in ends)]
    if len(set(stages)) < len(stages):  # not a pipeline of this chain
        return solution

    def assigned(ends: Sequence[int]) -> tuple[int, ...]:
        devices_by_operator = [0] * len(order)
        for device, first, last in zip(stages, [0, *ends], [*ends, len(order)], strict=True):
            for operator in order[first:last]:
                devices_by_operator[operator] = device
        return tuple(devices_by_operator)

    def seconds(ends: Sequence[int]) -> float:
        assignment = assigned(ends)
        for device in stages:
            own = [operator for operator, each in enumerate(assignment) if each == device]
            if request.spec.parameter_bytes(own) > room_bytes[device]:
                return float("inf")
        ranks = {device: rank for rank, device in enumerate(dict.fromkeys(assignment))}
        segments = cut(request.spec, [ranks[device] for device in assignment])
        return predict_segments(
            request.spec, segments, request.cluster, list(ranks), request.congestion, request.wire.values
        ).bottleneck_seconds

    best = seconds(ends)
    for _ in range(_MAX_SWEEPS):
        before = best
        for cut_index in range(len(ends)):
            first = (ends[cut_index - 1] if cut_index else 0) + 1
            last = (ends[cut_index + 1] if cut_index + 1 < len(ends) else len(order)) - 1
            old_end = ends[cut_index]
            for new_end in range(
                max(first, old_end - _MAX_MOVE_OPERATORS), min(last, old_end + _MAX_MOVE_OPERATORS) + 1
            ):
                if stop():
                    break
                moved = [*ends[:cut_index], new_end, *ends[cut_index + 1 :]]
                if new_end != old_end and (found := seconds(moved)) < best * _MAX_TIME_RATIO:
                    best, ends = found, moved
        if best == before:
            break
    bound = min(solution.bound, best)
    return replace(
        solution, assignment=OperatorAssignment(assigned(ends)), value=best, bound=bound, proven=bound >= best
    )


def solve_placement(
    problem: PlacementProblem,
    strategy: str,
    options: SearchOptions,
    held: Mapping[int, int] | None = None,
    policy: HomePolicy | None = None,
) -> Solution[OperatorAssignment]:
    """Solve a placement problem with one latency strategy. `held`: the devices of operators in the deployed plan.

    Solvers are imported on first use, since the import takes half a second. Raises ModelDoesNotFit and NoPlacement.
    """
    if strategy == "moirai":
        from coordinator.plan.graph.latency.search import solve_moirai

        solution = solve_moirai(problem, options)
    elif strategy == "doppler":
        from coordinator.plan.graph.latency.search import repaired, solve_doppler

        starts = repaired(problem, held) if held else ()
        solution = policy.solve(problem, options, starts) if policy else solve_doppler(problem, options, starts)
    else:
        from coordinator.plan.graph.latency.baselines import solve_baseline

        solution = solve_baseline(strategy, problem, options)
    return solution.with_assignment(OperatorAssignment(solution.assignment.assignment, solution.assignment.starts))
