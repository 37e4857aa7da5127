"""Devices as the coordinator knows them, for tests with fake fleets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.devices.registry import Device
from hearth.wire.messages import AgentState, AgentWelcome, Telemetry, WorkerStatus


def ready_device(name: str) -> Device:
    """A device with a ready worker."""
    welcome = AgentWelcome(version="0", device_id=name, boot_id="b", name=name, device_public_key="0" * 40, link_port=1)
    telemetry = Telemetry(
        host_id=name, cpu_model="", num_cores=1, load_1min=0.0, frequency_mhz=None, memory_total_bytes=8 << 30,
        memory_available_bytes=8 << 30, memory_budget_bytes=8 << 30, disk_free_bytes=64 << 30, temperature_celsius=None,
        gpu=None, num_threads=1, compute_device="cpu", clock_unix_seconds=0.0, python_version="3",
    )  # fmt: skip
    state = AgentState(boot_id="b", workers=(WorkerStatus(state="ready", epoch=1),))
    return Device(welcome, "10.0.0.1", 1, 0.0, state=state, telemetry=telemetry)


def with_telemetry(device: Device, **changes: Any) -> Device:
    """The device after it has reported these changes."""
    assert device.telemetry is not None
    return replace(device, telemetry=device.telemetry.model_copy(update=changes))
