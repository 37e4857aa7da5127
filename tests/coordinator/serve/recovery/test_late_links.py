"""Workers that wait for a peer: the coordinator asks that device and checks the link, and acts only on what it finds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.devices import ready_device
from support.plans import BERT_LARGE, make_plan
from support.waiting import let_tasks_run, until

from coordinator.devices.registry import Device
from coordinator.serve.recovery import late_links as module
from coordinator.serve.recovery.late_links import LateLinks
from hearth.errors import HearthError, LinkLost
from hearth.wire.messages import WorkerStatus


class Home:
    """Three devices of a plan. `lost` do not answer, `cut` pairs cannot connect; `stalled`: no device answers at once."""

    def __init__(self) -> None:
        plan = make_plan(BERT_LARGE, "hmp", (1, 1, 1))
        self.deployment: Any = SimpleNamespace(plan=plan, name="default", failure=None)
        self.devices = {each.device_id: ready_device(each.device_id) for each in plan.devices}
        self.lost: set[str] = set()
        self.cut: set[tuple[str, str]] = set()
        self.stalled = False
        self.asked: list[tuple[str, int]] = []
        self.found: list[HearthError] = []
        self.witnesses = LateLinks(cast(Any, self), cast(Any, self), lambda deployment, error: self.found.append(error))

    async def is_lost(self, device_id: str, num_witnesses: Callable[[], int]) -> bool:
        self.asked.append((device_id, num_witnesses()))
        return device_id in self.lost

    async def answer_at_once(self, device_ids: Iterable[str]) -> bool:
        return not self.stalled

    async def can_connect(self, source: Device, target: Device) -> bool:
        if (source.device_id, target.device_id) in self.cut:
            await asyncio.sleep(60)
        return True

    def link_is_cut(self, source: str, target: str) -> None:
        self.reported = (source, target)

    def waits(self, device_id: str, late_rank: int | None, epoch: int = 1) -> None:
        device = self.devices[device_id]
        assert device.state is not None
        worker = WorkerStatus(state="ready", epoch=epoch, late_rank=late_rank)
        self.devices[device_id] = replace(device, state=device.state.model_copy(update={"workers": (worker,)}))
        self.witnesses.device_changed(self.devices[device_id], self.deployment)


@pytest.fixture
@asynccontextmanager
async def home() -> AsyncIterator[Home]:
    home = Home()
    yield home
    await home.witnesses.close()


async def test_device_that_others_wait_for_is_asked_at_once_with_the_number_of_witnesses(home: Home) -> None:
    home.lost = {"id1"}
    home.waits("id0", 1)
    home.waits("id2", 1)
    await let_tasks_run()
    assert home.asked == [("id1", 2), ("id1", 2)]
    assert home.found == []  # the fleet reports the loss


async def test_devices_that_wait_for_one_that_waits_are_witnesses_too_and_a_ring_of_them_ends(home: Home) -> None:
    home.waits("id1", 0)
    home.waits("id2", 1)
    await let_tasks_run()
    assert home.asked == [("id0", 2), ("id1", 1)]
    home.waits("id0", 2)
    await let_tasks_run()
    assert home.asked[-1] == ("id2", 2)


async def test_link_that_cannot_be_used_is_reported_with_both_devices(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "connect_seconds", lambda *_: 0.05)

    home.cut = {("id2", "id1"), ("id1", "id2")}
    home.waits("id0", 2)  # it waits because the other one does
    home.waits("id2", 1)
    await until("the finding", lambda: home.found, seconds=5)
    (error,) = home.found
    assert isinstance(error, LinkLost)
    assert home.reported == ("id2", "id1")
    assert (error.device, error.peer) == (home.devices["id2"].name, home.devices["id1"].name)


@pytest.mark.parametrize("one_way", [False, True])
async def test_link_is_not_lost_if_it_works_one_way_or_a_device_does_not_answer_at_once(
    home: Home, one_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "connect_seconds", lambda *_: 0.02)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.01)

    home.cut = {("id2", "id1")} if one_way else {("id2", "id1"), ("id1", "id2")}
    home.stalled = not one_way
    home.waits("id2", 1)
    await until("the check is repeated", lambda: len(home.asked) >= 3, seconds=5)
    assert home.found == []


async def test_check_that_took_its_time_without_a_finding_is_repeated_at_once(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    async def answer_late(_: Iterable[str]) -> bool:
        nonlocal now
        now += 1000.0
        return now > 1000.0

    monkeypatch.setattr(module, "connect_seconds", lambda *_: 0.02)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 1000.0)
    monkeypatch.setattr(module, "loop_time", lambda: now)
    monkeypatch.setattr(home, "answer_at_once", answer_late)
    home.cut = {("id2", "id1"), ("id1", "id2")}
    home.waits("id2", 1)
    await until("the finding", lambda: home.found, seconds=5)


async def test_nothing_happens_while_device_and_link_are_well(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.01)

    home.waits("id0", 1)
    home.waits("id0", 1)  # the same report again begins no second check
    await until("the check is repeated", lambda: len(home.asked) >= 3, seconds=5)
    home.waits("id0", None)
    await asyncio.sleep(0.05)
    num_asked = len(home.asked)
    await asyncio.sleep(0.1)
    assert len(home.asked) == num_asked
    assert home.found == []


@pytest.mark.parametrize(("late_rank", "epoch"), [(None, 1), (1, 7), (3, 1), (0, 1)])
async def test_reports_of_other_plans_and_impossible_ones_are_ignored(
    home: Home, late_rank: int | None, epoch: int
) -> None:
    home.waits("id0", late_rank, epoch)
    await let_tasks_run()
    assert home.asked == []
