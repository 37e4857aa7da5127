"""Collects the cluster's profile: telemetry, block latencies, links. Measures only what is not cached."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from itertools import permutations
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from coordinator.devices.fleet import Fleet
from coordinator.devices.pooling import pooled
from coordinator.devices.registry import Device
from hearth.errors import BadMessage, HearthError, NoDevices, UnsupportedWeights
from hearth.files import read_json, write_atomically
from hearth.plan.model_spec import INT4_DEVICES, ModelSpec
from hearth.plan.profile import BlockProfile, ClusterProfile, DeviceProfile, Link
from hearth.wire.messages import (
    BlocksOf,
    Done,
    LinkMeasured,
    MeasureLink,
    OpenLinkProbe,
    Profile,
    Profiled,
)

# A link's rate changes with the weather of a Wi-Fi; an hour is a compromise until live requests keep it current.
LINK_CACHE_SECONDS = 3600.0
_LINK_BYTES = 64 << 20  # at most this much per ordered pair
_LINK_SECONDS = 1.0
_PROFILE_SECONDS = 120.0  # torch's import and 20 measured points on the slowest board
_LATE_SECONDS = 30.0  # by which the wait for an agent exceeds its own for the profiler
_CACHE_VERSION = 2

Report = Callable[[str], None]
_T = TypeVar("_T")


class Profiler:
    """Measures through a fleet, and keeps results under `cache_dir`."""

    def __init__(self, fleet: Fleet, cache_dir: Path, report: Report = lambda line: None) -> None:
        self._fleet = fleet
        self._cache_dir = cache_dir
        self._report = report
        self.links: dict[tuple[str, str], Link] = {}
        self._factors: dict[str, float] = {}  # of devices that drifted since their blocks were measured

    async def cluster(self, devices: Sequence[Device], spec: ModelSpec, seq_len: int) -> ClusterProfile:
        """The profile of these devices for this model. A device that fails while it is measured is left out.

        Raises NoDevices when none is left, or UnsupportedWeights where that is why.
        """
        await self._fleet.refresh_telemetry()
        devices = [self._fleet.devices[device.device_id] for device in devices]
        links = await self.measure_links(devices)
        measured, failures = await on_each(devices, lambda device: self._profile(device, spec, seq_len))
        for name, error in failures.items():
            self._report(f"{name} is left out: {error}")
        blocks = pooled(measured)
        profiles = tuple(
            DeviceProfile(
                device_id=device.device_id,
                name=device.name,
                budget_bytes=device.telemetry.memory_budget_bytes,
                blocks=blocks[device.device_id].scaled(self.factor(device.device_id)),
            )
            for device in devices
            if device.device_id in blocks and device.telemetry is not None
        )
        connected = fully_linked([profile.device_id for profile in profiles], links)
        profiles = tuple(profile for profile in profiles if profile.device_id in connected)
        if not profiles:
            unsupported = (error for error in failures.values() if isinstance(error, UnsupportedWeights))
            raise next(unsupported, NoDevices(seconds=0))
        return ClusterProfile(
            devices=profiles,
            links=tuple(link for link in links.values() if {link.source, link.target} <= connected),
        )

    # ---- blocks ---------------------------------------------------------------------------------------------------

    async def _profile(self, device: Device, spec: ModelSpec, seq_len: int) -> BlockProfile:
        if device.telemetry and spec.weights == "int4" and device.telemetry.compute_device not in INT4_DEVICES:
            raise UnsupportedWeights(
                device=device.name, weights=spec.weights, compute_device=device.telemetry.compute_device
            )
        path = self._cache_dir / f"blocks-{_blocks_key(device, spec, seq_len)}.json"
        try:
            return BlockProfile.model_validate(read_json(path))
        except ValidationError:
            pass
        self._report(f"profiling {spec.name} on {device.name}")
        blocks = await self._measure_blocks(device, spec, seq_len)
        write_atomically(path, blocks.model_dump_json())
        return blocks

    async def _measure_blocks(self, device: Device, spec: ModelSpec, seq_len: int) -> BlockProfile:
        request = Profile(subject=BlocksOf(model=spec, seq_len=seq_len), timeout_seconds=_PROFILE_SECONDS)
        answer = await self._fleet.ask(device.device_id, request, Profiled, _PROFILE_SECONDS + _LATE_SECONDS)
        if not isinstance(answer.result, BlockProfile):
            raise BadMessage(reason=f"{device.name} measured something else than blocks")
        return answer.result

    # ---- drift ----------------------------------------------------------------------------------------------------

    def factor(self, device_id: str) -> float:
        """How many times its measured seconds a device takes now."""
        return self._factors.get(device_id, 1.0)

    def scale_device(self, device_id: str, factor: float) -> None:
        """A device has become slower (above 1) or faster: its curves are handed out times `factor` from now on."""
        self._factors[device_id] = self.factor(device_id) * factor

    async def look_again(self, device: Device, spec: ModelSpec, seq_len: int) -> None:
        """Measure how far a device is from its cached profile now. It should be idle otherwise."""
        cached = await self._profile(device, spec, seq_len)
        fresh = await self._measure_blocks(device, spec, seq_len)
        before, now = (blocks.attention(spec.num_heads) + blocks.mlp(spec.ffn_size) for blocks in (cached, fresh))
        self._factors[device.device_id] = now / before if before > 0 and now > 0 else 1.0

    def forget_links(self, device_ids: Collection[str]) -> None:
        """Have the links between these devices measured anew."""
        for pair in permutations(device_ids, 2):
            self.links.pop(pair, None)
            self._link_path(*pair).unlink(missing_ok=True)

    # ---- links ----------------------------------------------------------------------------------------------------

    async def measure_links(self, devices: Sequence[Device]) -> dict[tuple[str, str], Link]:
        """Every ordered pair. Pairs that share no machine are measured at the same time."""
        hosts = {
            device.device_id: device.telemetry.host_id if device.telemetry else device.device_id for device in devices
        }
        by_id = {device.device_id: device for device in devices}
        wanted = [pair for pair in permutations(by_id, 2) if pair not in self.links and not self._load_link(*pair)]
        if wanted:
            self._report(f"measuring {len(wanted)} links")
        for together in _disjoint_rounds(wanted, hosts):
            await asyncio.gather(*(self._measure(by_id[source], by_id[target]) for source, target in together))
        return {pair: self.links[pair] for pair in permutations(by_id, 2) if pair in self.links}

    async def _measure(self, source: Device, target: Device) -> None:
        try:
            opened = OpenLinkProbe(peer_public_key=source.welcome.device_public_key, seconds=_LINK_SECONDS + 5.0)
            await self._fleet.ask(target.device_id, opened, Done)
            measured = await self._fleet.ask(
                source.device_id,
                MeasureLink(
                    host=target.host,
                    port=target.welcome.link_port,
                    peer_public_key=target.welcome.device_public_key,
                    max_bytes=_LINK_BYTES,
                    max_seconds=_LINK_SECONDS,
                ),
                LinkMeasured,
                timeout_seconds=_LINK_SECONDS + 10.0,
            )
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
        stored = {"measured_unix_seconds": time.time(), "link": link.model_dump()}
        write_atomically(self._link_path(link.source, link.target), json.dumps(stored))

    def _load_link(self, source: str, target: str) -> bool:
        stored = read_json(self._link_path(source, target))
        try:
            assert isinstance(stored, dict)
            age = time.time() - float(stored["measured_unix_seconds"])
            if not 0 <= age < LINK_CACHE_SECONDS:
                return False
            self.links[source, target] = Link.model_validate(stored["link"])
        except (AssertionError, KeyError, TypeError, ValueError):
            return False
        return True

    def _link_path(self, source: str, target: str) -> Path:
        return self._cache_dir / f"link-{_digest(source, target)}.json"


async def on_each(
    devices: Sequence[Device], measure: Callable[[Device], Awaitable[_T]]
) -> tuple[dict[str, _T], dict[str, HearthError]]:
    """Measure all devices at once, but agents on one machine in turn: they would slow each other down.

    What was measured, by device id; and what failed, by the device's name.
    """
    by_host: dict[str, list[Device]] = {}
    for device in devices:
        host = device.telemetry.host_id if device.telemetry else device.device_id
        by_host.setdefault(host, []).append(device)
    result: dict[str, _T] = {}
    failures: dict[str, HearthError] = {}

    async def one_host(group: list[Device]) -> None:
        for device in group:
            try:
                result[device.device_id] = await measure(device)
            except HearthError as error:
                failures[device.name] = error

    await asyncio.gather(*(one_host(group) for group in by_host.values()))
    return result, failures


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([_CACHE_VERSION, *map(str, parts)]).encode()).hexdigest()[:24]


def _blocks_key(device: Device, spec: ModelSpec, seq_len: int) -> str:
    """What the latencies depend on: the shape (not the name or the depth), the device and how it computes."""
    # Small decoders stay in the cache from one token to the next: there the depth counts.
    depth = set() if spec.causal else {"num_layers"}
    shape = spec.model_dump(exclude={"name", "vocab_size", "dtype"} | depth)
    telemetry = device.telemetry
    settings = (telemetry.num_threads, telemetry.compute_device) if telemetry else ()
    return _digest(device.device_id, shape, seq_len, settings)


def _disjoint_rounds(pairs: Iterable[tuple[str, str]], hosts: dict[str, str]) -> list[list[tuple[str, str]]]:
    """Group pairs so that no machine takes part twice in one round."""
    rounds: list[tuple[set[str], list[tuple[str, str]]]] = []
    for source, target in pairs:
        ends = {hosts[source], hosts[target]}
        for taken, members in rounds:
            if not taken & ends:
                taken |= ends
                members.append((source, target))
                break
        else:
            rounds.append((set(ends), [(source, target)]))
    return [members for _, members in rounds]


def fully_linked(device_ids: Sequence[str], links: dict[tuple[str, str], Link]) -> set[str]:
    """The devices that are left when each one with an unmeasured link is dropped, worst first."""
    left = set(device_ids)
    while True:
        missing = {
            device: sum((device, other) not in links or (other, device) not in links for other in left - {device})
            for device in left
        }
        if not any(missing.values()):
            return left
        left.remove(max(sorted(missing), key=lambda device: missing[device]))
