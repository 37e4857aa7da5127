"""Plans for graphs: price under the simulator, memory, choice of strategy, and errors."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.graphs import chain, cluster_of, from_edges, two_branches

from coordinator.devices.cluster_file import read_cluster
from coordinator.devices.graph_profiling import operator_seconds
from coordinator.models.onnx.cutting import check_segments, cut
from coordinator.plan.graph import auto
from coordinator.plan.graph.auto import GraphCandidate, plan_graph, try_method, without_plan
from coordinator.plan.graph.cluster import GraphCluster, graph_cluster_with_limits
from coordinator.plan.graph.memory import memory_by_rank
from coordinator.plan.graph.predict import (
    num_stages,
    peak_activation_bytes,
    predict_segments,
    requests_in_flight,
)
from coordinator.plan.graph.request import GraphRequest, objective_seconds
from coordinator.plan.graph.tasks import request_tasks, tensor_transfers
from coordinator.plan.graph.throughput.planners import plan_pipeline
from coordinator.plan.limits import parse_limit
from coordinator.plan.methods import GRAPH_METHODS, Method
from coordinator.plan.simulator import compute_resources, send_resources, simulate, transfer_resources
from coordinator.plan.solution import OperatorAssignment, SearchOptions, Solution
from coordinator.serve.planners.process import solve_graph
from hearth.errors import BadSetting, ModelDoesNotFit, NoPlacement
from hearth.plan.graph_spec import GraphSpec, Operator, Parameter
from hearth.plan.profile import SharedMedium, WireCost
from hearth.wire.messages import GraphProfile, Kernel

# ---- prices -----------------------------------------------------------------------------------------------------------


def test_chain_over_two_devices_costs_compute_and_transfer() -> None:
    spec = chain(1, [100, 100, 100, 100])
    cluster = cluster_of(spec, [1.0, 0.5], bytes_per_second=50.0, latency_seconds=0.25)
    segments = cut(spec, [0, 0, 1, 1])
    priced = predict_segments(spec, segments, cluster, [0, 1])
    assert priced.latency_seconds == pytest.approx(2 * 1.0 + 100 / 50 + 0.25 + 2 * 2.0)
    assert (priced.bottleneck, priced.bottleneck_seconds) == (compute_resources(1), pytest.approx(4.0))
    assert priced.busy_seconds == pytest.approx((2.0, 4.0))


def test_transfers_of_a_device_that_computes_on_its_gpu_take_cpu_time_only() -> None:
    spec = chain(1, [100, 100, 100, 100])
    cluster = cluster_of(spec, [1.0, 0.5], bytes_per_second=1e6)
    priced = []
    for beside_compute in (False, True):
        wire = WireCost(encrypted_seconds_per_byte=0.03, beside_compute=beside_compute)
        devices = tuple(replace(device, wire=wire) for device in cluster.devices)
        priced.append(predict_segments(spec, cut(spec, [0, 0, 1, 1]), replace(cluster, devices=devices), [0, 1]))
    assert priced[0].busy_seconds == pytest.approx((2.0 + 3.0, 4.0 + 3.0))
    assert priced[1].busy_seconds == pytest.approx((2.0, 4.0))
    assert priced[1].latency_seconds == pytest.approx(priced[0].latency_seconds)
    assert priced[1].transfer_seconds == pytest.approx(priced[0].transfer_seconds)


def test_busiest_link_is_the_bottleneck() -> None:
    spec = chain(1, [100, 100])
    cluster = cluster_of(spec, [1.0, 1.0], bytes_per_second=10.0)
    for congestion in (True, False):
        priced = predict_segments(spec, cut(spec, [0, 1]), cluster, [0, 1], congestion)
        assert priced.bottleneck_seconds == pytest.approx(10.0)
        assert priced.bottleneck == (send_resources(0) if congestion else transfer_resources(0, 1))


def test_branches_overlap_and_tensors_are_sent_once_per_device() -> None:
    spec = two_branches()
    cluster = cluster_of(spec, [1.0, 1.0], bytes_per_second=1000.0)
    segments = cut(spec, [0, 0, 0, 1, 1, 0], eager=True)
    assert [(each.tensor, each.source, each.target) for each in tensor_transfers(spec, segments)] == [
        ("op0", 0, 1), ("op4", 1, 0),
    ]  # fmt: skip
    assert predict_segments(spec, segments, cluster, [0, 1]).latency_seconds == pytest.approx(1 + 0.1 + 2 + 0.1 + 1)


def test_encryption_cost_counts_as_device_compute() -> None:
    spec = chain(1, [100, 100])
    plain = cluster_of(spec, [1.0, 1.0], bytes_per_second=100.0)
    wire = WireCost(encrypted_seconds_per_byte=0.01, seconds_per_message=0.5)
    costly = replace(plain, devices=tuple(replace(device, wire=wire) for device in plain.devices))
    segments = cut(spec, [0, 1])
    assert predict_segments(spec, segments, costly, [0, 1]).busy_seconds == pytest.approx((2.5, 2.5))
    assert predict_segments(spec, segments, plain, [0, 1]).latency_seconds == pytest.approx(3.0)
    assert predict_segments(spec, segments, costly, [0, 1]).latency_seconds == pytest.approx(6.0)


@st.composite
def graphs(draw: st.DrawFn) -> GraphSpec:
    """Up to ten operators; each except the first reads the output of one or two earlier ones."""
    count = draw(st.integers(1, 10))
    edges = sorted(
        {
            (before, index)
            for index in range(1, count)
            for before in draw(st.sets(st.integers(0, index - 1), min_size=1, max_size=2))
        }
    )
    operators = [Operator(f"op{i}", "Conv", draw(st.integers(0, 9)) / 2, (i,)) for i in range(count)]
    parameters = [Parameter(f"w{i}", draw(st.integers(0, 50))) for i in range(count)]
    return from_edges(
        "random", operators, draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)), edges, parameters
    )


@given(graphs(), st.data())
def test_throughput_never_exceeds_the_bottleneck(spec: GraphSpec, data: st.DataObject) -> None:
    """Never higher; and close to it once the pipeline is full."""
    cluster = cluster_of(spec, [1.0, 2.0, 1.5], bytes_per_second=40.0)
    assignment = data.draw(st.lists(st.integers(0, 2), min_size=spec.num_operators, max_size=spec.num_operators))
    used = list(dict.fromkeys(assignment))
    segments = cut(spec, [used.index(device) for device in assignment])
    priced = predict_segments(spec, segments, cluster, used)
    assert priced.latency_seconds >= max(priced.busy_seconds) - 1e-9
    count = 30
    timeline = simulate(request_tasks(spec, segments, cluster, used, num_requests=count))
    assert timeline.makespan >= count * priced.bottleneck_seconds - 1e-6
    assert timeline.makespan <= count * priced.latency_seconds + 1e-6


def test_full_pipeline_completes_one_request_per_bottleneck_time() -> None:
    spec = chain(1, [100] * 6)
    cluster = cluster_of(spec, [1.0, 1.0, 1.0], bytes_per_second=100.0)
    segments = cut(spec, [0, 0, 1, 1, 2, 2])
    priced = predict_segments(spec, segments, cluster, [0, 1, 2])
    timeline = simulate(request_tasks(spec, segments, cluster, [0, 1, 2], num_requests=50))
    assert timeline.makespan == pytest.approx(priced.latency_seconds + 49 * priced.bottleneck_seconds)
    assert (num_stages(segments), requests_in_flight(segments)) == (3, 9)


# ---- memory -----------------------------------------------------------------------------------------------------------


def test_peak_bytes_count_live_tensors() -> None:
    spec = chain(1, [10, 20, 30, 40])
    assert peak_activation_bytes(spec, range(4)) == 70  # 30 is read while 40 is written
    assert peak_activation_bytes(spec, [1]) == 30  # 10 is an input of the segment
    assert peak_activation_bytes(two_branches(out_bytes=10), range(6)) == 30


def test_all_bytes_of_a_worker_count_on_profiled_devices() -> None:
    spec = chain(1, [10, 10], weights=[100, 300])
    cluster = cluster_of(
        spec, [1.0, 1.0], 1e9, process_bytes=1000, load_bytes=800, loading_bytes=40, run_bytes=50
    )  # fmt: skip
    segments = cut(spec, [0, 1])
    first, second = memory_by_rank(spec, segments, cluster, [0, 1])
    assert (first.weights, second.weights) == (200, 600)  # profiling showed that weights take twice their bytes
    assert first.workspace == 1000 + 10 + (8 << 20)
    # Sent tensors and their encrypted copies:
    assert first.activations == 50 // 2 + requests_in_flight(segments) * 2 * 10
    # Cluster from a file:
    assert memory_by_rank(spec, segments, cluster_of(spec, [1.0, 1.0], 1e9), [0, 1])[0].total == 100


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_loading_takes_memory_for_what_a_device_holds(objective: Any) -> None:
    """Loading the whole graph takes more memory than either device has; each holds half of it."""
    spec = chain(1, [10] * 8, weights=[1 << 20] * 8)
    needed = (4 << 20) + (12 << 20) // 2 + (8 << 20) + 1000  # weights, loading, a chunk, tensors
    for missing, num_ranks in ((0, 2), (1 << 20, None)):
        cluster = cluster_of(spec, [1.0, 1.0], 1e9, needed - missing, load_bytes=8 << 20, loading_bytes=12 << 20)
        try:
            plan = plan_graph(GraphRequest(spec, cluster, objective), time.monotonic).plan
        except ModelDoesNotFit:
            assert num_ranks is None
        else:
            assert plan.num_ranks == num_ranks
            assert all(device.memory.total <= device.budget_bytes for device in plan.devices)


def test_planning_is_repeated_if_activations_do_not_fit() -> None:
    spec = chain(1, [1000] * 8, weights=[1 << 20] * 8)
    budget = (8 << 20) + (5 << 20)
    cluster = cluster_of(spec, [10.0, 10.0], 1e9, budget, process_bytes=0, load_bytes=8 << 20, run_bytes=4000)
    plan = plan_graph(GraphRequest(spec, cluster, "throughput"), time.monotonic).chosen.plan
    assert plan is not None
    assert plan.num_ranks == 2
    assert all(device.memory.total <= device.budget_bytes for device in plan.devices)


def test_all_attempts_share_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt finds a plan that fits: each takes half of what is left, and the last one all of it."""
    spec = chain(1, [1000] * 8, weights=[1 << 20] * 8)
    request = GraphRequest(spec, cluster_of(spec, [1.0, 1.0], 1e9, 13 << 20, load_bytes=8 << 20), "latency", "heft")
    limits: list[float] = []

    def place(request: GraphRequest, method: Method, options: SearchOptions, policy: None) -> Solution[Any]:
        limits.append(options.time_limit_seconds)
        return Solution(OperatorAssignment((0,) * 8), 1.0)

    monkeypatch.setattr(auto, "place_operators", place)
    (method,) = GRAPH_METHODS.select("heft", "latency")
    assert try_method(request, method, SearchOptions(8.0, 0, lambda: sum(limits)), None).plan is None
    assert limits == [4.0, 2.0, 1.0, 1.0]


def sharing_weights(kind: str) -> GraphSpec:
    """A chain of four operators, the first and third with the same weights, like the second and fourth."""
    operators = [Operator(f"op{index}", kind, 1.0, (index % 2,)) for index in range(4)]
    parameters = [Parameter("v", 1000), Parameter("w", 3000)]
    return from_edges("sharing", operators, [10] * 4, [(0, 1), (1, 2), (2, 3)], parameters)


@pytest.mark.parametrize(
    ("kind", "room", "weights"),
    [("MatMul", 8000, 8000), ("MatMul", 7999, 4000), ("Conv", 8000, 8000), ("Conv", 7999, 8000)],
)
def test_weights_of_products_count_once_where_there_is_no_room_for_copies(kind: str, room: int, weights: int) -> None:
    spec = sharing_weights(kind)
    budget = room + (8 << 20) + 30  # a chunk, the output of three requests in flight
    cluster = cluster_of(spec, [1.0], 1e9, budget, process_bytes=0, load_bytes=8000)
    assert memory_by_rank(spec, cut(spec, [0] * 4), cluster, [0])[0].weights == weights


@pytest.mark.parametrize("strategy", ["doppler", "moirai", "heft", "enumerative"])
def test_named_strategies_find_a_plan_if_each_device_has_room_for_all_weights_once(strategy: str) -> None:
    spec = sharing_weights("MatMul")
    chunk_and_tensors = (8 << 20) + 1000
    for budget, device in ((4000, {}), (4000 + chunk_and_tensors, {"process_bytes": 0, "load_bytes": 8000})):
        cluster = cluster_of(spec, [1.0, 1.0], 1e9, budget, **device)
        planned = plan_graph(GraphRequest(spec, cluster, "latency", strategy, 0.5), time.monotonic).chosen.plan
        assert planned is not None
        assert all(each.memory.total <= each.budget_bytes for each in planned.devices)


@pytest.mark.parametrize("budget", [14 << 20, 13 << 20])
def test_auto_takes_blocks_where_no_search_finds_room(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chains with the same weights: each device holds half of them for both, and the tensors of few segments."""
    length, size = 8, 1 << 20
    operators = [Operator(f"op{index}", "MatMul", 1.0, (index % length,)) for index in range(2 * length)]
    edges = [(index, index + 1) for index in range(2 * length - 1) if index != length - 1]
    weights = [Parameter(f"w{index}", size) for index in range(length)]
    spec = from_edges("chains", operators, [size // 16] * len(operators), edges, weights)
    request = GraphRequest(spec, cluster_of(spec, [1.0, 1.0], 1e9, budget, process_bytes=0, load_bytes=length * size))

    def finds_nothing(request: GraphRequest, method: Method, *_: object) -> GraphCandidate:
        return without_plan(method.name, NoPlacement(graph=spec.name, strategy=method.name))

    monkeypatch.setattr(auto, "try_method", finds_nothing)
    try:
        plan = plan_graph(request, time.monotonic).plan
    except NoPlacement:
        assert budget == 13 << 20
        return
    ranks = plan.body.ranks_of_operators()
    assert [ranks[each] for each in range(2 * length)] == 2 * [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(device.memory.total <= device.budget_bytes for device in plan.devices)


def test_activations_are_reserved_for_the_segments_of_a_device() -> None:
    """Running the whole graph takes more memory than the second device has; its own segment takes little."""
    spec = chain(1, [1 << 20, 10, 10, 10], weights=[1 << 20] * 4)
    chunk, run_bytes = 8 << 20, 6 << 20
    budgets = [(3 << 20) + chunk + run_bytes + 1000, (3 << 20) + chunk + 1000]
    cluster = cluster_of(spec, [1.0, 1.0], 1e9, budgets, process_bytes=0, load_bytes=4 << 20, run_bytes=run_bytes)
    plan = plan_graph(GraphRequest(spec, cluster, "throughput"), time.monotonic).chosen.plan
    assert plan is not None
    assert plan.num_ranks == 2
    assert all(device.memory.total <= device.budget_bytes for device in plan.devices)


# ---- strategies -------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(graphs(), st.sampled_from(["latency", "throughput"]), st.integers(60, 400))
def test_every_strategy_respects_memory_and_dependencies(spec: GraphSpec, objective: Any, budget: int) -> None:
    cluster = cluster_of(spec, [1.0, 2.0, 1.5], 40.0, budget)
    try:
        planned = plan_graph(GraphRequest(spec, cluster, objective, time_limit_seconds=1.0), time.monotonic)
    except (ModelDoesNotFit, NoPlacement):
        assert spec.parameter_bytes(range(spec.num_operators)) > budget
        return
    for each in planned.candidates:
        if each.plan is None or each.solution is None:
            assert each.reason
            continue
        check_segments(spec, each.plan.body.segments)
        assert all(device.memory.total <= device.budget_bytes for device in each.plan.devices)
        assert objective_seconds(each.plan) >= each.solution.bound - 1e-6
    chosen = planned.chosen.plan
    assert chosen is not None
    least = min(objective_seconds(each.plan) for each in planned.candidates if each.plan)
    assert objective_seconds(chosen) <= 1.01 * least + 1e-9


@pytest.mark.parametrize(
    ("bytes_per_second", "num_devices"), [(1e9, 2), (1.0, 1)], ids=["fast links", "slow links"]
)  # fmt: skip
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_auto_uses_two_devices_only_on_fast_links(objective: Any, bytes_per_second: float, num_devices: int) -> None:
    spec = two_branches()
    cluster = cluster_of(spec, [1.0, 1.0], bytes_per_second)
    planned = plan_graph(GraphRequest(spec, cluster, objective, time_limit_seconds=60.0), time.monotonic)
    plan = planned.chosen.plan
    assert plan is not None
    assert plan.num_ranks == num_devices
    assert plan.planner == "local" if num_devices == 1 else plan.planner != "local"
    # The pipeline gives one device the stem and a branch, the other the other branch and the head.
    expected = {("latency", 2): 4.0, ("throughput", 2): 3.0}.get((objective, num_devices), 6.0)
    assert objective_seconds(plan) == pytest.approx(expected, rel=1e-3)
    assert {"local on a", "local on b"} <= {each.label for each in planned.candidates}
    assert len(plan.alternatives) == len(planned.candidates) - 1


@pytest.mark.parametrize("strategy", GRAPH_METHODS.names())
def test_requested_strategy_is_used(strategy: str) -> None:
    spec = two_branches()
    objective: Any = "latency" if strategy in GRAPH_METHODS.names("latency") else "throughput"
    request = GraphRequest(spec, cluster_of(spec, [1.0, 3.0], 50.0), objective, strategy, time_limit_seconds=1.0)
    chosen = plan_graph(request, time.monotonic).chosen
    assert chosen.plan is not None
    assert chosen.solution is not None
    assert chosen.strategy == chosen.plan.planner == strategy
    assert set(chosen.solution.assignment.devices) <= {0, 1}


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_plan_of_one_device_is_proven(objective: Any) -> None:
    spec = chain(1, [100, 100])
    chosen = plan_graph(GraphRequest(spec, cluster_of(spec, [0.5], 1e9), objective=objective), time.monotonic).chosen
    assert chosen.plan is not None
    assert chosen.solution is not None
    assert (chosen.solution.bound, chosen.solution.proven) == (4.0, True)
    assert (chosen.plan.predicted.bound_seconds, chosen.plan.predicted.proven_optimal) == (4.0, True)


def test_missing_bytes_are_reported_if_the_model_does_not_fit() -> None:
    spec = chain(1, [1, 1, 1], weights=[100, 100, 100])
    with pytest.raises(ModelDoesNotFit) as error:
        plan_graph(GraphRequest(spec, cluster_of(spec, [1.0, 1.0], 1e9, 120)), time.monotonic)
    assert error.value.missing_bytes == 60
    with pytest.raises(ModelDoesNotFit) as error:
        plan_graph(GraphRequest(spec, cluster_of(spec, [1.0, 1.0], 1e9, [200, 250]), strategy="local"), time.monotonic)
    assert error.value.missing_bytes == 50
    with pytest.raises(NoPlacement):  # 300 bytes in total, but each device fits only one operator
        plan_graph(GraphRequest(spec, cluster_of(spec, [1.0, 1.0], 1e9, 150), "throughput"), time.monotonic)


def test_tensors_above_the_message_limit_are_not_sent() -> None:
    spec = chain(1, [100 << 20, 100 << 20])
    cluster = cluster_of(spec, [1.0, 1.0], 1e15, 1 << 40, process_bytes=1)
    planned = plan_graph(GraphRequest(spec, cluster, "throughput"), time.monotonic)
    assert planned.chosen.num_devices == 1
    assert any("exceed the size limit of a message" in each.reason for each in planned.candidates)


@pytest.mark.parametrize(
    ("strategy", "objective", "reason"),
    [
        ("best", "latency", "'best' is none of auto, moirai"),
        ("pipeline", "latency", "pipeline is not for latency"),
        ("moirai", "throughput", "moirai is not for throughput"),
        ("auto", "power", "'power' is none of latency, throughput"),
    ],
)
def test_unknown_strategy_or_objective_is_named(strategy: str, objective: str, reason: str) -> None:
    with pytest.raises(BadSetting, match=reason):
        GRAPH_METHODS.check(strategy, objective)


def test_planner_process_equals_in_process_planning() -> None:
    spec = two_branches()
    cluster = cluster_of(spec, [1.0, 3.0], 50.0, latency_seconds=0.125, run_bytes=3)
    request = GraphRequest(spec, cluster, "throughput", time_limit_seconds=1.0, model_hash="ab" * 32)
    seen: list[str] = []
    there, here = asyncio.run(solve_graph(request, seen.append)), plan_graph(request, time.monotonic)
    assert there.chosen.plan == here.chosen.plan
    assert [each.label for each in there.candidates] == [each.label for each in here.candidates]
    assert there.chosen.solution is not None
    assert here.chosen.solution is not None
    assert replace(there.chosen.solution, seconds=0) == replace(here.chosen.solution, seconds=0)
    assert seen == ["pipeline-exact", "pipeline"]


def test_planner_process_errors_keep_their_type() -> None:
    spec = chain(1, [1, 1], weights=[100, 100])
    with pytest.raises(ModelDoesNotFit) as error:
        asyncio.run(solve_graph(GraphRequest(spec, cluster_of(spec, [1.0], 1e9, 120))))
    assert error.value.missing_bytes == 80


# ---- clusters ---------------------------------------------------------------------------------------------------------

CLUSTER = """
mbit_per_second = [[0, 80], [8, 0]]
latency_seconds = 0.5
[[devices]]
name = "kitchen"
memory = "1KiB"
flops_per_second = 2.0
seconds_per_operator = 0.25
[[devices]]
name = "hall"
memory = 500
[devices.operator_seconds]
op0 = 7
op1 = 8
"""


def test_cluster_is_read_from_toml_or_json(tmp_path: Path) -> None:
    spec = chain(3, [1, 1])
    toml = tmp_path / "home.toml"
    toml.write_text(CLUSTER)
    device = {"memory": 500, "operator_seconds": {"op0": 7, "op1": 8}}
    values = {
        "mbit_per_second": [[0, 80], [8, 0]], "latency_seconds": [[0, 0.5], [0.5, 0]],
        "devices": [
            {"name": "kitchen", "memory": "1KiB", "flops_per_second": 2.0, "seconds_per_operator": 0.25},
            {"name": "hall", **device},
        ],
    }  # fmt: skip
    (tmp_path / "home.json").write_text(json.dumps(values))
    read = read_cluster(tmp_path / "home.json", spec)
    assert read.seconds == ((1.75, 7.0), (1.75, 8.0))
    assert read.bytes_per_second == ((math.inf, 1e7), (1e6, math.inf))
    assert read.latency_seconds == ((0.0, 0.5), (0.5, 0.0))
    assert [(device.name, device.budget_bytes) for device in read.devices] == [("kitchen", 1024), ("hall", 500)]
    try:
        import tomllib  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(BadSetting, match=r"Python 3\.11"):
            read_cluster(toml, spec)
    else:
        assert read_cluster(toml, spec) == read


def test_media_of_a_cluster_file_limit_the_links_that_cross_them(tmp_path: Path) -> None:
    path = tmp_path / "home.json"
    devices = [{"name": name, "memory": 1, "flops_per_second": 1} for name in "abcd"]
    media = [{"devices": ["b", "c"], "mbit_per_second": 60}, {"devices": ["d"], "mbit_per_second": 20}]
    path.write_text(json.dumps({"mbit_per_second": 40, "devices": devices, "media": media}))
    read = read_cluster(path, chain(1, [1]))
    assert read.media == (SharedMedium(device_ids=("b", "c")), SharedMedium(device_ids=("d",)))
    mbit = [[math.inf if a == b else rate * 8 / 1e6 for b, rate in enumerate(row)]
            for a, row in enumerate(read.bytes_per_second)]  # fmt: skip
    # A wire and the medium: the wire's 40. Both ends on one medium: half of it. Two media: the slower one.
    assert mbit == [
        [math.inf, 40, 40, 20], [40, math.inf, 30, 20], [40, 30, math.inf, 20], [20, 20, 20, math.inf]
    ]  # fmt: skip


@pytest.mark.parametrize(("on_air", "value"), [("", 2.0), ("abc", 3.0)])
def test_pipelines_have_few_cuts_over_a_medium_and_the_value_of_the_simulator(
    tmp_path: Path, on_air: str, value: float
) -> None:
    """Six operators of 1 s, tensors of 1.75 s: two cuts over one medium would take 3.5 s."""
    path, spec = tmp_path / "home.json", chain(1, [14] * 6)
    devices = [{"name": name, "memory": 100, "flops_per_second": 1} for name in "abc"]
    media = [{"devices": list(on_air), "mbit_per_second": 128e-6}] if on_air else []
    path.write_text(json.dumps({"mbit_per_second": 64e-6, "devices": devices, "media": media}))
    cluster = read_cluster(path, spec)
    for strategy in ("pipeline-exact", "pipeline"):
        found = plan_pipeline(
            spec, cluster.seconds, [100] * 3, cluster.bytes_per_second, strategy,
            SearchOptions(5.0, 0, time.monotonic), cluster.media_crossed,
        )  # fmt: skip
        ranks = {device: rank for rank, device in enumerate(dict.fromkeys(found.assignment.devices))}
        segments = cut(spec, [ranks[device] for device in found.assignment.devices])
        predicted = predict_segments(spec, segments, cluster, list(ranks))
        assert found.value == pytest.approx(predicted.bottleneck_seconds)
        if strategy == "pipeline-exact":
            assert found.value == pytest.approx(value)
            assert found.proven == (not on_air)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mbit_per_second": None}, "lacks mbit_per_second"),
        ({"mbit_per_second": [[0, 1]]}, "must have 2 rows of 2 numbers"),
        ({"mbit_per_second": [[0, 0], [1, 0]]}, "from a to b must be above 0"),
        ({"mbit_per_second": -1}, "mbit_per_second"),
        ({"devices": []}, "devices"),
        ({"devices": [{"name": "a", "memory": 1, "flops": 3}]}, "devices.0.flops"),
        ({"devices": [{"name": "a", "memory": "much", "flops_per_second": 3}]}, "memory of a"),
        ({"devices": [{"name": "a", "memory": 1}]}, "a needs flops_per_second, or operator_seconds for op0"),
        ({"devices": [{"name": "a", "memory": 1, "operator_seconds": {"conv": 1}}]}, "conv, which is not an operator"),
        ({"devices": [{"name": "a", "memory": 1, "flops_per_second": 1}] * 2}, "names a device twice"),
        ({"media": [{"devices": ["a", "c"], "mbit_per_second": 1}]}, r"media\.0 names c, which is none of a, b"),
        ({"media": [{"devices": ["a", "a"], "mbit_per_second": 1}]}, r"media\.0 names a again"),
        ({"media": [{"devices": [each], "mbit_per_second": 1} for each in "aa"]}, r"media\.1 names a again"),
        ({"media": [{"devices": [], "mbit_per_second": 1}]}, r"media\.0\.devices"),
        ({"media": [{"devices": ["a"]}]}, r"media\.0\.mbit_per_second"),
    ],
)
def test_cluster_file_errors_name_their_place(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    devices = [{"name": name, "memory": 1, "flops_per_second": 1} for name in "ab"]
    path = tmp_path / "home.json"
    path.write_text(json.dumps({"mbit_per_second": 1, "devices": devices, **change}))
    with pytest.raises(BadSetting, match=reason):
        read_cluster(path, chain(1, [1]))
    path.write_text("{")
    with pytest.raises(BadSetting, match="is not JSON"):
        read_cluster(path, chain(1, [1]))


def test_limits_lower_budgets() -> None:
    spec = chain(1, [1])
    cluster: GraphCluster = cluster_of(spec, [1.0, 1.0], 1.0, 100 << 20)
    limited = graph_cluster_with_limits(cluster, [parse_limit("b=25%"), parse_limit("id-a=2MiB")])
    assert [device.budget_bytes for device in limited.devices] == [2 << 20, 25 << 20]


def test_kernel_seconds_are_divided_and_scaled_to_the_run() -> None:
    spec = chain(1, [1, 1, 1, 1])
    operators = tuple(
        operator._replace(flops=flops) for operator, flops in zip(spec.operators, (3.0, 1.0, 0.0, 0.0), strict=True)
    )
    spec = replace(spec, operators=operators)
    kernels = (
        Kernel(name="fused", kind="Conv", provider="cpu", seconds=4.0, operators=("op0", "op1")),
        Kernel(name="both", kind="Add", provider="cpu", seconds=2.0, operators=("op2", "op3")),
        Kernel(name="reorder", kind="Reorder", provider="cpu", seconds=1.0),
    )
    profiled = GraphProfile(
        kernels=kernels, run_seconds=12.0, provider="cpu", process_bytes=1, load_bytes=1, peak_bytes=1, run_bytes=1,
        wire=WireCost(),
    )  # fmt: skip
    assert operator_seconds(spec, profiled) == pytest.approx((6.0, 2.0, 2.0, 2.0))
    nothing = profiled.model_copy(update={"kernels": ()})
    assert operator_seconds(spec, nothing) == pytest.approx((3.0,) * 4)


@pytest.mark.parametrize("strategy", ["moirai", "heft"])
def test_fused_operators_are_placed_together(strategy: str) -> None:
    """Two branches of a convolution and its activation: a plan for latency never separates the two."""
    kinds = ["Split", "Conv", "Relu", "Conv", "Relu", "Concat"]
    edges = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)]
    operators = [Operator(f"op{index}", kind, 1.0, (index,)) for index, kind in enumerate(kinds)]
    spec = from_edges("branches", operators, [100] * 6, edges, [Parameter(f"w{index}", 10) for index in range(6)])
    cluster = cluster_of(spec, [1.0, 0.9], bytes_per_second=1000.0)
    planned = plan_graph(GraphRequest(spec, cluster, "latency", strategy=strategy), time.monotonic)
    assert planned.chosen.solution is not None
    device, starts = planned.chosen.solution.assignment
    assert (device[1], device[3]) == (device[2], device[4])
    assert device[1] != device[3]
    for first, second in ((1, 2), (3, 4)):
        assert starts[second] == pytest.approx(starts[first] + cluster.seconds[first][device[first]])
    assert planned.chosen.plan is not None
    assert sum(len(segment.operators) for segment in planned.chosen.plan.body.segments) == 6


@pytest.mark.parametrize("seconds_of_an_end", [0.5, 2.0, 3.0])
def test_stage_with_more_transfers_gets_less_compute(seconds_of_an_end: float) -> None:
    """The CPU cost of transfers is balanced too: no other pair of cuts is better under the simulator."""
    spec = chain(1, [100] * 14)
    wire = WireCost(encrypted_seconds_per_byte=seconds_of_an_end / 100 / 4)
    cluster = cluster_of(spec, [1.0, 1.0, 1.0], bytes_per_second=1e6, wire=wire)
    planned = plan_graph(GraphRequest(spec, cluster, "throughput", strategy="pipeline-exact"), time.monotonic)
    solution, plan = planned.chosen.solution, planned.chosen.plan
    assert solution is not None
    assert plan is not None
    least = min(
        predict_segments(
            spec, cut(spec, [0] * a + [1] * (b - a) + [2] * (14 - b)), cluster, [0, 1, 2]
        ).bottleneck_seconds
        for a in range(1, 13)
        for b in range(a + 1, 14)
    )
    assert solution.value == pytest.approx(least)
    assert objective_seconds(plan) == pytest.approx(least)
    assert 14 / 3 <= solution.bound <= least
