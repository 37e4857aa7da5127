"""Features of placement problems, and the clock that observes them."""

from __future__ import annotations

import numpy as np
import pytest
from support.placement_problems import in_other_unit, on_media, random_problem

from coordinator.plan.graph.latency.doppler.clock import TICKS_PER_MEAN_OPERATOR, EpisodeClock, in_clock_ticks
from coordinator.plan.graph.latency.doppler.features import (
    CLOCK_COLUMNS,
    DEVICE_FEATURES,
    EDGE_FEATURES,
    RAW_COLUMNS,
    VERTEX_FEATURES,
    device_features,
    problem_features,
)
from coordinator.plan.graph.latency.list_scheduling import contended_heft, rank_order, upward_ranks
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem
from coordinator.plan.graph.latency.schedule import best_schedule

# 0 -> 1 -> 3 and 0 -> 2 -> 3 on two devices, of which the second is three times slower. The mean operator takes 3.
DIAMOND = PlacementProblem(
    name="diamond",
    operators=("a", "b", "c", "d"),
    devices=("fast", "slow"),
    seconds=((2.0, 6.0), (1.0, 3.0), (2.0, 6.0), (1.0, 3.0)),
    memory_bytes=(10, 0, 20, 0),
    budget_bytes=(60, 20),
    flows=(
        Flow(0, (1, 2), ((0.0, 1.5), (1.5, 0.0))),
        Flow(1, (3,), ((0.0, 3.0), (3.0, 0.0))),
        Flow(2, (3,), ((0.0, 3.0), (3.0, 0.0))),
    ),
    latency=((0.0, 0.0), (0.0, 0.0)),
)


def test_features_of_a_diamond() -> None:
    found = problem_features(DIAMOND)
    columns = dict(zip(VERTEX_FEATURES, found.vertices.T.tolist(), strict=True))
    third = 1 / 3
    for name, expected in {
        "log_compute": np.log1p([4 * third, 2 * third, 4 * third, 2 * third]),
        "log_incoming": np.log1p([0, 0.5, 0.5, 2]),
        "log_outgoing": np.log1p([0.5, 1, 1, 0]),
        # in seconds: 4 + 1.5 + 4 + 3 + 2 is the critical path
        "b_level": np.array([14.5, 7, 9, 2]) / 14.5,
        "t_level": np.array([0, 5.5, 5.5, 12.5]) / 14.5,
        "path": np.array([14.5, 12.5, 14.5, 14.5]) / 14.5,
        "log_in_degree": np.log1p([0, 1, 1, 2]),
        "log_out_degree": np.log1p([2, 1, 1, 0]),
        "fastest": [0.5] * 4,
        "deviation": [0.5] * 4,
        "memory": [0.25, 0, 0.5, 0],
        "graph_memory": [30 / 80] * 4,
        "devices": [0.5] * 4,
        "log_transfer": [np.log1p(2.5 / 3)] * 4,
        "congestion": [1.0] * 4,
        "incumbent_start": [0.0] * 4,
    }.items():
        assert columns.pop(name) == pytest.approx(expected, rel=1e-6), name
    assert columns == {}
    assert list(zip(found.sources.tolist(), found.targets.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert found.edges == pytest.approx(np.log1p([[0.5, 2], [0.5, 2], [1, 1], [1, 1]]), rel=1e-6)
    assert found.following.tolist() == [2, 3, 3, 4]
    assert found.preceding.tolist() == [4, 0, 0, 2]


def test_incumbent_is_a_feature_of_operators_and_devices() -> None:
    incumbent = best_schedule(DIAMOND, [0, 1, 0, 0], range(4))
    found = problem_features(DIAMOND).with_incumbent(incumbent)
    starts = np.array(incumbent.starts) / incumbent.makespan
    assert found.vertices[:, VERTEX_FEATURES.index("incumbent_start")] == pytest.approx(starts)
    assert found.incumbent.tolist() == [[1, 0], [0, 1], [1, 0], [1, 0]]


def test_device_features_of_a_diamond() -> None:
    clock = EpisodeClock(in_clock_ticks(DIAMOND)[0])
    for operator, device in ((0, 0), (1, 1)):
        clock.observe(operator)
        clock.place(device)
    observed = np.array(clock.observe(2)).reshape(1, len(CLOCK_COLUMNS), 2) / TICKS_PER_MEAN_OPERATOR * 3  # seconds
    columns = dict(zip(CLOCK_COLUMNS, observed[0].tolist(), strict=True))
    ticks_of_one = 3 / TICKS_PER_MEAN_OPERATOR
    for name, expected in {
        "free": [2, 6.5],
        "load": [2, 3],
        "start": [2, 6.5],  # its input is on both already
        "sent": [1.5, 0],
        "received": [0, 1.5],
        "missing": [0, 0],
        "inputs_compute": [2, 0],
        "first_input": [0, 0],
        "last_input": [2, 0],
        "num_inputs": [ticks_of_one, 0],
    }.items():
        assert columns.pop(name) == pytest.approx(expected, abs=1e-5), name
    assert columns == {}
    raw = np.concatenate([observed, [[[2, 6], [0.5, 0.25], [0, 1]]]], axis=1)
    raw[:, RAW_COLUMNS.index("num_inputs")] /= ticks_of_one
    found = device_features(raw, np.array([[True, True]]), 3.0)[0]
    expected = {
        "log_free": np.log1p([0, 1.5]),
        "log_load": np.log1p([0, 1 / 3]),
        "log_start": np.log1p([0, 1.5]),
        "log_finish": np.log1p([0, 8.5 / 3]),
        "log_sent": np.log1p([0.5, 0]),
        "log_received": np.log1p([0, 0.5]),
        "log_seconds": np.log1p([2 / 3, 2]),
        "log_missing": [0, 0],
        "log_inputs_compute": np.log1p([2 / 3, 0]),
        "log_first_age": np.log1p([2 / 3, 0]),
        "log_last_age": [0, 0],
        "inputs": [1, 0],
        "memory_left": [0.5, 0.25],
        "incumbent": [0, 1],
    }
    assert tuple(expected) == DEVICE_FEATURES
    assert pytest.approx(np.array([*expected.values()]), abs=1e-5) == found.T
    only_second = device_features(raw, np.array([[False, True]]), 3.0)[0, 1]
    assert only_second[:4] == pytest.approx([0, 0, 0, 0])  # the best among the devices with room


def test_features_do_not_depend_on_the_unit_of_time() -> None:
    problem = random_problem(np.random.default_rng(0))
    ours, scaled = (problem_features(each) for each in (problem, in_other_unit(problem, 1000)))
    assert ours.vertices.shape == (problem.num_operators, len(VERTEX_FEATURES))
    assert ours.edges.shape == (len(ours.sources), len(EDGE_FEATURES))
    assert ours.vertices == pytest.approx(scaled.vertices, rel=1e-5, abs=1e-6)
    assert ours.edges == pytest.approx(scaled.edges, rel=1e-5, abs=1e-6)


def test_features_of_one_operator_without_time_or_memory_are_finite() -> None:
    nothing = PlacementProblem("one", ("a",), ("d",), ((0.0,),), (0,), (0,), (), ((0.0,),))
    found = problem_features(nothing)
    assert np.isfinite(found.vertices).all()
    raw = np.array([*EpisodeClock(in_clock_ticks(nothing)[0]).observe(0), 0.0, 0.0, 0.0]).reshape(
        1, len(RAW_COLUMNS), 1
    )
    assert np.isfinite(device_features(raw, np.array([[True]]), TICKS_PER_MEAN_OPERATOR)).all()


@pytest.mark.parametrize("congestion", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_clock_books_as_contended_heft_does(seed: int, congestion: bool) -> None:
    problem = random_problem(np.random.default_rng(seed), num_operators=24, congestion=congestion)
    if seed % 2:
        problem = on_media(problem, (0, 1))
    ticked, _ = in_clock_ticks(problem)
    clock = EpisodeClock(ticked)
    start, K = CLOCK_COLUMNS.index("start"), problem.num_devices
    for operator in rank_order(problem, upward_ranks(problem)):
        starts = clock.observe(operator)[start * K : (start + 1) * K]
        ends = [at + ticks for at, ticks in zip(starts, ticked.seconds[operator], strict=True)]
        clock.place(ends.index(min(ends)))
    assert tuple(clock.assignment) == contended_heft(problem).assignment
