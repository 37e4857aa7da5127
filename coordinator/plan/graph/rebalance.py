"""Local search: move the cuts of a pipeline on live devices while that lowers the bottleneck. Pure.

The pipeline planners consider compute and links. The CPU cost of a transfer depends on both sides of a cut, which their
search cannot see; the simulator includes it. With it, the middle stages of a pipeline, which both receive and send, have
too much work, and moving the cuts passes some of it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator.models.onnx.cutting import cut
from coordinator.plan.graph.predict import predict_segments
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.graph.throughput.points import fine_chain
from coordinator.plan.solution import OperatorAssignment, Solution, Stop

# These bound the number of simulations: up to 2 x 24 moves of each cut in each sweep.
_MAX_MOVE_OPERATORS = 24  # the longest single move of a cut
_MAX_SWEEPS = 4  # passes over all cuts
# A move must bring the bottleneck below this fraction of its value; less is not worth more sweeps.
_MAX_TIME_RATIO = 0.998


def rebalance(
    request: GraphRequest,
    solution: Solution[OperatorAssignment],
    room_bytes: Sequence[int],
    stop: Stop,
) -> Solution[OperatorAssignment]:
    """A pipeline planner's solution with the bottleneck as simulated, or a better one with cuts moved until `stop()`.

    The planner's bound remains valid: the CPU cost of transfers only adds to the bottleneck.
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
