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

from coordinator.devices.fleet import Fleet, ask_with_listener
from coordinator.devices.registry import Device
from coordinator.models.cache_files import read_cached, remove_cached, write_cached
from hearth.errors import BadMessage, HearthError, NoDevices
from hearth.plan.profile import Link
from hearth.platform.asyncio_tools import loop_time
from hearth.platform.disk import FILE_SECONDS, on_disk
from hearth.protocol import REPLY_MARGIN_SECONDS
from hearth.wire.messages import LinkMeasured, MeasureLink, Profile, Profiled

# Wi-Fi rates vary over time. One hour is a compromise between outdated rates and frequent measurements.
LINK_CACHE_SECONDS = 3600.0
_MAX_LINK_BYTES = 64 << 20  # to send per ordered pair: a fast link is measured in less than a second
# To send per ordered pair: long enough for TCP to reach its rate, short for 56 pairs of 8 devices.
_MAX_LINK_SECONDS = 1.0
_PROBE_LINK_SECONDS = 0.1  # to send when only the connection is checked
# A link that has just been found cut is not measured, which would take 1.5 s, while requests wait for the next plan.
_CUT_SECONDS = 5.0
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
    cache_prefix: str  # file name prefix of cached results
    cache_key: tuple[object, ...]  # cache key: everything except the device that a result depends on
    total_seconds: Callable[[R], float]  # total seconds of a result, to compare two results
    frames: Callable[[], Sequence[bytes]] = lambda: ()  # payload of the request; called in a worker thread
    path: Path = Path()  # of the file that `frames` reads
    check: Callable[[Device], None] = lambda device: None  # raises if a device cannot run the model


@dataclass(frozen=True)
class MeasuredDevices(Generic[R]):
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
        self.failed_links: set[tuple[str, str]] = set()  # that could not be measured when last tried
        self._cut_at: dict[tuple[str, str], float] = {}  # loop time at which a link was found cut
        self._slowdowns: dict[str, float] = {}  # current / cached seconds, of devices that drifted

    async def measure(self, devices: Sequence[Device], workload: Workload[R]) -> MeasuredDevices[R]:
        """Read telemetry and measure links and workload of these devices. Devices that fail are left out.

        Raises the first device's error if the workload failed on all, NoDevices if none is left.
        """
        await self._fleet.refresh_telemetry()
        devices = [self._fleet.devices[device.device_id] for device in devices]
        links = await self.measure_links(devices)
        results, failures = await measure_each(devices, lambda device: self._cached_or_measured(device, workload))
        if failures and not results:
            raise next(iter(failures.values()))
        for name, error in failures.items():
            self._report(f"{name} is left out: {error}")
        usable = [device for device in devices if device.device_id in results and device.telemetry is not None]
        connected = fully_linked_devices([device.device_id for device in usable], links)
        usable = [device for device in usable if device.device_id in connected]
        if not usable:
            raise NoDevices(seconds=0)
        links = {pair: link for pair, link in links.items() if connected.issuperset(pair)}
        return MeasuredDevices(tuple(usable), {device.device_id: results[device.device_id] for device in usable}, links)

    async def _cached_or_measured(self, device: Device, workload: Workload[R]) -> R:
        workload.check(device)
        telemetry = device.telemetry
        settings = (telemetry.num_threads, telemetry.compute_device) if telemetry else ()
        path = result_path(self._cache_dir, workload, device.device_id, settings)
        if (cached := _cached(path, workload.result)) is not None:
            return cached
        self._report(f"profiling {workload.title} on {device.name}")
        result = await self._run_workload(device, workload)
        write_cached(path, result.model_dump_json().encode())
        return result

    async def _run_workload(self, device: Device, workload: Workload[R]) -> R:
        frames = await on_disk(workload.path, FILE_SECONDS, workload.frames)
        seconds = workload.request.timeout_seconds + REPLY_MARGIN_SECONDS
        reply = await self._fleet.call(device.device_id, workload.request, frames, timeout_seconds=seconds)
        if not isinstance(reply.message, Profiled) or not isinstance(reply.message.result, workload.result):
            raise BadMessage(reason=f"an agent answered Profile with {type(reply.message).__name__}")
        return reply.message.result

    # ---- drift ----------------------------------------------------------------------------------------------------

    def slowdown(self, device_id: str) -> float:
        """Current time of a device / its cached time; 1 unless it drifted."""
        return self._slowdowns.get(device_id, 1.0)

    def multiply_slowdown(self, device_id: str, factor: float) -> None:
        """Multiply the times of a device that became slower (`factor` above 1) or faster."""
        self._slowdowns[device_id] = self.slowdown(device_id) * factor

    async def remeasure(self, device: Device, workload: Workload[R]) -> None:
        """Measure a device again and set its factor against the cached result. It should be idle otherwise."""
        before = workload.total_seconds(await self._cached_or_measured(device, workload))
        now = workload.total_seconds(await self._run_workload(device, workload))
        self._slowdowns[device.device_id] = now / before if before > 0 and now > 0 else 1.0

    def forget_links(self, device_ids: Collection[str]) -> None:
        """Drop the cached links between these devices, so that they are measured again."""
        for pair in permutations(device_ids, 2):
            self.links.pop(pair, None)
            remove_cached(self._link_path(pair))

    def link_is_cut(self, source: str, target: str) -> None:
        """Two devices cannot connect: the next plan does without their link, which is measured later."""
        pairs = list(permutations((source, target), 2))
        self._cut_at |= dict.fromkeys(pairs, loop_time())
        self.failed_links |= set(pairs)

    def cut_links(self) -> set[tuple[str, str]]:
        """Pairs of devices that were found a moment ago not to reach each other, in both orders."""
        self._cut_at = {pair: at for pair, at in self._cut_at.items() if loop_time() - at < _CUT_SECONDS}
        return set(self._cut_at)

    # ---- links ----------------------------------------------------------------------------------------------------

    async def measure_links(self, devices: Sequence[Device]) -> dict[tuple[str, str], Link]:
        """Links of all ordered pairs, without those that failed. Pairs that share no machine are measured concurrently."""
        by_id = {device.device_id: device for device in devices}
        pairs = list(permutations(by_id, 2))
        for pair in pairs:
            if pair not in self.links and (link := _cached(self._link_path(pair), Link, LINK_CACHE_SECONDS)):
                self.links[pair] = link
        cut = self.cut_links()
        unmeasured = [pair for pair in pairs if pair not in self.links and pair not in cut]
        self.failed_links -= set(unmeasured)
        self.failed_links |= cut & set(pairs)
        if unmeasured:
            self._report(f"measuring {len(unmeasured)} links")
        for concurrent in _disjoint_rounds(unmeasured, {device.device_id: device.host_id for device in devices}):
            await asyncio.gather(
                *(
                    self._measure_link(by_id[source], by_id[target])
                    for source, target in concurrent
                    if (target, source) not in self.failed_links  # both directions are needed
                )
            )
        return {pair: self.links[pair] for pair in pairs if pair in self.links and pair not in self._cut_at}

    async def can_connect(self, source: Device, target: Device) -> bool:
        """Whether a device reaches another. Takes a few round trips, and about 1.5 s if it does not."""
        request = partial(MeasureLink, max_bytes=1, max_seconds=_PROBE_LINK_SECONDS)
        try:
            await ask_with_listener(self._fleet, source, target, request, LinkMeasured, _PROBE_LINK_SECONDS)
        except HearthError:
            return False
        for pair in permutations((source.device_id, target.device_id), 2):
            self._cut_at.pop(pair, None)
        return True

    async def _measure_link(self, source: Device, target: Device) -> None:
        try:
            request = partial(MeasureLink, max_bytes=_MAX_LINK_BYTES, max_seconds=_MAX_LINK_SECONDS)
            measured = await ask_with_listener(self._fleet, source, target, request, LinkMeasured, _MAX_LINK_SECONDS)
        except HearthError as error:
            self.failed_links.add((source.device_id, target.device_id))
            self._report(f"the link from {source.name} to {target.name} could not be measured: {error}")
            return
        link = Link(
            source=source.device_id,
            target=target.device_id,
            bytes_per_second=measured.bytes_per_second,
            round_trip_seconds=measured.round_trip_seconds,
        )
        self.links[source.device_id, target.device_id] = link
        write_cached(self._link_path((link.source, link.target)), link.model_dump_json().encode())

    def _link_path(self, pair: tuple[str, str]) -> Path:
        return _cache_path(self._cache_dir, "link", *pair)


def result_path(cache_dir: Path, workload: Workload[R], device_id: str, settings: tuple[object, ...]) -> Path:
    """The file of a workload's cached result on a device; `settings`: its number of threads and its compute device."""
    return _cache_path(cache_dir, workload.cache_prefix, device_id, *workload.cache_key, settings)


def _cache_path(cache_dir: Path, kind: str, *parts: object) -> Path:
    """The file of a cached result; its name is a hash of all `parts`."""
    key = json.dumps([_CACHE_VERSION, *map(str, parts)])
    return cache_dir / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


async def measure_each(
    devices: Sequence[Device], measure: Callable[[Device], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, HearthError]]:
    """Measure devices concurrently, but agents on one machine in turn, since they would slow each other down.

    Returns the results by device id, and the errors by device name.
    """
    by_host: dict[str, list[Device]] = {}
    for device in devices:
        by_host.setdefault(device.host_id, []).append(device)
    results: dict[str, T] = {}
    failures: dict[str, HearthError] = {}

    async def one_host(group: list[Device]) -> None:
        for device in group:
            try:
                results[device.device_id] = await measure(device)
            except HearthError as error:
                failures[device.name] = error

    await asyncio.gather(*(one_host(group) for group in by_host.values()))
    return results, failures


def _cached(path: Path, kind: type[R], max_age_seconds: float = math.inf) -> R | None:
    """The cached result; None if the file is absent, invalid or too old."""
    try:
        if not math.isinf(max_age_seconds) and abs(time.time() - path.stat().st_mtime) >= max_age_seconds:
            return None  # the absolute value: the clock may have been set back
        return kind.model_validate_json(read_cached(path))
    except (OSError, ValidationError):
        return None


def _disjoint_rounds(pairs: Iterable[tuple[str, str]], hosts: dict[str, str]) -> list[list[tuple[str, str]]]:
    """Group pairs into rounds in which each machine takes part at most once."""
    rounds: list[tuple[set[str], list[tuple[str, str]]]] = []
    for source, target in pairs:
        pair_hosts = {hosts[source], hosts[target]}
        busy_hosts, members = next((each for each in rounds if not each[0] & pair_hosts), (set[str](), []))
        if not members:
            rounds.append((busy_hosts, members))
        busy_hosts |= pair_hosts
        members.append((source, target))
    return [members for _, members in rounds]


def fully_linked_devices(device_ids: Sequence[str], links: Mapping[tuple[str, str], Link]) -> set[str]:
    """Drop the device with the most unmeasured links until none is missing; returns the rest."""
    remaining = set(device_ids)
    while True:
        missing = {
            device: sum((device, other) not in links or (other, device) not in links for other in remaining - {device})
            for device in remaining
        }
        if not any(missing.values()):
            return remaining
        remaining.remove(max(sorted(missing), key=lambda device: missing[device]))
