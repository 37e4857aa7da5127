"""Rows that follow the steps of the kernels' times."""

from __future__ import annotations

from dataclasses import replace as with_changes
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import BERT_LARGE, cluster, device_profile, with_blocks

from coordinator.plan.transformer.replicate import balance_rows
from coordinator.plan.transformer.request import PlanRequest, build_plan
from coordinator.plan.transformer.shares import balanced_rows, plan_rows, row_capacity
from hearth.plan.geometry import ROW_GRAIN, rows_per_rank
from hearth.plan.profile import DeviceProfile, LatencyCurve

SPEC = BERT_LARGE.model_copy(update={"num_layers": 2})


def device_with_groups(index: int, speed: float, rows: int, group: int) -> DeviceProfile:
    """A device whose kernels compute `group` rows in the time of one."""
    device = device_profile(index, speed, spec=SPEC, seq_len=rows)
    sizes = tuple(sorted({*range(ROW_GRAIN, rows, ROW_GRAIN), rows}))
    seconds = tuple(0.14 / speed * -(-size // group) * group / rows for size in sizes)
    curve = LatencyCurve(sizes=sizes, seconds=seconds)
    return with_blocks(device, mlp_rows=curve)


def request(speeds: list[float], rows: int, group: int) -> PlanRequest:
    devices = [device_with_groups(index, speed, rows, group) for index, speed in enumerate(speeds)]
    return PlanRequest(SPEC, cluster(devices, 1000), rows)


def longest(problem: PlanRequest, counts: tuple[int, ...]) -> float:
    return max(
        device.blocks.tile_factor(count) * count / row_capacity(problem, device.blocks)
        for device, count in zip(problem.cluster.devices, counts, strict=True)
    )


@given(
    st.lists(st.floats(0.2, 4.0), min_size=2, max_size=3),
    st.sampled_from([48, 96, 144, 192]),
    st.sampled_from([4, 12, 32, 48]),
)
def test_no_other_split_into_grains_is_faster(speeds: list[float], rows: int, group: int) -> None:
    problem = request(speeds, rows, group)
    counts = rows_per_rank(balanced_rows(problem), rows)
    assert sum(counts) == rows
    grains = range(0, rows + 1, ROW_GRAIN)
    others = (split for split in product(grains, repeat=len(speeds)) if sum(split) == rows)
    assert longest(problem, counts) <= min(longest(problem, split) for split in others) * (1 + 1e-9)


def test_no_device_gets_a_few_rows_more_than_a_group() -> None:
    """By speed alone these would be 187 and 101, and the second device would compute three groups of 48 instead of two."""
    problem = request([1.0, 0.54], 288, 48)
    assert rows_per_rank(balanced_rows(problem), 288) == (192, 96)
    by_speed = with_changes(
        problem, cluster=cluster([device_profile(i, s, SPEC, 288) for i, s in enumerate((1.0, 0.54))], 1000)
    )
    assert rows_per_rank(balanced_rows(by_speed), 288) == (188, 100)
    assert rows_per_rank(plan_rows(problem, "sp").body.row_weights, 288) == (192, 96)


def test_rows_are_balanced_only_where_that_saves_time() -> None:
    problem = request([1.0, 0.54], 288, 48)
    balanced = plan_rows(problem, "sp")
    plan = build_plan(problem, balanced.body.model_copy(update={"row_weights": (1.0, 1.0)}), "equal")
    better = balance_rows(problem, plan)
    assert rows_per_rank(better.body.row_weights, 288) == (192, 96)
    assert balance_rows(problem, better) is better


def test_curve_with_steps_keeps_its_measured_points_and_grows_as_the_similar_block_does() -> None:
    curve = LatencyCurve(sizes=(72, 144, 288), seconds=(0.9, 1.8, 3.6), error=0.02)
    similar = {size: 0.01 * -(-size // 48) for size in (48, 72, 96, 104, 144, 192, 200, 288)}
    steps = curve.with_steps(similar)
    assert (steps.sizes, steps.error) == (tuple(similar), 0.02)
    assert [steps(size) for size in curve.sizes] == pytest.approx(list(curve.seconds))
    assert steps(104) / steps(96) > 1.4
    assert steps(200) / steps(192) > 1.2
    assert LatencyCurve(sizes=(8,), seconds=(0.0,)).with_steps({4: 0.0, 8: 0.0})(8) == 0.0
