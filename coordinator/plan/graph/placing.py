"""Assignments of a graph's operators to devices, by one strategy each. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.latency.coarsening import coarsen
from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from coordinator.plan.graph.rebalance import rebalance
from coordinator.plan.graph.request import GraphRequest, held_devices
from coordinator.plan.graph.tasks import coordinator_cpu_seconds, lone_cpu_seconds, with_wire_sizes
from coordinator.plan.graph.throughput.planners import plan_pipeline
from coordinator.plan.methods import Method
from coordinator.plan.solution import OperatorAssignment, SearchOptions, Solution
from hearth.plan.graph_spec import GraphSpec

if TYPE_CHECKING:
    from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy


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
        return rebalance(request, solution, rooms, lambda: options.clock() >= deadline)
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
