"""Measures the planners' input: links between devices, and the speed of each device on a model. Results are cached.

`block_profiling` and `graph_profiling` define the workload of each kind of model and build its cluster from the results.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from coordinator.devices.fleet import Fleet, ask_across
from coordinator.devices.registry import Device
from hearth.errors import BadMessage, HearthError, NoDevices
from hearth.files import write_atomically
from hearth.plan.profile import Link
from hearth.wire.messages import LinkMeasured, MeasureLink, Profile, Profiled

# Wi-Fi rates vary over time. One hour is a compromise between outdated rates and frequent measurements.
LINK_CACHE_SECONDS = 3600.0
_LINK_BYTES = 64 << 20  # most bytes to send per ordered pair
_LINK_SECONDS = 1.0  # most time to send per ordered pair
_LATE_SECONDS = 10.0  # added to the agent's own timeout, so that its more specific error comes first
_CACHE_VERSION = 2  # part of the cache key: a new version ignores old files

Report = Callable[[str], None]
T = TypeVar("T")
R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True)
class Workload(Generic[R]):
    """A model to measure on devices."""

    title: str  # shown to users
    request: Profile
    result: type[R]
    cache: str  # file name prefix of cached results
    depends_on: tuple[object, ...]  # cache key: everything except the device that a result depends on
    seconds: Callable[[R], float]  # total seconds of a result, to compare two results
    frames: Callable[[], Sequence[bytes]] = lambda: ()  # payload of the request; called in a worker thread
    check: Callable[[Device], None] = lambda device: None  # raises if a device cannot run the model


@dataclass(frozen=True)
class Measured(Generic[R]):
    """Devices with a result and links to all others. `results` by device id, `links` by (source, target)."""

    devices: tuple[Device, ...]
    results: Mapping[str, R]
    links: Mapping[tuple[str, str], Link]


class Profiler:
    """Measures the devices of a fleet and caches results in `cache_dir`."""

    def __init__(self, fleet: Fleet, cache_dir: Path, report: Report = lambda line: None) -> None:
        self._fleet = fleet
        self._cache_dir = cache_dir
        self._report = report
        self.links: dict[tuple[str, str], Link] = {}
        self._factors: dict[str, float] = {}  # current / cached seconds, of devices that drifted

    async def measure(self, devices: Sequence[Device], workload: Workload[R]) -> Measured[R]:
        """Read telemetry and measure links and workload of these devices. Devices that fail are left out.

        Raises the first device's error if the workload failed on all, NoDevices if none is left.
        """
        await self._fleet.refresh_telemetry()
        devices = [self._fleet.devices[device.device_id] for device in devices]
        links = await self.measure_links(devices)
        results, failures = await on_each(devices, lambda device: self._result(device, workload))
        if failures and not results:
            raise next(iter(failures.values()))
        for name, error in failures.items():
            self._report(f"{name} is left out: {error}")
        known = [device for device in devices if device.device_id in results and device.telemetry is not None]
        connected = fully_linked([device.device_id for device in known], links)
        known = [device for device in known if device.device_id in connected]
        if not known:
            raise NoDevices(seconds=0)
        links = {pair: link for pair, link in links.items() if connected.issuperset(pair)}
        return Measured(tuple(known), {device.device_id: results[device.device_id] for device in known}, links)

    async def _result(self, device: Device, workload: Workload[R]) -> R:
        workload.check(device)
        telemetry = device.telemetry
        settings = (telemetry.num_threads, telemetry.compute_device) if telemetry else ()
        path = self._path(workload.cache, device.device_id, *workload.depends_on, settings)
        if (known := _cached(path, workload.result)) is not None:
            return known
        self._report(f"profiling {workload.title} on {device.name}")
        result = await self._ask(device, workload)
        write_atomically(path, result.model_dump_json())
        return result

    async def _ask(self, device: Device, workload: Workload[R]) -> R:
        frames = await asyncio.to_thread(workload.frames)
        seconds = workload.request.timeout_seconds + _LATE_SECONDS
        reply = await self._fleet.call(device.device_id, workload.request, frames, timeout_seconds=seconds)
        if not isinstance(reply.message, Profiled) or not isinstance(reply.message.result, workload.result):
            raise BadMessage(reason=f"an agent answered Profile with {type(reply.message).__name__}")
        return reply.message.result

    # ---- drift ----------------------------------------------------------------------------------------------------

    def factor(self, device_id: str) -> float:
        """Current time of a device / its cached time; 1 unless it drifted."""
        return self._factors.get(device_id, 1.0)

    def scale_device(self, device_id: str, factor: float) -> None:
        """Multiply the times of a device that became slower (`factor` above 1) or faster."""
        self._factors[device_id] = self.factor(device_id) * factor

    async def look_again(self, device: Device, workload: Workload[R]) -> None:
        """Measure a device again and set its factor against the cached result. It should be idle otherwise."""
        before = workload.seconds(await self._result(device, workload))
        now = workload.seconds(await self._ask(device, workload))
        self._factors[device.device_id] = now / before if before > 0 and now > 0 else 1.0

    def forget_links(self, device_ids: Collection[str]) -> None:
        """Drop the cached links between these devices, so that they are measured again."""
        for pair in permutations(device_ids, 2):
            self.links.pop(pair, None)
            self._path("link", *pair).unlink(missing_ok=True)

    # ---- links ----------------------------------------------------------------------------------------------------

    async def measure_links(self, devices: Sequence[Device]) -> dict[tuple[str, str], Link]:
        """Links of all ordered pairs, without those that failed. Pairs that share no machine are measured concurrently."""
        by_id = {device.device_id: device for device in devices}
        pairs = list(permutations(by_id, 2))
        for pair in pairs:
            if pair not in self.links and (link := _cached(self._path("link", *pair), Link, LINK_CACHE_SECONDS)):
                self.links[pair] = link
        wanted = [pair for pair in pairs if pair not in self.links]
        if wanted:
            self._report(f"measuring {len(wanted)} links")
        for together in _disjoint_rounds(wanted, {device.device_id: device.host_id for device in devices}):
            await asyncio.gather(*(self._measure(by_id[source], by_id[target]) for source, target in together))
        return {pair: self.links[pair] for pair in pairs if pair in self.links}

    async def _measure(self, source: Device, target: Device) -> None:
        try:
            request = partial(MeasureLink, max_bytes=_LINK_BYTES, max_seconds=_LINK_SECONDS)
            measured = await ask_across(self._fleet, source, target, request, LinkMeasured, _LINK_SECONDS)
        except HearthError as error:
            self._report(f"the link from {source.name} to {target.name} could not be measured: {error}")
            return
        link = Link(
            source=source.device_id,
            target=target.device_id,
            bytes_per_second=measured.bytes_per_second,
            round_trip_seconds=measured.round_trip_seconds,
        )
        self.links[source.device_id, target.device_id] = link
        write_atomically(self._path("link", link.source, link.target), link.model_dump_json())

    # ---- cache ----------------------------------------------------------------------------------------------------

    def _path(self, kind: str, *parts: object) -> Path:
        """The file of a cached result; its name is a hash of all `parts`."""
        key = json.dumps([_CACHE_VERSION, *map(str, parts)])
        return self._cache_dir / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


async def on_each(
    devices: Sequence[Device], measure: Callable[[Device], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, HearthError]]:
    """Measure devices concurrently, but agents on one machine in turn, since they would slow each other down.

    Returns the results by device id, and the errors by device name.
    """
    by_host: dict[str, list[Device]] = {}
    for device in devices:
        by_host.setdefault(device.host_id, []).append(device)
    result: dict[str, T] = {}
    failures: dict[str, HearthError] = {}

    async def one_host(group: list[Device]) -> None:
        for device in group:
            try:
                result[device.device_id] = await measure(device)
            except HearthError as error:
                failures[device.name] = error

    await asyncio.gather(*(one_host(group) for group in by_host.values()))
    return result, failures


def _cached(path: Path, kind: type[R], max_age_seconds: float = math.inf) -> R | None:
    """The cached result; None if the file is absent, invalid or too old."""
    try:
        age = abs(time.time() - path.stat().st_mtime)  # the clock may have been set back
        return kind.model_validate_json(path.read_bytes()) if age < max_age_seconds else None
    except (OSError, ValidationError):
        return None


def _disjoint_rounds(pairs: Iterable[tuple[str, str]], hosts: dict[str, str]) -> list[list[tuple[str, str]]]:
    """Group pairs into rounds in which each machine takes part at most once."""
    rounds: list[tuple[set[str], list[tuple[str, str]]]] = []
    for source, target in pairs:
        ends = {hosts[source], hosts[target]}
        taken, members = next((each for each in rounds if not each[0] & ends), (set[str](), []))
        if not members:
            rounds.append((taken, members))
        taken |= ends
        members.append((source, target))
    return [members for _, members in rounds]


def fully_linked(device_ids: Sequence[str], links: Mapping[tuple[str, str], Link]) -> set[str]:
    """Drop the device with the most unmeasured links until none is missing; returns the rest."""
    left = set(device_ids)
    while True:
        missing = {
            device: sum((device, other) not in links or (other, device) not in links for other in left - {device})
            for device in left
        }
        if not any(missing.values()):
            return left
        left.remove(max(sorted(missing), key=lambda device: missing[device]))
