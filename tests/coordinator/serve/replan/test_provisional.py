"""When devices and links are measured for which a plan was made provisionally."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.devices import with_telemetry
from support.fleets import TransformerFleet
from support.plans import BERT_LARGE, make_plan, on_devices

from coordinator.devices.block_profiling import block_workload
from coordinator.devices.other_models import NOTHING_TAKEN
from coordinator.devices.profiling import Profiler
from coordinator.serve.replan.replanner import _AGAIN_SECONDS, _PROFILER_BYTES, ProvisionalMeasurer
from coordinator.serve.requests.admission import Admission
from hearth.errors import DeviceLost
from hearth.wire.messages import Message, Profile
from hearth.wire.rpc import Reply

WORKLOAD = block_workload(BERT_LARGE, 64)


class Home:
    """Equal devices on these machines, of which `a` is measured and deployed on. The others have its profile."""

    def __init__(self, folder: Path, hosts: Mapping[str, str], **telemetry: Any) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.fleet = TransformerFleet("".join(hosts))
        for name, host in hosts.items():
            device = self.fleet.devices[name]
            self.fleet.devices[name] = with_telemetry(device, cpu_model="N100", host_id=host, **telemetry)
        self.devices = list(self.fleet.devices.values())
        self.exact_profiler = Profiler(self.fleet, folder)  # type: ignore[arg-type]
        self.profiler = Profiler(self.fleet, folder, self.lines.append, provisional=True)  # type: ignore[arg-type]
        self.admission: Admission[str] = Admission(4)
        self.admission.open("", 4)
        services: Any = SimpleNamespace(
            fleet=self.fleet, profiler=self.profiler, report=self.lines.append, taken=NOTHING_TAKEN
        )
        kind: Any = SimpleNamespace(workload=WORKLOAD)
        self.measurer = ProvisionalMeasurer(kind, services, self.admission, lambda: self.now)
        self.plan = on_devices(make_plan(BERT_LARGE, "local", [1.0]), "a")

    async def settle(self) -> None:
        await self.exact_profiler.measure(self.devices[:1], WORKLOAD)  # the others are its equals
        await self.profiler.measure(self.devices, WORKLOAD)
        self.fleet.asked.clear()

    async def measure_next(self) -> str:
        return "".join(sorted(await self.measurer.measure_next(self.devices, self.plan)))

    def profiled(self) -> str:
        return "".join(device for device, message in self.fleet.asked if isinstance(message, Profile))


async def test_machine_that_serves_is_measured_while_no_request_runs(tmp_path: Path) -> None:
    home = Home(tmp_path, {"a": "one", "b": "one"})
    await home.settle()
    await home.admission.enter(1.0)
    assert await home.measure_next() == home.profiled() == ""
    home.admission.leave()
    assert (await home.measure_next(), home.profiled()) == ("", "b")
    assert [await home.measure_next() for _ in range(2)] == ["b", ""]
    assert home.profiled() == "b"


async def test_other_machines_are_measured_meanwhile(tmp_path: Path) -> None:
    home = Home(tmp_path, {"a": "one", "b": "one", "c": "two"}, memory_available_bytes=_PROFILER_BYTES - 1)
    await home.settle()
    await home.admission.enter(1.0)
    await home.measure_next()
    await home.measure_next()
    assert home.profiled() == "c"


@pytest.mark.parametrize(("free_bytes", "measured"), [(_PROFILER_BYTES, "b"), (_PROFILER_BYTES - 1, "")])
async def test_profiler_takes_no_memory_that_a_worker_may_need(free_bytes: int, measured: str, tmp_path: Path) -> None:
    home = Home(tmp_path, {"a": "one", "b": "one"}, memory_available_bytes=free_bytes)
    await home.settle()
    await home.measure_next()
    assert home.profiled() == measured


async def test_failed_measurement_is_tried_again_later(tmp_path: Path) -> None:
    home = Home(tmp_path, {"a": "one", "b": "two"})
    await home.settle()
    working = home.fleet.call

    async def call(device_id: str, message: Message, *rest: Any, **named: Any) -> Reply:
        if isinstance(message, Profile) and home.now == 0.0:
            home.fleet.asked.append((device_id, message))
            raise DeviceLost(device=device_id, reason="of all times now")
        return await working(device_id, message, *rest, **named)

    home.fleet.call = call  # type: ignore[method-assign]
    assert [await home.measure_next() for _ in range(2)] == ["", ""]
    assert home.profiled() == "b"
    assert home.lines[-1].startswith("b could not be measured yet: The device b was lost")
    home.now = _AGAIN_SECONDS
    assert [await home.measure_next() for _ in range(2)] == ["", "b"]
    assert home.profiled() == "bb"


async def test_links_are_measured_pair_by_pair(tmp_path: Path) -> None:
    home = Home(tmp_path, {"a": "one", "b": "two", "c": "three"})
    await home.settle()
    for name in "bc":
        await home.profiler.measure_provisional(home.fleet.devices[name], WORKLOAD, lambda: False)
    home.profiler.provisional_links |= {("a", "b"), ("b", "c"), ("c", "b")}
    await home.admission.enter(1.0)
    await home.measure_next()
    assert home.profiler.provisional_links == {("a", "b")}
    home.admission.leave()
    assert [await home.measure_next() for _ in range(2)] == ["", "abc"]
