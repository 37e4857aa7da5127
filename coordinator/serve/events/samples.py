"""Reads what changes without an event of its own: telemetry of the devices, and measured links."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from coordinator.devices.fleet import Fleet
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.serve.events.stream import EventStream
from hearth.plan.profile import Link
from hearth.platform.asyncio_tools import loop_time
from hearth.wire import messages as wire

_POLL_SECONDS = 1.0  # interval of looking for changes, which asks no device
# Interval of telemetry while somebody watches, and else: it wakes every device.
_WATCHED_SECONDS = 5.0
_IDLE_SECONDS = 60.0


async def keep_sampling(fleet: Fleet, profiler: Profiler, stream: EventStream) -> None:
    """Record samples of all devices and changes of links, until cancelled."""
    links: dict[tuple[str, str], Link] = {}
    sampled_at = float("-inf")
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        links = _record_links(links, profiler.links, stream)
        if loop_time() - sampled_at >= (_WATCHED_SECONDS if stream.is_watched else _IDLE_SECONDS):
            sampled_at = loop_time()
            await fleet.refresh_telemetry()
            for device in fleet.usable():
                if (sample := sample_of(device)) is not None:
                    stream.record(sample)


class DeviceChanges:
    """Records each change of a device's state."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._states: dict[str, str] = {}  # by device id

    def note(self, device: Device) -> None:
        """The fleet has a new state of this device."""
        info = device.info(loop_time())
        if self._states.get(device.device_id) != info.state:
            self._states[device.device_id] = info.state
            self._stream.record(
                wire.DeviceChanged(device_id=info.device_id, name=info.name, state=info.state, reason=info.reason)
            )


def sample_of(device: Device) -> wire.DeviceSampled | None:
    """The telemetry of a device as an event; None before the first."""
    if (told := device.telemetry) is None:
        return None
    readings = {sensor.field: getattr(told, sensor.field) for sensor in wire.SENSORS}
    readings |= {load: _fraction(readings[load]) for load in ("cpu_load", "gpu_load")}
    peak_bytes = device.info(loop_time()).peak_bytes
    return wire.DeviceSampled(device_id=device.device_id, name=device.name, worker_peak_bytes=peak_bytes, **readings)


def _record_links(
    known: dict[tuple[str, str], Link], links: Mapping[tuple[str, str], Link], stream: EventStream
) -> dict[tuple[str, str], Link]:
    for pair, link in links.items():
        if known.get(pair) is not link:
            stream.record(
                wire.LinkRated(
                    source=link.source, target=link.target, bytes_per_second=link.bytes_per_second,
                    round_trip_seconds=link.round_trip_seconds,
                )
            )  # fmt: skip
    return dict(links)


def _fraction(value: float | None) -> float | None:
    return None if value is None else min(max(value, 0.0), 1.0)
