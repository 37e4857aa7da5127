"""Micro-batches of a prefill under the simulator: when they help, and their constraints."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans import LLAMA_1B, cluster, device_profile

from coordinator.plan.simulator import compute_resources
from coordinator.plan.transformer.choose import plan_auto, plan_strategy
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.cost.predict import predict, request_seconds
from coordinator.plan.transformer.refine import split_into_micro_batches
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest
from coordinator.plan.transformer.strategies.hybrid import HMP
from hearth.plan.phases import Work
from hearth.plan.plan import TransformerPlan

SPEC = LLAMA_1B.model_copy(update={"num_layers": 4})


def request(mbit: float, num_devices: int = 2) -> PlanRequest:
    devices = [device_profile(index, 1.0, SPEC, 256) for index in range(num_devices)]
    return PlanRequest(SPEC, cluster(devices, mbit), 256, generation=GenerationRequest(320, 1, 256, 64))


def test_micro_batches_overlap_communication_and_compute() -> None:
    asked = request(250)
    whole = plan_strategy(asked, "megatron-tp")
    cut = split_into_micro_batches(asked, whole)
    assert cut.body.micro_batches == 2
    assert cut.predicted.latency_seconds < 0.95 * whole.predicted.latency_seconds
    # No plan is faster than its busiest link or its busiest device.
    assert (
        cut.predicted.latency_seconds >= max(whole.predicted.compute_seconds, whole.predicted.transfer_seconds) * 0.999
    )


def test_micro_batches_keep_total_work() -> None:
    asked = request(250)
    body = plan_strategy(asked, "hmp").body
    bytes_of, layers_of = [], []
    for count in (1, 2):
        cut = body.model_copy(update={"micro_batches": count})
        tasks, by_layer = HMP.step_tasks(PlanLayout(SPEC, cut, asked.cluster, asked.wire))
        bytes_of.append(sum(task.num_bytes for task in tasks))
        layers_of.append(len(by_layer))
    assert bytes_of[0] == pytest.approx(bytes_of[1])
    assert layers_of == [SPEC.num_layers] * 2


def test_later_micro_batch_attends_to_earlier_ones() -> None:
    asked = request(250)
    body = plan_strategy(asked, "hmp").body.model_copy(update={"micro_batches": 2})
    tasks, by_layer = HMP.step_tasks(PlanLayout(SPEC, body, asked.cluster, asked.wire))
    assert len(by_layer) == SPEC.num_layers
    for layer, indices in enumerate(by_layer):
        for rank in range(2):
            of_rank = {
                kind: [i for i in indices if tasks[i].kind is kind and tasks[i].resources == compute_resources(rank)]
                for kind in (Work.QKV, Work.OUT)
            }
            assert {tasks[i].layer for each in of_rank.values() for i in each} == {layer}
            assert [len(each) for each in of_rank.values()] == [4, 4]  # two tiles for each micro-batch
            projected, attended = of_rank[Work.QKV][:2], of_rank[Work.OUT][2:]
            assert all(set(projected) <= set(tasks[i].after) for i in attended)


def test_single_micro_batch_if_nothing_overlaps() -> None:
    alone = request(250, num_devices=1)
    local = plan_strategy(alone, "local")
    assert split_into_micro_batches(alone, local) is local
    encoder = replace(request(250), generation=None)
    plan = plan_strategy(encoder, "hmp")
    assert split_into_micro_batches(encoder, plan) is plan


def test_micro_batches_never_make_auto_slower() -> None:
    for mbit in (60, 500):
        asked = request(mbit)
        plan = plan_auto(asked).plan
        one = plan.body.model_copy(update={"micro_batches": 1})
        subset = asked.cluster.subset(tuple(device.device_id for device in plan.devices))
        in_one_piece = predict(PlanLayout(SPEC, one, subset, asked.wire))[0].latency_seconds
        assert plan.predicted.latency_seconds <= in_one_piece * 1.001
        assert request_seconds(plan) > 0


def test_plan_names_its_micro_batches() -> None:
    plan = split_into_micro_batches(request(250), plan_strategy(request(250), "megatron-tp"))
    assert plan.body.title == "megatron-tp, 2 micro-batches"
    with pytest.raises(ValueError, match="micro_batches are for hmp"):
        TransformerPlan.model_validate({**plan.model_dump(), "body": {**plan.body.model_dump(), "strategy": "sp"}})
