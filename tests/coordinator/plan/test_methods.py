"""The registry of planning methods: every name of both kinds plans as its name says."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest
from support.plans import BERT_LARGE, LLAMA_1B, cluster, device_profile

from coordinator.plan.methods import REGISTRY, Kind
from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.planners.galaxy import plan_galaxy
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest
from coordinator.serve.planners.process import solve_transformer
from hearth.errors import BadSetting, ModelDoesNotFit
from hearth.plan.common import WireFormat
from hearth.plan.transformer import Strategy

SMALL = BERT_LARGE.model_copy(update={"num_layers": 2, "name": "small"})
LLAMA_SMALL = LLAMA_1B.model_copy(update={"num_layers": 2})
HOME = cluster([device_profile(index, speed) for index, speed in enumerate((1.0, 2.0, 1.5))], 1000)


def test_names_are_unique_per_objective_and_have_summaries() -> None:
    assert set(REGISTRY) == set(get_args(Kind))
    for methods in REGISTRY.values():
        keys = [(each.name, each.objective) for each in methods]
        assert len(set(keys)) == len(keys)
        assert all(each.summary for each in methods)
    assert set(get_args(Strategy)) < set(REGISTRY["transformer"].names())


@pytest.mark.parametrize("name", REGISTRY["transformer"].names())
def test_every_transformer_method_gives_a_plan(name: str) -> None:
    planned = plan_transformer(PlanRequest(SMALL, HOME, 284, strategy=name))
    assert planned.chosen.strategy == name
    assert planned.plan.num_ranks == (1 if name == "local" else 2 if name == "pipeline" else 3)
    assert planned.others


def test_galaxy_and_exact_are_hmp_with_different_shares() -> None:
    galaxy, exact, hmp = (
        plan_transformer(PlanRequest(SMALL, HOME, 284, strategy=name)).plan for name in ("galaxy", "exact", "hmp")
    )
    assert {galaxy.body.strategy, exact.body.strategy} == {"hmp"}
    assert galaxy.planner == "galaxy"
    shares = plan_galaxy(PlanRequest(SMALL, HOME, 284), "hmp").body
    assert galaxy.body == shares.model_copy(update={"embedding": "replicated"})  # memory suffices
    assert exact.planner == "exact (best for compute)"
    assert hmp.body in (galaxy.body, exact.body)


def test_wrong_method_or_objective_error_lists_valid_ones() -> None:
    with pytest.raises(
        BadSetting, match="'magic' is none of auto, local, hmp, sp, megatron-tp, pipeline, galaxy, exact"
    ):
        plan_transformer(PlanRequest(SMALL, HOME, 284, strategy="magic"))
    with pytest.raises(BadSetting, match="'throughput' is none of latency"):
        REGISTRY["transformer"].check("auto", "throughput")


def test_planner_process_equals_in_process_planning() -> None:
    for wire, generation in ((WireFormat(), None), (WireFormat(values="int8"), GenerationRequest(512))):
        spec = LLAMA_SMALL if generation else SMALL
        home = cluster([device_profile(index, speed, spec) for index, speed in enumerate((1.0, 2.0))], 100)
        request = PlanRequest(spec, home, 284, wire, spare_accuracy=True, generation=generation)
        assert asyncio.run(solve_transformer(request)) == plan_transformer(request)
    tight = PlanRequest(SMALL, cluster([device_profile(0, 1.0, budget_bytes=1 << 20)], 100), 284)
    with pytest.raises(ModelDoesNotFit) as there:
        asyncio.run(solve_transformer(tight))
    with pytest.raises(ModelDoesNotFit) as here:
        plan_transformer(tight)
    assert there.value.missing_bytes == here.value.missing_bytes
