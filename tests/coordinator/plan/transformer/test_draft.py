"""The device of a draft model: the fastest one of the plan that has room for it, which becomes the first rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.plans import LLAMA_1B, cluster, device_profile

from coordinator.cli.render.tables import generation_lines
from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest, on_subset
from coordinator.plan.transformer.strategies import draft_bytes, rank_memory
from hearth.plan.plan import TransformerPlan, draft_plan, plan_from_json

DRAFT = LLAMA_1B.model_copy(update={"name": "small", "num_layers": 2, "hidden_size": 512, "ffn_size": 1024})
GENERATION = GenerationRequest(1024, draft=DRAFT)
GIB = 1 << 30


def request(speeds: Sequence[float], budgets: Sequence[int], strategy: str = "hmp") -> PlanRequest:
    devices = [
        device_profile(index, speed, LLAMA_1B, 128, budget)
        for index, (speed, budget) in enumerate(zip(speeds, budgets, strict=True))
    ]
    return PlanRequest(LLAMA_1B, cluster(devices, 1000), 128, strategy=strategy, generation=GENERATION)


def limits_of(plan: TransformerPlan) -> object:
    return plan.body.generation.draft if plan.body.generation is not None else None


@pytest.mark.parametrize("speeds", [(1, 4, 2), (4, 1, 2), (1, 2, 4)], ids=str)
def test_fastest_device_has_the_draft_model_and_leads(speeds: tuple[float, ...]) -> None:
    wanted = request(speeds, [16 * GIB] * 3)
    plan = plan_transformer(wanted).plan
    first = plan.devices[0]
    assert limits_of(plan) == DRAFT
    assert first.name == f"device{speeds.index(4)}"
    assert GENERATION.matches(plan.body, 128)
    assert plan_from_json(plan.model_dump_json()) == plan
    without = plan_transformer(replace(wanted, generation=replace(GENERATION, draft=None))).plan
    assert request_seconds(plan) <= 1.02 * request_seconds(without)
    assert GENERATION.matches(without.body, 128)
    assert not replace(GENERATION, draft=None).matches(plan.body, 128)
    for rank, device in enumerate(plan.devices):
        assert device.memory == rank_memory(plan.model, plan.body, rank)
        assert bool(device.memory.draft) == (rank == 0)
    assert plan.body.generation is not None
    assert first.memory.draft == draft_bytes(DRAFT, plan.body.generation) > 2 * DRAFT.vocab_size * DRAFT.hidden_size * 4
    alone = draft_plan(plan)
    assert (alone.model, alone.devices) == (DRAFT, (first,))
    assert any(line.startswith(f"draft model: small on {first.name}, ") for line in generation_lines(plan))


def test_room_is_made_on_the_fastest_device_or_the_next_has_the_draft_or_none() -> None:
    def planned(budgets: Sequence[int], has_draft: bool = True) -> TransformerPlan:
        generation = replace(GENERATION, kv_copies=False, draft=DRAFT if has_draft else None)
        return plan_transformer(replace(request((2, 1), budgets), generation=generation)).plan

    used = [device.memory.total for device in planned([16 * GIB] * 2, has_draft=False).devices]
    draft = planned([16 * GIB] * 2).devices[0].memory.draft
    other = planned([used[0] + draft // 2, 16 * GIB])
    assert [device.name for device in other.devices] == ["device1", "device0"]
    # Neither has room in addition to its share; the fastest device gets a smaller one, and the other a larger one.
    tight = planned([used[0] + draft * 3 // 4, used[1] + draft * 3 // 4])
    assert limits_of(tight) == DRAFT
    assert tight.devices[0].name == "device0"
    assert all(device.memory.total <= device.budget_bytes for device in tight.devices)
    none = planned([used[0] + draft // 3, used[1] + draft // 3])
    assert limits_of(none) is None
    assert not any(device.memory.draft for device in none.devices)


def test_after_a_loss_another_device_has_the_draft_model() -> None:
    wanted = request((1, 4, 2), [16 * GIB] * 3)
    plan = plan_transformer(wanted).plan
    lost = plan.devices[0].device_id
    left = tuple(device.device_id for device in wanted.cluster.devices if device.device_id != lost)
    after = plan_transformer(on_subset(replace(wanted, held=plan), left)).plan
    assert limits_of(after) == DRAFT
    assert lost not in {device.device_id for device in after.devices}


def test_first_stage_of_a_pipeline_has_the_draft_model() -> None:
    plan = plan_transformer(request((1, 1), [16 * GIB] * 2, "pipeline")).plan
    assert limits_of(plan) == DRAFT
    assert plan.devices[0].memory.draft
