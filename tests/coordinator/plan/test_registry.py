"""Every planner and strategy of both kinds can be named, and does what its name says."""

from __future__ import annotations

from typing import get_args

import pytest
from support.plans import BERT_LARGE, cluster, device_profile

from coordinator.plan.registry import REGISTRY, Kind
from coordinator.plan.transformer.make import plan_transformer
from coordinator.plan.transformer.planners.galaxy import GalaxyPlanner
from coordinator.plan.transformer.request import PlanRequest
from hearth.errors import BadSetting
from hearth.plan.transformer import Strategy

SMALL = BERT_LARGE.model_copy(update={"num_layers": 2, "name": "small"})
HOME = cluster([device_profile(index, speed) for index, speed in enumerate((1.0, 2.0, 1.5))], 1000)


def test_a_name_is_listed_once_for_an_objective_with_a_summary() -> None:
    assert set(REGISTRY) == set(get_args(Kind))
    for methods in REGISTRY.values():
        keys = [(each.name, each.objective) for each in methods]
        assert len(set(keys)) == len(keys)
        assert all(each.summary for each in methods)
    assert set(get_args(Strategy)) < set(REGISTRY["transformer"].names())


@pytest.mark.parametrize("name", REGISTRY["transformer"].names())
def test_every_name_plans_a_transformer(name: str) -> None:
    planned = plan_transformer(PlanRequest(SMALL, HOME, 284, strategy=name))
    assert planned.chosen.strategy == name
    assert planned.plan.num_ranks == (1 if name == "local" else 2 if name == "pipeline" else 3)
    assert planned.others


def test_galaxy_and_exact_are_hmp_with_their_own_shares() -> None:
    galaxy, exact, hmp = (
        plan_transformer(PlanRequest(SMALL, HOME, 284, strategy=name)).plan for name in ("galaxy", "exact", "hmp")
    )
    assert {galaxy.body.strategy, exact.body.strategy} == {"hmp"}
    assert galaxy.planner == "galaxy"
    assert galaxy.body == GalaxyPlanner("hmp").plan(PlanRequest(SMALL, HOME, 284)).body
    assert exact.planner == "exact (proven best)"
    assert hmp.body in (galaxy.body, exact.body)


def test_a_wrong_name_or_objective_is_told_with_the_right_ones() -> None:
    with pytest.raises(
        BadSetting, match="'magic' is none of auto, local, hmp, sp, megatron-tp, pipeline, galaxy, exact"
    ):
        plan_transformer(PlanRequest(SMALL, HOME, 284, strategy="magic"))
    with pytest.raises(BadSetting, match="'throughput' is none of latency"):
        REGISTRY["transformer"].check("auto", "throughput")
