"""Plans that are tried: which ones, in what order, when a trial ends, and which plan wins."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.graph_plans import placed_plan
from support.graphs import chain

from coordinator.plan.graph.learning.elites import (
    MAX_ELITES,
    MAX_PRICE,
    MIN_DIFFERENCE,
    Elite,
    choose_elites,
    difference,
    fits_beside,
    placement_key,
)
from coordinator.plan.graph.learning.halving import FIRST_REQUESTS, MAX_REQUESTS, MIN_GAIN, SuccessiveHalving

SPEC = chain(1, [100] * 40)
placements = st.lists(st.sampled_from(["id-a", "id-b", "id-c"]), min_size=40, max_size=40)


@settings(max_examples=10)
@given(st.lists(st.tuples(placements, st.floats(0.5, 2.0)), max_size=14), placements)
def test_elites_are_few_cheap_and_different(found: list[tuple[list[str], float]], deployed: list[str]) -> None:
    incumbent = Elite(placed_plan(SPEC, deployed), 1.0)
    elites = [Elite(placed_plan(SPEC, devices), seconds) for devices, seconds in found]
    chosen = choose_elites(elites, incumbent)
    assert len(chosen) <= MAX_ELITES
    assert all(each.seconds <= MAX_PRICE * min(1.0, *(other.seconds for other in elites)) for each in chosen)
    plans = [incumbent.plan, *(each.plan for each in chosen)]
    for index, one in enumerate(plans):
        assert all(difference(one, other) >= MIN_DIFFERENCE for other in plans[:index])
    again = choose_elites(elites, incumbent, {placement_key(each.plan) for each in chosen})
    assert not {placement_key(each.plan) for each in chosen} & {placement_key(each.plan) for each in again}


def test_of_two_plans_that_hardly_differ_the_cheaper_one_is_tried() -> None:
    incumbent = Elite(placed_plan(SPEC, ["id-a"] * 40), 1.0)
    one, other = (Elite(placed_plan(SPEC, ["id-b"] * 39 + [last]), 0.9) for last in ("id-b", "id-c"))
    assert choose_elites([other._replace(seconds=0.95), one], incumbent) == [one]
    assert choose_elites([other, incumbent], incumbent) == [other]
    assert choose_elites([other._replace(seconds=1.11)], incumbent) == []


def test_difference_is_a_share_of_operators_and_the_key_names_devices() -> None:
    one, other = placed_plan(SPEC, ["id-a"] * 40), placed_plan(SPEC, ["id-a"] * 38 + ["id-b"] * 2)
    assert difference(one, other) == pytest.approx(0.05)
    assert placement_key(one) == placement_key(one.with_epoch(7))
    assert placement_key(one) != placement_key(placed_plan(SPEC, ["id-b"] * 40))  # the same cut, on another device


def test_plan_is_tried_only_where_both_workers_fit() -> None:
    running, plan = (placed_plan(SPEC, [each] * 40, memory_bytes=60) for each in ("id-a", "id-a"))
    assert not fits_beside(plan, running, {"id-a": 119})
    assert fits_beside(plan, running, {"id-a": 120})
    assert fits_beside(placed_plan(SPEC, ["id-b"] * 40, memory_bytes=60), running, {"id-a": 60, "id-b": 60})
    assert not fits_beside(plan, running, {})


# ---- successive halving -------------------------------------------------------------------------------------------------


def run(halving: SuccessiveHalving, seconds: Callable[[int], float], incumbent: Callable[[], float]) -> int | None:
    while (plan := halving.next()) is not None:
        halving.observe(plan, seconds(plan), incumbent())
    return halving.winner()


@given(st.lists(st.floats(0.5, 2.0), max_size=MAX_ELITES), st.integers(0, 1000))
def test_best_plan_wins_if_it_gains_enough(true: list[float], seed: int) -> None:
    rng = Random(seed)
    halving = SuccessiveHalving(len(true))
    winner = run(halving, lambda plan: true[plan] * rng.uniform(0.999, 1.001), lambda: rng.uniform(0.999, 1.001))
    best = min(true, default=1.0)
    if best > 1 - MIN_GAIN + 0.002:
        assert winner is None
    elif best < 1 - MIN_GAIN - 0.002:
        assert winner is not None
        assert true[winner] <= best * 1.002
    for plan, arm in enumerate(halving.arms):
        assert arm.num_requests <= (3 if true[plan] > 1.26 else MAX_REQUESTS)
        assert arm.num_requests >= (FIRST_REQUESTS if true[plan] < 1.24 else 3)
    assert halving.num_requests <= 2 * FIRST_REQUESTS * len(true) + MAX_REQUESTS


@pytest.mark.parametrize(("num_plans", "noise"), [(1, 0.3), (4, 0.05)])
def test_equal_plans_hardly_ever_replace_the_deployed_one(num_plans: int, noise: float) -> None:
    """A gain by luck is not certain: without that rule, 20 of 60 change at a noise of 30 %."""
    changes = 0
    for seed in range(60):
        rng = Random(seed)

        def noisy(rng: Random = rng) -> float:
            return rng.lognormvariate(0.0, noise)

        changes += run(SuccessiveHalving(num_plans), lambda _, noisy=noisy: noisy(), noisy) is not None
    assert changes <= 4


def test_slow_plan_leaves_after_three_requests_and_a_failed_one_never_wins() -> None:
    halving = SuccessiveHalving(2)
    for _ in range(3):
        assert halving.next() == 0
        halving.observe(0, 1.3, 1.0)
    assert halving.next() == 1
    for _ in range(FIRST_REQUESTS + 5):
        halving.observe(1, 0.5, 1.0)
    assert halving.winner() == 1
    halving.fail(1)
    assert halving.next() is None
    assert halving.winner() is None
    assert halving.num_requests == 3 + FIRST_REQUESTS + 5


def test_one_late_answer_does_not_end_a_trial() -> None:
    halving = SuccessiveHalving(1)
    for seconds in (5.0, 1.0, 1.0, 5.0, 1.0):
        assert halving.next() == 0
        halving.observe(0, seconds, 1.0)
    assert halving.next() == 0
