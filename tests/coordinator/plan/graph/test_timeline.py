"""The predicted timeline of a graph's plan: its length equals the prediction, its parts those of a measured one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.graphs import cluster_of, save_two_branch_model, two_branches

from coordinator.models.onnx.reader import read_onnx
from coordinator.plan.graph.auto import plan_graph
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.predict import predicted_graph_timeline, requests_in_flight
from coordinator.plan.graph.request import GraphRequest
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.phases import Phase, Work
from hearth.plan.plan import GraphPlan
from hearth.plan.profile import WireCost
from hearth.trace import chrome_trace, transfers
from hearth.wire.messages import DeviceTrace, RunDone

LIVE = {"wire": WireCost(seconds_per_message=1e-5), "process_bytes": 1}  # fields of profiled devices


def planned(spec: GraphSpec, cluster: GraphCluster, **asked: Any) -> GraphPlan:
    plan = plan_graph(GraphRequest(spec, cluster, time_limit_seconds=60.0, **asked), time.monotonic).chosen.plan
    assert plan is not None
    assert plan.num_ranks > 1
    return plan


def end_of(traces: Sequence[DeviceTrace]) -> float:
    return max(event.end_seconds for trace in traces for event in trace.events)


@pytest.mark.parametrize("fields", [{}, LIVE], ids=["cluster-file", "measured"])
@pytest.mark.parametrize("congestion", [True, False])
def test_timeline_ends_at_the_predicted_time(fields: dict[str, Any], congestion: bool) -> None:
    spec = two_branches(flops=1e6, out_bytes=100_000)
    cluster = cluster_of(spec, (1e8, 0.7e8), 1e8, latency_seconds=1e-4, **fields)
    plan = planned(spec, cluster, strategy="heft", congestion=congestion)
    traces = predicted_graph_timeline(spec, plan, cluster, congestion)
    assert end_of(traces) == pytest.approx(plan.predicted.latency_seconds)
    assert [trace.device for trace in traces[:2]] == [device.name for device in plan.devices]
    bars = chrome_trace(traces)["traceEvents"]
    computed = {bar["name"] for bar in bars if bar.get("tid") == "compute"}
    cpu_of_transfers = {name for name in computed if name.startswith("wire ")}
    assert computed - cpu_of_transfers == {f"segment {index}" for index in range(len(plan.body.segments))}
    # transfers of inputs and outputs have a price, and both ends take CPU time
    assert bool(cpu_of_transfers) == bool(fields)
    assert ("coordinator" in [trace.device for trace in traces]) == bool(fields)


def test_throughput_timeline_shows_a_full_pipeline() -> None:
    spec = two_branches(flops=1e6, out_bytes=1000)
    cluster = cluster_of(spec, (1e8, 0.7e8), 1e8)
    plan = planned(spec, cluster, objective="throughput", strategy="pipeline-exact")
    traces = predicted_graph_timeline(spec, plan, cluster)
    num_requests = requests_in_flight(plan.body.segments)
    assert {event.tile for trace in traces for event in trace.events} == set(range(num_requests))
    least = num_requests * plan.predicted.bottleneck_seconds
    assert least <= end_of(traces) < least + 2 * plan.predicted.latency_seconds


def parts(traces: Sequence[DeviceTrace]) -> tuple[set[tuple[int, int | None]], list[tuple[str, int, int]]]:
    """Segments by rank, and transfers between ranks."""
    segments = {(each.rank, bar.layer) for each in traces for bar in each.events if bar.kind is Work.SEGMENT}
    return segments, sorted((each.label, each.sender, each.receiver) for each in transfers(traces))


def test_timeline_has_segments_and_transfers_of_a_measured_trace(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python here")
    from support.graph_engines import GraphCluster as Engines

    path = save_two_branch_model(tmp_path / "model.onnx")
    model = read_onnx(path)
    spec = model.spec
    cluster = cluster_of(spec, (1e7, 0.7e7), 1e9)
    plan = planned(spec, cluster, strategy="heft").with_epoch(1)
    whole = onnx.shape_inference.infer_shapes(onnx.load(path))
    with Engines(plan, whole, tmp_path) as engines:
        engines.start(1, {"image": np.zeros(spec.inputs[0].shape, np.float32)}, trace=True)
        measured = []
        for rank in range(plan.num_ranks):
            done, _ = engines.answer(1, rank)
            assert isinstance(done, RunDone)
            measured.append(DeviceTrace(device="", rank=rank, events=done.trace))
    predicted = parts(predicted_graph_timeline(spec, plan, cluster))
    assert predicted == parts(measured)
    assert predicted[1]
    assert all(bar.kind in (Work.SEGMENT, Phase.TENSOR) for trace in measured for bar in trace.events)
