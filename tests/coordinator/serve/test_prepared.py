"""Plans made ahead for the loss of each device."""

from __future__ import annotations

from support.plans import BERT_LARGE, make_plan

from coordinator.serve.prepared import NOTHING, PreparedPlan, describe

PLAN = make_plan(BERT_LARGE, "hmp", (1, 1, 1))  # devices id0, id1 and id2
ALL = frozenset({"id0", "id1", "id2"})


def prepared_without(device: str) -> PreparedPlan:
    return PreparedPlan(ALL - {device}, make_plan(BERT_LARGE, "hmp", (1, 1)), ())


def test_each_device_is_prepared_for_once_and_again_when_the_devices_change() -> None:
    preparation = NOTHING
    assert preparation.to_prepare(sorted(ALL), ALL) == sorted(ALL)
    for device in sorted(ALL):
        preparation = preparation.prepared(device, prepared_without(device))
    assert preparation.to_prepare(sorted(ALL), ALL) == []
    assert preparation.to_prepare(sorted(ALL), ALL | {"new"}) == sorted(ALL)
    refused = preparation.refused("id1", "no memory")
    assert refused.to_prepare(sorted(ALL), ALL | {"new"}) == ["id0", "id2"]
    assert "id1" in refused.without_refusals().to_prepare(sorted(ALL), ALL)


def test_plan_is_found_only_for_exactly_the_devices_that_it_was_made_for() -> None:
    one = prepared_without("id1")
    preparation = NOTHING.prepared("id1", one)
    assert preparation.for_devices(frozenset({"id0", "id2"})) is one
    for others in ({"id0"}, {"id0", "id1"}, ALL, {"id0", "id2", "new"}):
        assert preparation.for_devices(frozenset(others)) is None


def test_description_names_the_device_that_cannot_be_lost() -> None:
    preparation = NOTHING
    assert describe(preparation, PLAN, 0.5) == "being prepared"
    for device in sorted(ALL):
        preparation = preparation.prepared(device, prepared_without(device))
    assert describe(preparation, PLAN, 0.42) == "yes, any one device; pause about 0.4 s"
    assert describe(preparation, PLAN, None) == "yes, any one device"
    refused = preparation.refused("id2", "no room").refused("other", "of an earlier plan")
    assert describe(refused, PLAN, 0.4) == "cannot lose device2 (no room)"
