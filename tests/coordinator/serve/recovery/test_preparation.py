"""Plans made ahead for the loss of each device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.plans import BERT_LARGE, make_plan, on_devices

from coordinator.devices.registry import RECONNECT_SECONDS
from coordinator.plan.redundancy import pause_seconds
from coordinator.serve.recovery.preparation import (
    NOTHING,
    Preparation,
    PreparedPlan,
    Refusal,
    Sending,
    Spares,
    describe,
    prepared_losses,
)
from hearth.plan.plan import Plan
from hearth.wire.messages import PreparedLoss, SegmentFiles, SegmentParts

PLAN = make_plan(BERT_LARGE, "hmp", (1, 1, 1))  # devices id0, id1 and id2
ALL = frozenset({"id0", "id1", "id2"})


def plan_on(*device_ids: str) -> Plan:
    return on_devices(make_plan(BERT_LARGE, "hmp", (1,) * len(device_ids)), device_ids)


def prepared_without(device: str, made_for: frozenset[str] = ALL) -> PreparedPlan:
    return PreparedPlan(made_for - {device}, plan_on(*sorted(ALL - {device})), ())


def all_prepared() -> Preparation:
    preparation = NOTHING
    for device in sorted(ALL):
        preparation = preparation.prepared(device, prepared_without(device))
    return preparation


def test_each_device_is_prepared_for_once_and_again_when_the_devices_change() -> None:
    assert NOTHING.to_prepare(sorted(ALL), ALL, 0.0) == sorted(ALL)
    preparation = all_prepared()
    assert preparation.to_prepare(sorted(ALL), ALL, 0.0) == []
    assert preparation.to_prepare(sorted(ALL), ALL | {"new"}, 0.0) == sorted(ALL)


def test_loss_that_cannot_be_prepared_for_is_tried_again_after_a_while_or_when_the_devices_change() -> None:
    refused = all_prepared().refused("id1", Refusal("no memory", again_at=60.0))
    assert refused.to_prepare(sorted(ALL), ALL, 59.0) == []
    assert refused.to_prepare(sorted(ALL), ALL, 60.0) == ["id1"]
    assert refused.without_refusals().to_prepare(sorted(ALL), ALL, 0.0) == ["id1"]
    assert refused.prepared("id1", prepared_without("id1")).refusals == {}


@pytest.mark.parametrize(
    ("usable", "found"),
    [
        ({"id0", "id2"}, True),
        ({"id0", "id2", "new"}, True),  # what a new device is good for is seen later
        ({"id0"}, False),  # two were lost
        ({"id0", "id1"}, False),
        (ALL, False),  # no device was lost
    ],
)
def test_plan_is_found_for_the_loss_that_it_was_made_for_if_its_devices_are_left(usable: set[str], found: bool) -> None:
    one = prepared_without("id1")
    expected = ("id1", one) if found else ("", None)
    assert NOTHING.prepared("id1", one).for_devices(frozenset(usable)) == expected


def test_plan_without_one_end_of_a_cut_link_is_found_and_the_faster_one_preferred() -> None:
    preparation = all_prepared()
    faster = prepared_without("id2")
    predicted = faster.plan.predicted.model_copy(
        update={"latency_seconds": 0.5 * faster.plan.predicted.latency_seconds}
    )
    faster = replace(faster, plan=faster.plan.model_copy(update={"predicted": predicted}))
    preparation = preparation.prepared("id2", faster)
    cut = {("id0", "id2"), ("id2", "id0")}
    assert preparation.for_devices(ALL, cut) == ("id2", faster)
    assert preparation.for_devices(ALL, {*cut, ("id0", "id1"), ("id1", "id0")}) == ("id0", preparation.plans["id0"])
    assert preparation.for_devices(ALL, {*cut, ("id0", "id1"), ("id1", "id2")}) == ("", None)
    assert preparation.for_devices(ALL - {"id1"}, cut) == ("", None)


def test_plan_for_exactly_the_devices_that_are_left_is_preferred() -> None:
    wide, narrow = PreparedPlan(frozenset("abd"), plan_on("a"), ()), PreparedPlan(frozenset("ab"), plan_on("a"), ())
    preparation = NOTHING.prepared("c", wide).prepared("e", narrow)
    assert preparation.for_devices(frozenset("ab")) == ("e", narrow)
    assert preparation.for_devices(frozenset("abd")) == ("c", wide)


def test_description_names_the_device_that_cannot_be_lost() -> None:
    assert describe(NOTHING, PLAN) == "being prepared"
    preparation = all_prepared()
    assert describe(preparation, PLAN) == "yes, any one device; pause about 0.9 s"
    spares = "; spare weights: 120 MiB on disk, 40.0 MiB in memory"
    text = describe(preparation, PLAN, Spares(120 << 20, 40 << 20))
    assert text == f"yes, any one device; pause about 0.9 s{spares}"
    refused = preparation.refused("id2", Refusal("no room", 0.0)).refused("other", Refusal("of an earlier plan", 0.0))
    assert describe(refused, PLAN) == "cannot lose device2 (no room)"


def test_losses_say_what_is_prepared_what_is_missing_and_how_long_each_one_lasts() -> None:
    def loss(number: int, is_prepared: bool, **known: Any) -> PreparedLoss:
        return PreparedLoss(device=f"device{number}", is_prepared=is_prepared, **known)

    mb = 1_000_000
    ahead = replace(prepared_without("id0"), spare_bytes={"id1": 10 * mb, "id2": 40 * mb})
    preparation = NOTHING.prepared("id0", ahead).refused("id2", Refusal("no room", 0.0))
    first = loss(0, True, spare_bytes=50 * mb, pause_seconds=pause_seconds(40 * mb, RECONNECT_SECONDS))
    assert prepared_losses(preparation, PLAN) == (first, loss(1, False), loss(2, False, reason="no room"))
    sending = Sending("id1", {"id0": 30 * mb, "id2": 5 * mb}, {"device0": 12 * mb, "device2": 0})
    second = loss(1, False, spare_bytes=35 * mb, missing_bytes=12 * mb)
    assert prepared_losses(preparation, PLAN, sending)[1] == second
    read = prepared_losses(preparation, PLAN, spares=Spares(100 * mb, 75 * mb))[0]
    assert read.pause_seconds == pause_seconds(10 * mb, RECONNECT_SECONDS)


def test_spare_chunks_are_those_that_only_plans_made_ahead_load() -> None:
    def plan(**chunks: str) -> PreparedPlan:
        parts = [SegmentParts(files=(SegmentFiles(graph=tuple(64 * each for each in of)),)) for of in chunks.values()]
        return PreparedPlan(frozenset(chunks), plan_on(*chunks), parts)

    deployed = plan(id0="a", id1="bc", id2="d")
    ahead = NOTHING.prepared("id1", plan(id0="acb", id2="d")).prepared("id2", plan(id0="fba", id1="bc"))
    assert ahead.spare_chunks(deployed) == {"id0": [64 * each for each in "cbf"]}
    unknown = PreparedPlan(ALL, PLAN, ())  # of workers that an earlier coordinator loaded
    assert ahead.spare_chunks(unknown)["id2"] == [64 * "d"]
