"""Plans as JSON, and latency curves."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import BERT_LARGE, make_plan

from hearth.errors import BadPlan
from hearth.plan.plan import plan_from_json
from hearth.plan.profile import LatencyCurve


def test_plans_round_trip_through_json() -> None:
    plan = make_plan(BERT_LARGE, "hmp", (3, 1, 2))
    assert plan_from_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"heads": [8, 8, 1]}, "sum to 16"),
        ({"heads": [16]}, "1 shares for 3 devices"),
        ({"columns": [4095, 1, 0]}, "grains of 64"),
        ({"row_weights": [0, 0, 0]}, "not all zero"),
        ({"strategy": "local"}, "exactly one device"),
        ({"strategy": "magic"}, "strategy"),
    ],
)
def test_invalid_plan_error_names_the_field(change: dict, match: str) -> None:
    data = json.loads(make_plan(BERT_LARGE, "hmp", (1, 1, 0)).model_dump_json())
    data["body"].update(change)
    with pytest.raises(BadPlan, match=match):
        plan_from_json(json.dumps(data))
    with pytest.raises(BadPlan):
        plan_from_json("{")


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=6), st.floats(0, 3000))
def test_latency_curve_interpolates_and_is_never_negative(seconds: list[float], size: float) -> None:
    sizes = tuple(range(64, 64 * (len(seconds) + 1), 64))
    curve = LatencyCurve(sizes=sizes, seconds=tuple(seconds))
    assert [curve(s) for s in sizes] == pytest.approx(seconds)
    assert curve(size) >= 0
    assert curve(0) == 0
