"""Profiles of devices: who is left out, and why none is left."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from support.devices import ready_device
from support.plans import LLAMA_1B, device_profile

from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from hearth.errors import NoDevices, UnsupportedWeights
from hearth.plan.profile import ClusterProfile
from hearth.wire.messages import BlocksOf, LinkMeasured, Message, Profile, Profiled

INT4 = LLAMA_1B.model_copy(update={"weights": "int4"})


class Agents:
    """A fleet whose agents measure at once."""

    def __init__(self, **compute_devices: Literal["cpu", "cuda"]) -> None:
        self.devices: dict[str, Device] = {}
        self.profiled: list[str] = []
        for name, compute_device in compute_devices.items():
            device = ready_device(name)
            assert device.telemetry is not None
            telemetry = device.telemetry.model_copy(update={"compute_device": compute_device})
            self.devices[name] = replace(device, telemetry=telemetry)

    async def refresh_telemetry(self) -> None:
        return

    async def ask(self, device_id: str, message: Message, *_: Any, **__: Any) -> Message:
        if isinstance(message, Profile):
            assert isinstance(message.subject, BlocksOf)
            self.profiled.append(device_id)
            return Profiled(result=device_profile(0, 1.0, message.subject.model, message.subject.seq_len).blocks)
        return LinkMeasured(bytes_per_second=1e8, round_trip_seconds=1e-3, num_bytes=1, stable=True)


def profiled(agents: Agents, folder: Path, lines: list[str]) -> ClusterProfile:
    profiler = Profiler(agents, folder, lines.append)  # type: ignore[arg-type]
    return asyncio.run(profiler.cluster(list(agents.devices.values()), INT4, 64))


def test_a_gpu_that_has_no_int4_is_left_out_and_named(tmp_path: Path) -> None:
    agents, lines = Agents(kitchen="cpu", attic="cuda"), []
    assert [device.name for device in profiled(agents, tmp_path, lines).devices] == ["kitchen"]
    assert agents.profiled == ["kitchen"]
    (said,) = [line for line in lines if "left out" in line]
    assert said.startswith("attic is left out: attic cannot keep weights as int4")
    assert "`--weights int8`" in said


def test_where_no_device_has_int4_that_is_the_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedWeights, match="attic"):
        profiled(Agents(attic="cuda"), tmp_path, [])
    with pytest.raises(NoDevices):
        profiled(Agents(), tmp_path, [])
