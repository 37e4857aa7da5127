"""Which devices start the process from which workers are forked before there is a plan."""

from __future__ import annotations

import asyncio

import pytest
from support.devices import ready_device, with_telemetry
from support.fleets import TransformerFleet

from coordinator.serve.model.bring_up import one_of_each_machine, warm_workers
from hearth.wire.messages import FindMissing


@pytest.mark.parametrize(("hosts", "chosen"), [("xyz", "abc"), ("xxxxx", "a"), ("xyxyz", "abe"), ("", "")])
def test_first_device_of_each_machine(hosts: str, chosen: str) -> None:
    devices = [with_telemetry(ready_device(name), host_id=host) for name, host in zip("abcde", hosts, strict=False)]
    assert "".join(sorted(device.name for device in one_of_each_machine(devices))) == chosen


def test_device_that_does_not_answer_stops_no_other() -> None:
    fleet = TransformerFleet("abc")
    fleet.kill("a")
    asyncio.run(warm_workers(fleet, "abc", "torch"))  # type: ignore[arg-type]
    asked = [(name, each.prepare_worker) for name, each in fleet.asked if isinstance(each, FindMissing)]
    assert sorted(asked) == [("a", "torch"), ("b", "torch"), ("c", "torch")]
