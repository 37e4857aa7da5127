"""The order of ranks in which devices load the fewest weights."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.chunks import refs_of
from support.plans import BERT_LARGE, LLAMA_1B, cluster, device_profile, with_rates

from coordinator.models.checkpoint.chunk_layout import chunks_for_rank, num_chunk_weights
from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.refine import loaded_weights
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest, on_subset
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan, plan_from_json

BERT_SMALL = BERT_LARGE.model_copy(update={"name": "bert-small", "num_layers": 6})
LLAMA = LLAMA_1B.model_copy(update={"num_layers": 6})
REQUESTS: dict[str, tuple[ModelSpec, GenerationRequest | None]] = {
    "encoder": (BERT_SMALL, None),
    "decoder": (LLAMA, GenerationRequest(1024)),
}


def request_for(kind: str, strategy: str, num_devices: int, seed: int) -> PlanRequest:
    """Devices of different speeds with links of different rates."""
    chance, (spec, generation) = random.Random(seed), REQUESTS[kind]
    devices = [device_profile(index, chance.uniform(0.5, 2.0), spec, 128) for index in range(num_devices)]
    links = with_rates(cluster(devices, 300.0), lambda link: link.bytes_per_second * chance.choice((0.2, 1.0)))
    return PlanRequest(spec, links, 128, strategy=strategy, generation=generation)


def chunks_of_devices(plan: TransformerPlan) -> dict[str, set[tuple[str, int, int]]]:
    refs = refs_of(plan.model)
    return {
        device.device_id: {(ref.kind, ref.layer, ref.grain) for ref in chunks_for_rank(refs, plan, rank)}
        for rank, device in enumerate(plan.devices)
    }


def shares_by_device(plan: TransformerPlan) -> dict[str, int]:
    return {device.device_id: plan.body.heads[rank] for rank, device in enumerate(plan.devices)}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("strategy", ["hmp", "pipeline", "sp"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_after_a_loss_devices_load_no_more_than_without_the_new_order_and_the_plan_is_about_as_fast(
    kind: str, strategy: str, seed: int
) -> None:
    if (kind, strategy) == ("decoder", "sp"):
        pytest.skip("sp prefills a whole context in one step")
    request = request_for(kind, strategy, 3, seed)
    held = plan_transformer(request).plan
    for lost in range(3):
        left = on_subset(
            request, tuple(each.device_id for each in request.cluster.devices if each.name[-1] != str(lost))
        )
        as_planned, ordered = plan_transformer(left).plan, plan_transformer(replace(left, held=held)).plan
        assert loaded_weights(ordered, held) <= loaded_weights(as_planned, held)
        assert request_seconds(ordered) <= 1.02 * request_seconds(as_planned)
        assert shares_by_device(ordered) == shares_by_device(as_planned)
        assert plan_from_json(ordered.model_dump_json()) == ordered


@pytest.mark.parametrize("strategy", ["hmp", "pipeline"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_loaded_weights_are_those_of_the_chunks_that_a_device_did_not_have(kind: str, strategy: str) -> None:
    request = request_for(kind, strategy, 4, seed=0)
    held = plan_transformer(request).plan
    plan = plan_transformer(replace(on_subset(request, ("id0", "id2", "id3")), held=held)).plan
    before, after = chunks_of_devices(held), chunks_of_devices(plan)
    new = [chunk for device, chunks in after.items() for chunk in chunks - before[device]]
    expected = sum(num_chunk_weights(plan.model, kind, grain) for kind, _, grain in new)  # type: ignore[arg-type]
    # The last grain of the vocabulary is shorter:
    assert loaded_weights(plan, held) == pytest.approx(expected, rel=0.01)


def test_order_of_a_ring_is_kept_where_only_a_slower_one_would_load_less() -> None:
    """A ring of a, b, c and d over fast links; with any other order, hops are slow."""
    devices = [device_profile(index, 1.0, BERT_SMALL, 128) for index in range(4)]
    links = cluster(devices, 1000.0)
    ring = [{"id0", "id2"}, {"id2", "id1"}, {"id1", "id3"}, {"id3", "id0"}]
    slow = with_rates(links, lambda link: link.bytes_per_second / (1 if {link.source, link.target} in ring else 50))
    request = PlanRequest(BERT_SMALL, slow, 128, strategy="hmp")
    in_ring = plan_transformer(request).plan
    by_name = plan_transformer(replace(request, cluster=links)).plan
    assert [each.name for each in by_name.devices] != [each.name for each in in_ring.devices]
    again = plan_transformer(replace(request, held=by_name)).plan
    assert request_seconds(again) <= 1.02 * request_seconds(in_ring)


def test_device_that_joins_takes_the_place_at_which_the_others_keep_their_weights() -> None:
    request = request_for("encoder", "hmp", 3, seed=0)
    held = plan_transformer(on_subset(request, ("id0", "id2"))).plan
    plan = plan_transformer(replace(request, held=held)).plan
    before, after = chunks_of_devices(held), chunks_of_devices(plan)
    for device in ("id0", "id2"):
        assert len(after[device] - before[device]) <= 0.35 * len(after[device])


def test_first_plan_has_no_order_to_keep() -> None:
    request = request_for("encoder", "hmp", 3, seed=1)
    assert plan_transformer(request) == plan_transformer(replace(request, held=None))
