"""From an assignment of operators to a plan: segments, memory and prediction. Pure."""

from __future__ import annotations

from coordinator.models.onnx.cutting import cut
from coordinator.plan.graph.memory import memory_by_rank
from coordinator.plan.graph.predict import predict_segments
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.graph.tasks import segment_seconds
from coordinator.plan.solution import OperatorAssignment, Solution
from hearth.plan.common import PlannedDevice, Prediction
from hearth.plan.graph import GraphModel, GraphSegments
from hearth.plan.plan import GraphPlan


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
