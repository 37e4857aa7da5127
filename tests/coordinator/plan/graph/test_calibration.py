"""Factors learnt from requests: exact where a segment is one operator, shared where it is not, and forgotten in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.graph_plans import placed_plan
from support.graphs import chain, cluster_of

from coordinator.plan.graph.calibration import Calibration, Factors
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.speed_ratio import WINDOW, SpeedRatio
from hearth.plan.plan import GraphPlan

SPEC = chain(1, [100] * 6)
CLUSTER = cluster_of(SPEC, [1.0, 0.5, 2.0], bytes_per_second=50.0)
ALTERNATING = placed_plan(SPEC, ["id-a", "id-b"] * 3)  # every segment is one operator
HALVES = placed_plan(SPEC, ["id-a"] * 3 + ["id-b"] * 3)

factors = st.floats(0.5, 2.0)


def measured(cluster: GraphCluster, plan: GraphPlan) -> list[list[float]]:
    """The seconds of each rank's segments on devices that this cluster describes exactly."""
    return [
        [sum(cluster.seconds[each][member] for each in segment.operators) for segment in plan.body.segments_of(rank)]
        for rank, member in enumerate(cluster.rank_devices(plan))
    ]


def undelayed(plan: GraphPlan) -> list[list[float]]:
    return [[0.0] * len(plan.body.segments_of(rank)) for rank in range(plan.num_ranks)]


def scaled(cluster: GraphCluster, by_operator: Sequence[Sequence[float]]) -> GraphCluster:
    rows = zip(cluster.seconds, by_operator, strict=True)
    return replace(cluster, seconds=tuple(tuple(a * b for a, b in zip(*row, strict=True)) for row in rows))


def calibrated(true: GraphCluster, plan: GraphPlan, num_requests: int = 100) -> Calibration:
    calibration = Calibration()
    for _ in range(num_requests):
        calibration.observe(CLUSTER, plan, measured(true, plan), undelayed(plan))
    return calibration


@settings(max_examples=10)
@given(st.lists(st.tuples(factors, factors, factors), min_size=6, max_size=6))
def test_operators_that_run_alone_get_their_own_factor(by_operator: list[tuple[float, float, float]]) -> None:
    found = calibrated(scaled(CLUSTER, by_operator), ALTERNATING).apply(CLUSTER)
    for operator in range(6):
        member = operator % 2
        right = CLUSTER.seconds[operator][member] * by_operator[operator][member]
        assert found.seconds[operator][member] == pytest.approx(right, rel=0.12)  # one part in 21 is the device's


@settings(max_examples=10)
@given(factors, factors)
def test_a_segment_shares_its_factor_and_an_idle_device_gets_the_others(slow_a: float, slow_b: float) -> None:
    true = scaled(CLUSTER, [(slow_a, slow_b, 1.0)] * 6)
    calibration = calibrated(true, HALVES)
    found = calibration.apply(CLUSTER)
    elsewhere = (slow_a * slow_b) ** 0.5  # the median of the two, in logarithms
    for operator in range(6):
        ratios = [found.seconds[operator][member] / CLUSTER.seconds[operator][member] for member in range(3)]
        assert ratios == pytest.approx([slow_a, slow_b, elsewhere])
    assert calibration.device_factors() == pytest.approx({"id-a": slow_a, "id-b": slow_b})
    assert calibration.apply(CLUSTER, {"id-a": 3.0}).seconds[0][0] == pytest.approx(3 * CLUSTER.seconds[0][0])


def test_the_device_that_runs_a_graph_is_priced_as_an_idle_one_with_the_same_profile() -> None:
    """Outliers count alike for the device and for each of its operators, whatever its share."""
    whole, calibration = placed_plan(SPEC, ["id-a"] * 6), Calibration()
    for slow in (1.0, 2.0, 1.5, 40.0, 1.0, 30.0, 1.2, 1.0, 5.0, 1.0):
        calibration.observe(CLUSTER, whole, measured(scaled(CLUSTER, [(slow, 1.0, 1.0)] * 6), whole), undelayed(whole))
    found = calibration.apply(CLUSTER)
    running, idle = ([found.seconds[i][d] / CLUSTER.seconds[i][d] for i in range(6)] for d in (0, 2))
    assert running == pytest.approx(idle)


def test_an_operator_counts_by_its_share_of_the_segment() -> None:
    plan = placed_plan(SPEC, ["id-a", "id-b", *["id-a"] * 4])  # on a: an operator alone, and four together
    true = scaled(CLUSTER, [(4.0, 1.0, 1.0), *[(1.0, 1.0, 1.0)] * 5])
    found = calibrated(true, plan, num_requests=1).apply(CLUSTER)
    device = log(8 / 5)
    assert log(found.seconds[0][0]) == pytest.approx((log(4.0) + device) / 2)
    assert log(found.seconds[2][0]) == pytest.approx((0.25 * 0.0 + device) / 1.25)


def test_nothing_is_known_at_first_and_of_another_profile() -> None:
    assert Calibration().apply(CLUSTER) == CLUSTER
    calibration = calibrated(scaled(CLUSTER, [(2.0, 1.0, 1.0)] * 6), HALVES)
    other = scaled(CLUSTER, [(1.5, 1.0, 1.0)] * 6)
    assert calibration.apply(other).seconds[0][0] == pytest.approx(other.seconds[0][0] * 2**0.5)  # as of any device
    calibration.observe(other, HALVES, measured(other, HALVES), undelayed(HALVES))
    assert calibration.apply(other).seconds[0][0] == pytest.approx(other.seconds[0][0])


def test_factors_survive_being_saved() -> None:
    calibration = calibrated(scaled(CLUSTER, [(2.0, 0.5, 1.0)] * 6), HALVES)
    calibration.observe_transfer("id-a", "id-b", 1.5)
    restored = Calibration(Factors.model_validate_json(calibration.factors.model_dump_json()))
    assert restored.apply(CLUSTER) == calibration.apply(CLUSTER)


def test_slow_link_has_a_lower_rate_in_its_direction_only() -> None:
    calibration = Calibration()
    for _ in range(100):
        calibration.observe_transfer("id-a", "id-b", 2.0)
    rates = calibration.apply(CLUSTER).bytes_per_second
    assert rates[0][1] == pytest.approx(25.0, rel=0.05)
    assert (rates[1][0], rates[1][2], rates[0][0]) == (50.0, 50.0, float("inf"))


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(0.01, 1.0)), min_size=1, max_size=60))
def test_average_stays_within_what_was_observed(observed: list[tuple[float, float]]) -> None:
    average = SpeedRatio()
    for ratio, weight in observed:
        average.add(ratio, weight)
    assert min(log(r) for r, _ in observed) - 1e-9 <= average.value <= max(log(r) for r, _ in observed) + 1e-9


def test_average_ignores_an_outlier_and_follows_a_change() -> None:
    average = SpeedRatio()
    for _ in range(30):
        average.add(1.0)
    average.add(1000.0)
    assert average.value < 0.05
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        average.add(bad)
    for _ in range(int(3 * WINDOW)):
        average.add(1.5)
    assert average.value == pytest.approx(0.4055, rel=0.1)
