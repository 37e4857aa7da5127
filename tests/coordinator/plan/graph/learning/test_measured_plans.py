"""Measured times of plans: relative to the first deployed one, few, and read as placements of groups of operators."""

from __future__ import annotations

import pytest
from support.graph_plans import placed_plan
from support.graphs import chain

from coordinator.plan.graph.learning.elites import placement_key
from coordinator.plan.graph.learning.measured_plans import (
    MAX_PLANS,
    MeasuredPlacement,
    MeasuredPlan,
    add_trials,
    measured_placements,
)
from hearth.plan.plan import GraphPlan

SPEC = chain(1, [100] * 4)
GROUPS = [(0,), (1, 2), (3,)]


def plan(devices: str) -> GraphPlan:
    return placed_plan(SPEC, [f"id-{each}" for each in devices])


def seconds(known: tuple[MeasuredPlan, ...]) -> dict[str, float]:
    names = {placement_key(plan(each)): each for each in ("aaaa", "abbb", "bbbb", "aabb", "cccc")}
    return {names[each.key]: each.relative_seconds for each in known}


def test_times_are_relative_to_the_first_deployed_plan() -> None:
    known = add_trials((), plan("aaaa"), [(plan("abbb"), 0.2), (plan("bbbb"), -0.5)])
    assert seconds(known) == pytest.approx({"aaaa": 1.0, "abbb": 0.8, "bbbb": 1.5})
    known = add_trials(known, plan("abbb"), [(plan("cccc"), 0.5), (plan("bbbb"), -0.25)])
    assert seconds(known) == pytest.approx({"aaaa": 1.0, "abbb": 0.8, "cccc": 0.4, "bbbb": 1.0})


def test_plan_that_nothing_relates_to_the_others_replaces_them() -> None:
    known = add_trials((), plan("aaaa"), [(plan("abbb"), 0.2)])
    assert seconds(add_trials(known, plan("cccc"), [(plan("abbb"), 0.1)])) == pytest.approx({"cccc": 1.0, "abbb": 0.9})


def test_deployed_plan_is_never_dropped() -> None:
    known = add_trials((), plan("aaaa"), [])
    for first in range(2 * MAX_PLANS):
        other = placed_plan(SPEC, [f"id-{first}"] * 4)
        known = add_trials(known, plan("aaaa"), [(other, 0.1)])
    assert len(known) == MAX_PLANS
    assert known[-2].key == placement_key(plan("aaaa"))


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ("abbc", (2, 1, 0)),
        ("aaaa", (2, 2, 2)),
        ("abcc", None),  # divides a group
        ("abbd", None),  # a device is gone
    ],
)
def test_placements_are_of_groups_on_the_devices_that_are_there(devices: str, found: tuple[int, ...] | None) -> None:
    known = add_trials((), plan(devices), [])
    expected = [MeasuredPlacement(found, 1.0)] if found else []
    assert measured_placements(known, ["id-c", "id-b", "id-a"], GROUPS) == expected
