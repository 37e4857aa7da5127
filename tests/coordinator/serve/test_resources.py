"""What deployments take of each other: memory by their plans, processor time and links as measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.devices import ready_device, with_telemetry
from support.plans import BERT_LARGE, make_plan

from coordinator.devices.other_models import left_bytes
from coordinator.devices.registry import Device
from coordinator.serve.resources import Resources
from hearth.errors import MemoryTaken
from hearth.plan.common import MemoryUse
from hearth.plan.plan import TransformerPlan
from hearth.wire.messages import AgentState, WorkerStatus


def device_with(budget_bytes: int, **held_bytes: int) -> Device:
    return with_telemetry(
        ready_device("a"), memory_budget_bytes=budget_bytes, memory_held_bytes=held_bytes, num_threads=2
    )


def plan_on_a() -> TransformerPlan:
    plan = make_plan(BERT_LARGE, "local", (1,))
    memory = MemoryUse(weights=700, embeddings=100, activations=150, workspace=50)
    device = plan.devices[0].model_copy(update={"device_id": "a", "memory": memory})
    return plan.model_copy(update={"devices": (device,)})


PLAN = plan_on_a()
BYTES = PLAN.devices[0].memory.total


def test_memory_of_other_plans_is_not_there() -> None:
    resources = Resources()
    resources.take("chat", [PLAN])
    limited = device_with(3 * BYTES)  # a limit of the user, whatever the workers hold
    assert left_bytes(limited, resources.by_others("detector")) == 2 * BYTES
    assert left_bytes(limited, resources.by_others("chat")) == 3 * BYTES
    # The budget is free memory: half of the plan is gone from it already.
    free = device_with(3 * BYTES, chat=BYTES // 2)
    assert left_bytes(free, resources.by_others("detector")) == 3 * BYTES - (BYTES - BYTES // 2)
    resources.take("chat", ())
    assert left_bytes(limited, resources.by_others("detector")) == 3 * BYTES


def test_plan_that_needs_taken_memory_names_the_holders_and_the_missing_bytes() -> None:
    resources = Resources()
    resources.take("chat", [PLAN])
    devices = {"a": device_with(2 * BYTES - 5)}
    with pytest.raises(MemoryTaken) as caught:
        resources.check("detector", PLAN, devices)
    assert caught.value.missing_bytes == 5
    assert caught.value.holders.startswith("chat holds ")
    resources.check("chat", PLAN, devices)
    resources.check("detector", PLAN, {"a": device_with(2 * BYTES)})


def test_replaced_plan_counts_as_free_only_as_far_as_others_leave_it() -> None:
    """A plan made for a whole device must not get it back once another deployment has half of it."""
    resources = Resources()
    resources.take("chat", [PLAN])
    old = PLAN.model_copy(update={"devices": (PLAN.devices[0].model_copy(update={"budget_bytes": 3 * BYTES}),)})
    devices = {"a": device_with(3 * BYTES)}
    assert resources.with_room("detector", old, devices).devices[0].budget_bytes == 2 * BYTES
    assert resources.with_room("chat", old, devices) is old


def test_plan_and_its_successor_count_by_the_larger_one() -> None:
    resources = Resources()
    memory = PLAN.devices[0].memory
    smaller = PLAN.devices[0].model_copy(update={"memory": memory.model_copy(update={"weights": 0})})
    resources.take("chat", [PLAN.model_copy(update={"devices": (smaller,)}), PLAN])
    assert left_bytes(device_with(3 * BYTES), resources.by_others("detector")) == 2 * BYTES


def test_load_of_other_workers_slows_a_device_down() -> None:
    resources = Resources()

    def busy(seconds: float) -> Device:
        worker = WorkerStatus(deployment="chat", state="ready", epoch=1, busy_seconds=seconds)
        return replace(device_with(BYTES), state=AgentState(boot_id="1", workers=(worker,)))

    resources.take("detector", [PLAN])
    for second in range(200):  # one of two threads
        resources.sample([busy(float(second))], float(second))
    by_others = resources.by_others("detector")(busy(0.0))
    assert by_others.load == pytest.approx(0.5, abs=0.01)
    assert by_others.slowdown == pytest.approx(2.0, rel=0.05)
    assert resources.by_others("chat")(busy(0.0)).load == 0.0
    assert resources.load_growth("detector", "a") == pytest.approx(2.0, rel=0.05)
    resources.sample([], 201.0)
    assert resources.by_others("detector")(busy(0.0)).load == 0.0


def test_load_of_two_workers_of_a_deployment_adds_up() -> None:
    resources = Resources()

    def busy(seconds: float) -> Device:
        workers = tuple(
            WorkerStatus(deployment=name, state="ready", epoch=epoch, busy_seconds=seconds / 2)
            for name, epoch in (("chat", 1), ("chat", 2), ("detector", 3))
        )
        return replace(device_with(BYTES), state=AgentState(boot_id="1", workers=workers))

    for second in range(200):  # half of one of two threads each
        resources.sample([busy(float(second))], float(second))
    assert resources.by_others("detector")(busy(0.0)).load == pytest.approx(0.5, abs=0.01)
    assert resources.by_others("chat")(busy(0.0)).load == pytest.approx(0.25, abs=0.01)


def sending(num_bytes: int, *workers: tuple[str, int]) -> Device:
    """The device `a`, whose workers of these deployments and epochs have each sent this to `b`."""
    told = tuple(
        WorkerStatus(deployment=name, state="ready", epoch=epoch, sent_bytes={"b": num_bytes, "c": 0})
        for name, epoch in workers
    )
    return replace(device_with(BYTES), state=AgentState(boot_id="1", workers=told))


def test_traffic_of_other_workers_counts_and_that_of_a_deployment_does_not() -> None:
    resources = Resources()
    workers = (("chat", 1), ("chat", 2), ("detector", 3), ("detector", 4))
    for second in range(200):
        resources.sample([sending(1000 * second, *workers)], float(second))

    def sent_by_others(name: str) -> float:
        return resources.by_others(name).traffic().get(("a", "b"), 0.0)

    assert sent_by_others("detector") == pytest.approx(2000, rel=1e-6)  # two workers, while the plan changes
    assert sent_by_others("chat") == pytest.approx(2000, rel=1e-6)
    assert sent_by_others("sentences") == pytest.approx(4000, rel=1e-6)
    assert resources.traffic("chat") == pytest.approx(2000, rel=1e-6)
    assert resources.by_others("detector").traffic()["a", "c"] == 0.0
    resources.sample([], 201.0)
    assert resources.by_others("detector").traffic() == {}


def test_worker_that_begins_again_sends_nothing_negative() -> None:
    """A restarted process counts from 0 in the same epoch; the first count of a new epoch is no rate, either."""
    resources = Resources()
    for second, num_bytes in enumerate([10**9, 10**9 + 1000, 0, 1000]):
        resources.sample([sending(num_bytes, ("chat", 1))], float(second))
        assert 0.0 <= resources.traffic("chat") <= 1000.0
    resources.sample([sending(10**12, ("chat", 2))], 4.0)
    assert resources.traffic("chat") == 0.0


def test_average_follows_two_thirds_of_a_change_within_half_a_minute() -> None:
    resources = Resources()
    for sample in range(6):
        resources.sample([sending(5000 * sample, ("chat", 1))], 5.0 * sample)
    assert resources.traffic("chat") == pytest.approx(1000 * (1 - 0.8**5))
