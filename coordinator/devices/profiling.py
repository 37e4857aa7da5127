"""Measures the planners' input: links between devices, and the speed of each device on a model. Results are cached.

Measurements that need the same machine run one after the other, all others at the same time.
`block_profiling` and `graph_profiling` define the workload of each kind of model and build its cluster from the results.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from pydantic import BaseModel

from coordinator.devices.fleet import Fleet, ask_with_listener
from coordinator.devices.other_models import Traffic, link_alone, no_traffic
from coordinator.devices.profile_cache import KnownMedia, ProfileCache, R, Workload
from coordinator.devices.registry import Device
from coordinator.devices.shared_media import Pair, devices_on_radio, find_media
from coordinator.models.cache_files import FLUSH_SECONDS, flushing
from hearth.errors import BadMessage, HearthError, NoDevices
from hearth.plan.profile import Link, SharedMedium, media_of
from hearth.platform.asyncio_tools import cancel_all, loop_time
from hearth.platform.disk import FILE_SECONDS, on_disk
from hearth.protocol import REPLY_MARGIN_SECONDS
from hearth.wire.messages import LinkMeasured, MeasureLink, Profile, Profiled

# Wi-Fi rates vary over time. One hour is a compromise between outdated rates and frequent measurements.
LINK_CACHE_SECONDS = 3600.0
_MAX_LINK_BYTES = 64 << 20  # to send per ordered pair: a fast link is measured in less than a second
# To send per ordered pair: long enough for TCP to reach its rate, short for 56 pairs of 8 devices.
_MAX_LINK_SECONDS = 1.0
_MOST_HOSTS_IN_TURN = 3  # up to which links are measured one at a time anyway, since no two of them have all ends apart
_PROBE_LINK_SECONDS = 0.1  # to send when only the connection is checked
# A link that has just been found cut is not measured, which would take 1.5 s, while requests wait for the next plan.
_CUT_SECONDS = 5.0

Report = Callable[[str], None]
T = TypeVar("T")

Measurement: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class MeasuredDevices(Generic[R]):
    """Devices with a result and links to all others. `results` by device id, `links` by (source, target).

    `media` are what links share.
    """

    devices: tuple[Device, ...]
    results: Mapping[str, R]
    links: Mapping[tuple[str, str], Link]
    media: tuple[SharedMedium, ...]


class Profiler:
    """Measures the devices of a fleet and caches results in `cache_dir`.

    With `provisional`, a device that was not measured has the result of an equal one or of a quick probe, and a link what was
    measured when it was last used, until `measure_provisional` and `measure_provisional_links` measure them: a first plan need
    not wait for that. Without `keeps_links`, links are measured but not kept: next to a coordinator whose traffic is not known.
    """

    def __init__(
        self,
        fleet: Fleet,
        cache_dir: Path,
        report: Report = lambda line: None,
        provisional: bool = False,
        keeps_links: bool = True,
    ) -> None:
        self._fleet = fleet
        self._cache = ProfileCache(cache_dir)
        self._report = report
        self._uses_provisional = provisional
        self._keeps_links = keeps_links
        self._provisional: set[Path] = set()  # results of an equal device, or of a probe: the files that are missing
        self._probed: dict[Path, BaseModel] = {}  # results of probes, by the file that equal devices would share
        self.provisional_links: set[tuple[str, str]] = set()
        self.links: dict[tuple[str, str], Link] = {}
        self._known_media: KnownMedia | None = None  # None: none is known
        self.failed_links: set[tuple[str, str]] = set()  # that could not be measured when last tried
        self._cut_at: dict[tuple[str, str], float] = {}  # loop time at which a link was found cut
        self._slowdowns: dict[str, float] = {}  # current / cached seconds, of devices that drifted

    async def measure(
        self, devices: Sequence[Device], workload: Workload[R], traffic: Traffic = no_traffic
    ) -> MeasuredDevices[R]:
        """Read telemetry and measure links and workload of these devices. Devices that fail are left out.

        `traffic`: as in `measure_links`.

        Raises the first device's error if the workload failed on all, NoDevices if none is left.
        """
        await self._fleet.refresh_telemetry()
        devices = [self._fleet.devices[device.device_id] for device in devices]
        links = await self.measure_links(devices, traffic)
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
        found = {device.device_id: results[device.device_id] for device in usable}
        return MeasuredDevices(tuple(usable), found, links, media_of(self._media_so_far.media, tuple(found)))

    async def read(self, function: Callable[[], T]) -> T:
        """The result of a function that reads cached files. Raises DiskHung."""
        return await on_disk(self._cache.folder, FILE_SECONDS, function)

    async def _cached_or_measured(self, device: Device, workload: Workload[R]) -> R:
        workload.check(device)
        cache = self._cache
        if (cached := await self.read(lambda: cache.result(device, workload))) is not None:
            return cached
        if self._uses_provisional and (found := await self.read(lambda: cache.result_of_equals(device, workload))):
            self._report(f"{device.name} has the profile of an equal device until it is measured")
            self._provisional.add(self._cache.result_path(device, workload))
            return found
        if self._uses_provisional and workload.probe is not None:
            return await self._probe(device, workload, workload.probe)
        self._report(f"profiling {workload.title} on {device.name}")
        result = await self._run_workload(device, workload, workload.request)
        self._cache.keep_result(device, workload, result)
        await flushing.settled(FLUSH_SECONDS)
        return result

    async def _probe(self, device: Device, workload: Workload[R], request: Profile) -> R:
        """A rough result for a first plan, which also stands for equal devices. It is kept in memory only."""
        path = self._cache.path_of_equals(device, workload) or self._cache.result_path(device, workload)
        if path not in self._probed:
            self._report(f"probing {workload.title} on {device.name}; it is profiled once no request runs")
            probed: R = await self._run_workload(device, workload, request)
            self._probed[path] = probed
        self._provisional.add(self._cache.result_path(device, workload))
        result = self._probed[path]
        assert isinstance(result, workload.result)
        return result

    def known_result(self, device: Device, workload: Workload[R]) -> R | None:
        """What was measured before on this device, or on an equal one; None: nothing. Asks no device, but reads files."""
        return self._cache.result(device, workload) or self._cache.result_of_equals(device, workload)

    async def _run_workload(self, device: Device, workload: Workload[R], request: Profile) -> R:
        frames = await on_disk(workload.path, FILE_SECONDS, workload.frames)
        seconds = request.timeout_seconds + REPLY_MARGIN_SECONDS
        reply = await self._fleet.call(device.device_id, request, frames, timeout_seconds=seconds)
        if not isinstance(reply.message, Profiled) or not isinstance(reply.message.result, workload.result):
            raise BadMessage(reason=f"an agent answered Profile with {type(reply.message).__name__}")
        return reply.message.result

    # ---- provisional results --------------------------------------------------------------------------------------

    def is_provisional(self, device: Device, workload: Workload[R]) -> bool:
        """Whether the device was last planned for with the result of an equal one, or of a probe."""
        return self._cache.result_path(device, workload) in self._provisional

    async def measure_provisional(
        self, device: Device, workload: Workload[R], is_disturbed: Callable[[], bool]
    ) -> bool:
        """Measure a device whose result is provisional. Returns False if that was disturbed: it is kept then."""
        result = await self._run_workload(device, workload, workload.request)
        if is_disturbed():
            return False
        self._cache.keep_result(device, workload, result)
        self._provisional.discard(self._cache.result_path(device, workload))
        self._slowdowns.pop(device.device_id, None)  # it was a factor of the equal device's times
        return True

    async def measure_provisional_links(self, devices: Sequence[Device], traffic: Traffic = no_traffic) -> None:
        """As `measure_links` for the provisional links between these devices. Those that fail are dropped."""
        pairs = self.provisional_links.intersection(permutations([device.device_id for device in devices], 2))
        await self._measure_pairs(sorted(pairs), devices, traffic)
        self.provisional_links -= pairs
        for pair in pairs:
            if {pair, pair[::-1]} & self.failed_links:  # both directions are needed
                self.links.pop(pair, None)

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
        now = workload.total_seconds(await self._run_workload(device, workload, workload.request))
        self._slowdowns[device.device_id] = now / before if before > 0 and now > 0 else 1.0

    def forget_links(self, device_ids: Collection[str]) -> None:
        """Drop the cached links between these devices, so that they are measured again."""
        for pair in permutations(device_ids, 2):
            self.links.pop(pair, None)
            self.provisional_links.discard(pair)
            self._cache.forget_link(pair)

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

    async def measure_links(
        self, devices: Sequence[Device], traffic: Traffic = no_traffic
    ) -> dict[tuple[str, str], Link]:
        """Links of all ordered pairs, without those that failed.

        `traffic` is that of deployments that go on while links are measured; a link is kept as it would be without.
        """
        pairs = list(permutations([device.device_id for device in devices], 2))
        if unknown := [pair for pair in pairs if pair not in self.links]:
            for link, is_provisional in await self.read(partial(self._kept_links, unknown)):
                self.links[link.source, link.target] = link
                if is_provisional:
                    self.provisional_links.add((link.source, link.target))
        cut = self.cut_links()
        unmeasured = [pair for pair in pairs if pair not in self.links and pair not in cut]
        self.failed_links -= set(unmeasured)
        self.failed_links |= cut & set(pairs)
        if unmeasured:
            self._report(f"measuring {len(unmeasured)} links")
        await self._measure_pairs(unmeasured, devices, traffic)
        if unmeasured:
            await self._find_media(unmeasured, devices, traffic)
            await flushing.settled(FLUSH_SECONDS)
        return {pair: self.links[pair] for pair in pairs if pair in self.links and pair not in self._cut_at}

    def _kept_links(self, pairs: Iterable[Pair]) -> list[tuple[Link, bool]]:
        """The cached links, each with whether it is provisional. Reads the shared media, too."""
        self._known_media = self._known_media or self._cache.media()
        kept = []
        for pair in pairs:
            if link := self._cache.link(pair, LINK_CACHE_SECONDS):
                kept.append((link, False))
            elif self._uses_provisional and (link := self._cache.link(pair)):
                kept.append((link, True))
        return kept

    async def _find_media(self, measured: Sequence[Pair], devices: Sequence[Device], traffic: Traffic) -> None:
        """Find out which of these devices share a medium, unless that is known, as after a loss.

        Links on radio that were `measured` just now are measured again, one at a time, if others ran at the same time.
        """
        by_id = {device.device_id: device for device in devices}
        radio = devices_on_radio([*by_id], self.links)
        if len({device.host_id for device in devices}) > _MOST_HOSTS_IN_TURN:
            for source, target in (each for each in measured if not set(each).isdisjoint(radio)):
                await self._measure_link(by_id[source], by_id[target], traffic)
        if self._media_so_far.compared.issuperset(radio):
            return
        self._report(f"finding out what the links of {len(radio)} devices share")
        rates = {pair: link.bytes_per_second for pair, link in self.links.items()}

        async def together(pairs: Sequence[Pair]) -> dict[Pair, float]:
            links = await asyncio.gather(*(self._measured_link(by_id[a], by_id[b], traffic) for a, b in pairs))
            measured = {(link.source, link.target): link for link in links if link is not None}
            for pair, link in measured.items():
                if pair in self.links and link.bytes_per_second > self.links[pair].bytes_per_second:
                    self._keep_link(link)  # something slowed the link while it was measured alone
            return {pair: link.bytes_per_second for pair, link in measured.items()}

        found = await find_media([*by_id], radio, rates, together)
        self._known_media = self._media_so_far.with_more(radio, found)
        self._cache.keep_media(self._known_media)
        for medium in found:
            names = ", ".join(by_id[each].name for each in medium.device_ids)
            self._report(f"one medium, of which each transfer takes its turn: {names}")

    @property
    def _media_so_far(self) -> KnownMedia:
        """The media that were found in this run or an earlier one."""
        return self._known_media or KnownMedia(compared=frozenset(), media=())

    async def _measure_pairs(self, pairs: Sequence[Pair], devices: Sequence[Device], traffic: Traffic) -> None:
        """Measure links; those that share no machine concurrently."""
        by_id = {device.device_id: device for device in devices}

        async def measure(source: Device, target: Device) -> None:
            if (target.device_id, source.device_id) not in self.failed_links:  # both directions are needed
                await self._measure_link(source, target, traffic)

        ends = [(by_id[source], by_id[target]) for source, target in pairs]
        await run_apart([(frozenset({a.host_id, b.host_id}), partial(measure, a, b)) for a, b in ends])

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

    async def _measure_link(self, source: Device, target: Device, traffic: Traffic) -> None:
        """Measure a link and keep it, or note that it failed."""
        if (link := await self._measured_link(source, target, traffic)) is None:
            self.failed_links.add((source.device_id, target.device_id))
            return
        self._keep_link(link)

    def _keep_link(self, link: Link) -> None:
        self.links[link.source, link.target] = link
        if self._keeps_links:
            self._cache.keep_link(link)

    async def _measured_link(self, source: Device, target: Device, traffic: Traffic) -> Link | None:
        """A link as measured now, and as it would be without this traffic; None, with a report, if that failed."""
        try:
            request = partial(MeasureLink, max_bytes=_MAX_LINK_BYTES, max_seconds=_MAX_LINK_SECONDS)
            measured = await ask_with_listener(self._fleet, source, target, request, LinkMeasured, _MAX_LINK_SECONDS)
        except HearthError as error:
            self._report(f"the link from {source.name} to {target.name} could not be measured: {error}")
            return None
        link = Link(
            source=source.device_id,
            target=target.device_id,
            bytes_per_second=measured.bytes_per_second,
            round_trip_seconds=measured.round_trip_seconds,
        )
        return link_alone(link, traffic())


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


async def measure_each(
    devices: Sequence[Device], measure: Callable[[Device], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, HearthError]]:
    """Measure devices concurrently, but agents on one machine in turn, since they would slow each other down.

    Returns the results by device id, and the errors by device name.
    """
    results: dict[str, T] = {}
    failures: dict[str, HearthError] = {}

    async def one(device: Device) -> None:
        try:
            results[device.device_id] = await measure(device)
        except HearthError as error:
            failures[device.name] = error

    await run_apart([(frozenset([device.host_id]), partial(one, device)) for device in devices])
    return results, failures


async def run_apart(measurements: Sequence[tuple[frozenset[str], Measurement]]) -> None:
    """Run each as soon as its machines are free; first those whose machines have the most measurements left.

    If one raises, the others are cancelled. None waits for the end of a round: where links are unequally fast, a machine with
    slow ones delays no other.
    """
    waiting = list(measurements)
    running: dict[asyncio.Future[None], frozenset[str]] = {}
    try:
        while waiting or running:
            left = Counter(host for hosts, _ in waiting for host in hosts)
            busy = {host for hosts in running.values() for host in hosts}
            for entry in sorted(waiting, key=lambda entry: -sum(left[host] for host in entry[0])):
                hosts, measurement = entry
                if busy.isdisjoint(hosts):
                    busy |= hosts
                    waiting.remove(entry)
                    running[asyncio.ensure_future(measurement())] = hosts
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                del running[each]
                each.result()
    finally:
        await cancel_all(running)
