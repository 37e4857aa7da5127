"""The CPU time of transfers counts once: it is in the price of a plan, so the requests that show it change no factor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graph_plans import placed_plan
from support.graphs import cluster_of, from_edges, two_branches

from coordinator.models.onnx.cutting import cut
from coordinator.plan.graph.calibration import Calibration, segment_delays
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.tasks import request_tasks, segment_seconds
from coordinator.plan.simulator import compute_resources
from hearth.plan.graph import GraphSegments
from hearth.plan.graph_spec import GraphSpec, Operator
from hearth.plan.phases import Work
from hearth.plan.plan import GraphPlan
from hearth.plan.profile import WireCost

Times = list[list[float]]  # by rank and segment


def eager_plan(spec: GraphSpec, device_ids: list[str]) -> GraphPlan:
    """A plan of many segments, so that devices compute while they send and receive."""
    plan = placed_plan(spec, device_ids)
    ids = [device.device_id for device in plan.devices]
    segments = cut(spec, [ids.index(each) for each in device_ids], eager=True)
    return plan.model_copy(update={"body": GraphSegments(objective="latency", segments=segments)})


def profiled_times(plan: GraphPlan, cluster: GraphCluster) -> Times:
    members = cluster.rank_devices(plan)
    return [
        [segment_seconds(cluster, member, each) for each in plan.body.segments_of(rank)]
        for rank, member in enumerate(members)
    ]


def calibrated(cluster: GraphCluster, plan: GraphPlan, seconds: Times, delays: Times) -> GraphCluster:
    calibration = Calibration()
    for _ in range(20):
        calibration.observe(cluster, plan, seconds, delays)
    return calibration.apply(cluster)


@st.composite
def homes(draw: st.DrawFn) -> tuple[GraphSpec, GraphPlan, GraphCluster]:
    spec = two_branches(out_bytes=draw(st.integers(1, 500)))
    plan = eager_plan(spec, draw(st.lists(st.sampled_from(["id-a", "id-b", "id-c"]), min_size=6, max_size=6)))
    wire = WireCost(
        encrypted_seconds_per_byte=draw(st.sampled_from([0.0, 0.001, 0.01])),
        seconds_per_message=draw(st.sampled_from([0.0, 0.2])),
    )
    cluster = cluster_of(spec, [1.0, 0.5, 2.0], 1000.0, latency_seconds=draw(st.sampled_from([0.0, 0.3])), wire=wire)
    return spec, plan, replace(cluster, measured=draw(st.booleans()))


@given(homes(), st.floats(0.0, 1.0))
def test_simulated_times_leave_the_profile_as_it_is(
    home: tuple[GraphSpec, GraphPlan, GraphCluster], shared: float
) -> None:
    """Whether segments take the CPU time that transfers share with them, a part of it, or only their own."""
    spec, plan, cluster = home
    delays = segment_delays(spec, plan, cluster)
    seconds = [
        [own + shared * delay for own, delay in zip(*each, strict=True)]
        for each in zip(profiled_times(plan, cluster), delays, strict=True)
    ]
    found = calibrated(cluster, plan, seconds, delays)
    assert [list(row) for row in found.seconds] == [pytest.approx(row) for row in cluster.seconds]


@given(homes(), st.floats(1.0, 4.0))
def test_slow_devices_get_their_factor_whatever_they_transfer(
    home: tuple[GraphSpec, GraphPlan, GraphCluster], slow: float
) -> None:
    spec, plan, cluster = home
    delays = segment_delays(spec, plan, cluster)
    seconds = [
        [slow * own + delay for own, delay in zip(*each, strict=True)]
        for each in zip(profiled_times(plan, cluster), delays, strict=True)
    ]
    found = calibrated(cluster, plan, seconds, delays)
    assert [list(row) for row in found.seconds] == [
        pytest.approx([slow * each for each in row]) for row in cluster.seconds
    ]


@given(homes())
def test_delays_are_cpu_time_of_the_ranks_transfers(home: tuple[GraphSpec, GraphPlan, GraphCluster]) -> None:
    spec, plan, cluster = home
    tasks = request_tasks(spec, plan.body.segments, cluster, cluster.rank_devices(plan))
    for rank, delays in enumerate(segment_delays(spec, plan, cluster)):
        own = [each for each in tasks if each.kind is Work.WIRE and each.resources == compute_resources(rank)]
        assert len(delays) == len(plan.body.segments_of(rank))
        assert min(delays) >= -1e-9
        assert sum(delays) <= sum(each.seconds for each in own) + 1e-9


@pytest.mark.parametrize(("measured", "delay"), [(False, 0.2), (True, 0.8)])
def test_segment_waits_while_the_result_before_it_is_sent(measured: bool, delay: float) -> None:
    """The first device sends the result of 1 s, which takes 0.2 s of its CPU, or four times as much over a real link."""
    operators = [Operator("sent", "Conv", 1.0), Operator("used", "Conv", 1.0), Operator("long", "Conv", 3.0)]
    spec = from_edges("two", operators, [200, 0, 0], [(0, 1)])
    wire = WireCost(encrypted_seconds_per_byte=0.001)
    cluster = replace(cluster_of(spec, [1.0, 1.0], bytes_per_second=1000.0, wire=wire), measured=measured)
    plan = eager_plan(spec, ["id-a", "id-b", "id-a"])
    delays = segment_delays(spec, plan, cluster)
    assert delays == [pytest.approx([0.0, delay]), pytest.approx([0.0])]
    found = calibrated(cluster, plan, [[1.0, 3.0 + delay], [1.0]], delays)
    assert [row[0] for row in found.seconds] == pytest.approx([1.0, 1.0, 3.0])
    slower = calibrated(cluster, plan, [[1.0, 3.0 + delay], [1.0]], [[0.0, 0.0], [0.0]])
    assert slower.seconds[2][0] > 3.0 + delay / 2  # counted twice without the delay: in the factor and in the price


# Seconds of a segment of 1 s, of which transfers are predicted to take another 0.5:
@pytest.mark.parametrize(("measured", "factor"), [(0.8, 0.8), (1.0, 1.0), (1.3, 1.0), (1.5, 1.0), (2.0, 1.5)])
def test_delay_explains_times_above_the_profile_only(measured: float, factor: float) -> None:
    spec = from_edges("one", [Operator("op", "Conv", 1.0)], [0], [])
    cluster, plan = cluster_of(spec, [1.0], 1.0), placed_plan(spec, ["id-a"])
    assert calibrated(cluster, plan, [[measured]], [[0.5]]).seconds[0][0] == pytest.approx(factor)
