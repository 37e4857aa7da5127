"""Wire size of tensors in a plan, and transfers of a graph's inputs and outputs over the devices' links."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graphs import chain, cluster_of, from_edges, two_branches

from coordinator.models.onnx.cutting import cut
from coordinator.plan.graph.auto import plan_graph
from coordinator.plan.graph.predict import predict_segments
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.graph.tasks import num_converted, tensor_transfers, wire_bytes, with_wire_sizes
from coordinator.plan.simulator import receive_resources, send_resources
from hearth.plan.common import ValueFormatName, WireFormat
from hearth.plan.graph_spec import GraphSpec, Operator, Tensor
from hearth.plan.profile import WireCost
from hearth.wire.codec import Codec


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from(["float32", "float16", "int64"]),
    st.sampled_from(get_args(ValueFormatName)),
)
def test_tensor_sizes_follow_the_wire_format(shape: list[int], dtype: str, values: ValueFormatName) -> None:
    array = np.ones(shape, dtype)
    encoded = Codec(WireFormat(values=values, lz4="off"), 1e9, time.perf_counter).encode("", array)
    tensor = Tensor("t", array.nbytes, 0, (), dtype, tuple(shape))
    assert wire_bytes(tensor, values) == sum(len(buffer) for buffer in encoded.buffers)
    assert num_converted(tensor, values) == (array.size if dtype == "float32" and values != "exact" else 0)


def test_half_size_wire_format_makes_a_large_cut_worthwhile() -> None:
    """Compute takes 3 + 3 on two devices or 6 on one; transfer at the middle cut takes 8 s exact, 4 s at half size."""
    spec = chain(1, [800, 800, 400, 800, 800, 800])
    cluster = cluster_of(spec, [1.0, 1.0], bytes_per_second=100.0)

    def planned(wire: WireFormat) -> float:
        request = GraphRequest(spec, cluster, "throughput", "pipeline-exact", wire=wire)
        plan = plan_graph(request, time.monotonic).chosen.plan
        assert plan is not None
        return plan.predicted.bottleneck_seconds

    assert planned(WireFormat()) == pytest.approx(4.0)  # 4 s of transfer, longer than 3 s of compute
    assert planned(WireFormat(values="fp16")) == pytest.approx(3.0)
    segments = cut(spec, [0, 0, 0, 1, 1, 1])
    assert [each.num_bytes for each in tensor_transfers(spec, segments, "fp16")] == [200]
    assert predict_segments(
        with_wire_sizes(spec, "fp16"), segments, cluster, [0, 1]
    ).bottleneck_seconds == pytest.approx(3.0)


def test_conversion_costs_compute_at_both_ends() -> None:
    spec = chain(1, [400, 400])
    cluster = cluster_of(spec, [1.0, 1.0], bytes_per_second=100.0)
    wire = WireCost(convert_seconds_per_value={"fp16": 0.02})
    costly = replace(cluster, devices=tuple(replace(device, wire=wire) for device in cluster.devices))
    segments = cut(spec, [0, 1])
    assert predict_segments(spec, segments, costly, [0, 1], values="fp16").busy_seconds == pytest.approx((2.0, 2.0))
    assert predict_segments(spec, segments, costly, [0, 1], values="fp16").latency_seconds == pytest.approx(
        1 + 2 + 2 + 1
    )
    assert predict_segments(spec, segments, costly, [0, 1]).busy_seconds == pytest.approx((1.0, 1.0))


def with_input(num_bytes: int) -> GraphSpec:
    """A chain of two operators; the first reads an input of the graph, the second writes its output of 100 bytes."""
    spec = chain(1, [200, 100])
    first, last = spec.tensors
    given_input = Tensor("image", num_bytes, None, (0,))
    return replace(spec, tensors=(given_input, first, last._replace(is_output=True)))


def test_inputs_and_outputs_use_links_of_profiled_devices() -> None:
    spec = with_input(500)
    segments = cut(spec, [0, 1])
    out_of_a_file = cluster_of(spec, [1.0, 1.0], bytes_per_second=100.0)
    assert predict_segments(spec, segments, out_of_a_file, [0, 1]).latency_seconds == pytest.approx(1 + 2 + 1)
    live = replace(out_of_a_file, measured=True)
    priced = predict_segments(spec, segments, live, [0, 1])
    assert priced.latency_seconds == pytest.approx(5 + 1 + 2 + 1 + 1)
    assert (priced.bottleneck, priced.bottleneck_seconds) == (receive_resources(0), pytest.approx(5.0))
    wire = WireCost(encrypted_seconds_per_byte=0.001, plain_seconds_per_byte=0.0005, seconds_per_message=0.1)
    costly = replace(live, devices=tuple(replace(device, wire=wire) for device in live.devices))
    # Input, transfer and output, in small pieces. Traffic with the coordinator passes the daemon, as does the request.
    assert predict_segments(spec, segments, costly, [0, 1]).busy_seconds == pytest.approx(
        (
            1 + (500 * (4 * 0.001 + 0.001) + 0.3) + (200 * 4 * 0.001 + 0.1) + 3.6,
            1 + (200 * 4 * 0.001 + 0.1) + (100 * (4 * 0.001 + 0.001) + 0.3) + 3.6,
        )
    )
    # A single request waits for the last piece only.
    assert predict_segments(spec, segments, costly, [0, 1]).latency_seconds == pytest.approx(
        (5 + 500 * 0.002 + 0.3) + 1 + (2 + 2 * (200 * 0.001 + 0.1)) + 1 + (1 + 100 * 0.002 + 0.3)
    )


def test_outputs_of_two_devices_share_the_coordinators_link() -> None:
    spec = from_edges("two", [Operator(name, "Conv", 1.0) for name in "ab"], [100, 100], [])
    live = replace(cluster_of(spec, [1.0, 1.0], bytes_per_second=100.0), measured=True)
    priced = predict_segments(spec, cut(spec, [0, 1]), live, [0, 1])
    assert priced.latency_seconds == pytest.approx(1 + 1 + 1)
    assert priced.bottleneck_seconds == pytest.approx(1.0)  # that link is not measured, and no device's


def test_links_of_a_coordinator_on_a_device_are_those_of_that_device() -> None:
    spec = with_input(500)
    links = replace(cluster_of(spec, [1.0, 1.0], bytes_per_second=100.0, latency_seconds=0.25), measured=True)
    slow = replace(links, bytes_per_second=((math.inf, 50.0), (25.0, math.inf)))
    first, second = slow.devices
    together = replace(slow, devices=(replace(first, with_coordinator=True), second))
    alone = cut(spec, [0, 0])
    # On its device the values are there. Another one gets and sends them over the links between the two.
    assert predict_segments(spec, alone, together, [0]).latency_seconds == pytest.approx(1 + 1)
    priced = predict_segments(spec, alone, together, [1])
    assert priced.latency_seconds == pytest.approx((500 / 50 + 0.25) + 1 + 1 + (100 / 25 + 0.25))
    # The same network interface carries the tensor between both devices: 200 bytes that way, and 500 of the input.
    back = predict_segments(spec, cut(spec, [1, 0]), together, [0, 1])
    assert (back.bottleneck, back.bottleneck_seconds) == (send_resources(0), pytest.approx(500 / 50))
    # Without it, the planner takes the fastest link of a device.
    assert predict_segments(spec, alone, slow, [1]).latency_seconds == pytest.approx((500 / 50 + 0.25) + 2 + (2 + 0.25))


@pytest.mark.parametrize(("measured", "seconds"), [(False, 1 + 0.2 + 3), (True, 1 + 4 * 0.2 + 3)])
def test_computing_waits_for_the_cpu_time_of_transfers(measured: bool, seconds: float) -> None:
    """The first device sends the result of 1 s and then computes 3 s. Over a real link, sending takes four times the CPU."""
    operators = [Operator("sent", "Conv", 1.0), Operator("used", "Conv", 1.0), Operator("long", "Conv", 3.0)]
    spec = from_edges("two", operators, [200, 0, 0], [(0, 1)])
    wire = WireCost(encrypted_seconds_per_byte=0.001)
    cluster = replace(cluster_of(spec, [1.0, 1.0], bytes_per_second=1000.0, wire=wire), measured=measured)
    assert predict_segments(spec, cut(spec, [0, 1, 0], eager=True), cluster, [0, 1]).latency_seconds == pytest.approx(
        seconds
    )


def test_plans_count_the_cpu_time_of_transfers() -> None:
    """Two branches: on two devices if transfers take no CPU time, else on one."""
    spec = two_branches(out_bytes=100)
    devices = {
        cost: plan_graph(
            GraphRequest(
                spec, cluster_of(spec, [1.0, 1.0], 1e6, wire=WireCost(encrypted_seconds_per_byte=cost)),
                strategy="heft", time_limit_seconds=60.0,
            ),
            time.monotonic,
        ).chosen.plan
        for cost in (0.0, 0.02)
    }  # fmt: skip
    assert [each.num_ranks for each in devices.values() if each is not None] == [2, 1]


def test_device_that_receives_the_inputs_computes_less() -> None:
    """Eight operators of 1 s on two devices; receiving the inputs costs the first device 2 s of compute."""
    spec = chain(1, [1] * 8)
    first, *others = spec.tensors
    spec = replace(spec, tensors=(Tensor("image", 500, None, (0,)), first, *others))
    cluster = cluster_of(spec, [1.0, 1.0], 1e6, wire=WireCost(encrypted_seconds_per_byte=0.001))
    assert cluster.measured
    plan = plan_graph(GraphRequest(spec, cluster, "throughput", "pipeline-exact"), time.monotonic).chosen.plan
    assert plan is not None
    assert [len(segment.operators) for segment in plan.body.segments] == [3, 5]


def test_inputs_cost_no_time_without_a_link() -> None:
    spec = with_input(500)
    alone = replace(cluster_of(spec, [1.0], bytes_per_second=100.0), measured=True)
    assert predict_segments(spec, cut(spec, [0, 0]), alone, [0]).latency_seconds == pytest.approx(2.0)
