"""Plans need no more room on the disks of their devices than there is, and say what they leave out for it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.graphs import chain, cluster_of
from support.plans import BERT_LARGE, LLAMA_1B, cluster, device_profile

from coordinator.plan.graph.auto import plan_graph
from coordinator.plan.graph.request import GraphRequest, stored_weights
from coordinator.plan.stores import Stored, lacking, room_after
from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest, on_subset, stored_chunks
from hearth.errors import StoresTooSmall
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import Plan

MB = 10**6
BERT = BERT_LARGE.model_copy(update={"num_layers": 6})
LLAMA = LLAMA_1B.model_copy(update={"num_layers": 6})


def transformer_request(
    spec: ModelSpec, strategy: str, rooms: Sequence[int | None], speeds: Sequence[float] = (1.0, 1.0, 1.0)
) -> PlanRequest:
    devices = [
        device_profile(index, speed, spec, 128).model_copy(update={"store_room_bytes": room})
        for index, (speed, room) in enumerate(zip(speeds, rooms, strict=True))
    ]
    generation = GenerationRequest(256) if spec.causal else None
    return PlanRequest(spec, cluster(devices, 1000.0), 128, strategy=strategy, generation=generation)


def graph_request(objective: str, rooms: Sequence[int | None]) -> GraphRequest:
    """Twelve operators, each with 10 MB of weights, for devices of one speed."""
    spec = chain(10, [100] * 12, [10 * MB] * 12)
    devices = cluster_of(spec, [1.0] * len(rooms), 1e6, 1 << 30)
    with_rooms = tuple(replace(each, store_room_bytes=room) for each, room in zip(devices.devices, rooms, strict=True))
    return GraphRequest(spec, replace(devices, devices=with_rooms), objective, time_limit_seconds=1.0)  # type: ignore[arg-type]


def lacking_bytes(needed: Stored, held: Stored) -> dict[str, int]:
    return {device: sum(chunks.values()) for device, chunks in lacking(needed, held).items()}


def check(plan: Plan, lacks: dict[str, int], rooms: Sequence[int | None], ids: Sequence[str]) -> None:
    for device, room in zip(ids, rooms, strict=True):
        assert room is None or lacks.get(device, 0) <= room
    assert all(device.budget_bytes >= device.memory.total for device in plan.devices)


@pytest.mark.parametrize("seed", range(12))
def test_no_device_of_a_transformer_gets_more_than_its_store_has_room_for(seed: int) -> None:
    chance = random.Random(seed)
    spec, strategy = chance.choice((BERT, LLAMA)), chance.choice(("auto", "hmp", "pipeline"))
    free = transformer_request(spec, strategy, (None,) * 3, [chance.uniform(0.5, 2.0) for _ in range(3)])
    total = sum(next(iter(stored_chunks(plan_transformer(on_subset(free, ("id0",))).plan).values())).values())
    rooms = [chance.choice((None, 0, *(int(chance.uniform(0.1, 1.0) * total) for _ in range(4)))) for _ in range(3)]
    devices = (
        device.model_copy(update={"store_room_bytes": room})
        for device, room in zip(free.cluster.devices, rooms, strict=True)
    )
    request = replace(free, cluster=free.cluster.model_copy(update={"devices": tuple(devices)}))
    try:
        planned = plan_transformer(request)
    except StoresTooSmall as error:
        assert sum(total if room is None else room for room in rooms) < 1.5 * total, error
        return
    check(planned.plan, lacking_bytes(stored_chunks(planned.plan), {}), rooms, ("id0", "id1", "id2"))


def test_device_with_a_small_disk_gets_less_and_a_note_says_so() -> None:
    planned = plan_transformer(transformer_request(BERT, "hmp", (None, 60 * MB, None)))
    lacks = lacking_bytes(stored_chunks(planned.plan), {})
    assert 40 * MB < lacks["id1"] <= 60 * MB < lacks["id0"]
    assert planned.notes == (
        "the store of device1 has room for 57.2 MiB of the 135 MiB of weights that it would get: it gets less",
    )
    assert {device.budget_bytes for device in planned.plan.devices} == {8 << 30}


def test_device_without_room_is_left_out() -> None:
    planned = plan_transformer(transformer_request(BERT, "auto", (None, 0, None)))
    assert {device.name for device in planned.plan.devices} <= {"device0", "device2"}
    (note,) = planned.notes
    assert note.startswith("the store of device1 has room for 0 B of the ")
    assert note.endswith(": it gets none")


def test_model_that_fits_on_no_disks_is_refused_with_the_room_of_each() -> None:
    with pytest.raises(StoresTooSmall) as error:
        plan_transformer(transformer_request(BERT, "hmp", (10 * MB,) * 3))
    assert "the store of device1 has room for 9.54 MiB of the " in str(error.value)


def test_weights_that_a_device_holds_need_no_room() -> None:
    free = transformer_request(BERT, "hmp", (None,) * 3)
    held = plan_transformer(free).plan
    full = transformer_request(BERT, "hmp", (0, 0, 0))
    planned = plan_transformer(replace(full, held=held))
    assert planned.plan.body == held.body
    assert planned.notes == ()


def test_room_for_a_later_plan_is_what_the_deployed_one_leaves() -> None:
    free = transformer_request(BERT, "hmp", (None,) * 3)
    held = plan_transformer(free).plan
    assert room_after(free.cluster.devices, stored_chunks(held)) == {"id0": None, "id1": None, "id2": None}
    limited = transformer_request(BERT, "hmp", (200 * MB, 100 * MB, None))
    num_bytes = sum(stored_chunks(held)["id0"].values())
    assert room_after(limited.cluster.devices, stored_chunks(held)) == {
        "id0": 200 * MB - num_bytes,
        "id1": 0,
        "id2": None,
    }


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("rooms", [(None, 25 * MB, None), (45 * MB, 0, 90 * MB), (70 * MB, 61 * MB), (None, 0)])
def test_no_device_of_a_graph_gets_more_than_its_store_has_room_for(
    objective: str, rooms: Sequence[int | None]
) -> None:
    request = graph_request(objective, rooms)
    planned = plan_graph(request, time.monotonic)
    stored = stored_weights(request.spec, planned.plan)
    check(planned.plan, lacking_bytes(stored, {}), rooms, [each.device_id for each in request.cluster.devices])


def test_weights_of_a_graph_that_devices_hold_need_no_room() -> None:
    held = plan_graph(graph_request("throughput", (None, None)), time.monotonic).plan
    assert held.num_ranks == 2
    planned = plan_graph(replace(graph_request("throughput", (0, 0)), held=held), time.monotonic)
    assert planned.plan.body == held.body
    with pytest.raises(StoresTooSmall, match="the store of a has room for 0 B of the"):
        plan_graph(graph_request("throughput", (0, 0)), time.monotonic)
