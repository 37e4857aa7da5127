"""Files of what was measured on devices, for a `Workload`, and on links: each name is a hash of what the result depends on."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from coordinator.devices.registry import Device
from coordinator.models.cache_files import read_cached, remove_cached, write_cached
from hearth.plan.profile import Link, SharedMedium
from hearth.wire.messages import Profile, Telemetry

_VERSION = 4  # part of each name: a new version ignores old files
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
    described: BaseModel | None = None  # kept with a result, for those who read it later without the workload
    probe: Profile | None = None  # a quick request with the same kind of result, for a first plan
    shared: bool = False  # whether the result of one device may stand for that of an equal one


class MeasuredOn(BaseModel, frozen=True):
    """The device on which a result was measured."""

    device: str
    processor: str
    num_threads: int
    compute_device: str


class KnownMedia(BaseModel, frozen=True):
    """The shared media of the devices that were compared with each other."""

    compared: frozenset[str]
    media: tuple[SharedMedium, ...]

    def with_more(self, compared: Collection[str], found: Sequence[SharedMedium]) -> KnownMedia:
        """What is known after a further comparison: a medium that has a device in common with another one is the same."""
        media = list(self.media)
        for new in found:
            same = [each for each in media if not set(each.device_ids).isdisjoint(new.device_ids)]
            members = {*new.device_ids, *(device for each in same for device in each.device_ids)}
            media = [each for each in media if each not in same] + [SharedMedium(device_ids=tuple(sorted(members)))]
        return KnownMedia(compared=self.compared | set(compared), media=tuple(media))


class ProfileCache:
    """The cached results in `folder`. What is absent or invalid is None."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def result(self, device: Device, workload: Workload[R]) -> R | None:
        """What was measured on this device, with its present settings."""
        return _read(self.result_path(device, workload), workload.result)

    def result_of_equals(self, device: Device, workload: Workload[R]) -> R | None:
        """What was measured last on a device with the same hardware and settings."""
        path = self.path_of_equals(device, workload)
        return _read(path, workload.result) if path is not None else None

    def keep_result(self, device: Device, workload: Workload[R], result: R) -> None:
        """Write a result, also for devices that are equal to this one.

        Beside its fields stands where and for what it was measured (`MeasuredOn`), which `result` ignores.
        """
        content = result.model_dump(mode="json")
        if workload.described is not None and (t := device.telemetry) is not None:
            measured_on = MeasuredOn(
                device=device.name, processor=t.cpu_model, num_threads=t.num_threads, compute_device=t.compute_device
            )
            content |= {"measured_on": measured_on.model_dump(), "subject": workload.described.model_dump(mode="json")}
        for path in (self.result_path(device, workload), self.path_of_equals(device, workload)):
            if path is not None:
                write_cached(path, json.dumps(content).encode())

    def link(self, pair: tuple[str, str], max_age_seconds: float = math.inf) -> Link | None:
        """The link between two device ids, if it is not older than that."""
        return _read(self._link_path(pair), Link, max_age_seconds)

    def keep_link(self, link: Link) -> None:
        write_cached(self._link_path((link.source, link.target)), link.model_dump_json().encode())

    def forget_link(self, pair: tuple[str, str]) -> None:
        remove_cached(self._link_path(pair))

    def media(self) -> KnownMedia | None:
        """The shared media, however old: what a link is made of changes rarely."""
        return _read(self._media_path, KnownMedia)

    def keep_media(self, known: KnownMedia) -> None:
        write_cached(self._media_path, known.model_dump_json().encode())

    @property
    def _media_path(self) -> Path:
        return _path(self.folder, "media")

    def result_path(self, device: Device, workload: Workload[R]) -> Path:
        """The file of a result on a device, with its present settings."""
        telemetry = device.telemetry
        settings = (telemetry.num_threads, telemetry.compute_device) if telemetry else ()
        return result_path(self.folder, workload, device.device_id, settings)

    def path_of_equals(self, device: Device, workload: Workload[R]) -> Path | None:
        """The file of the result that devices with the same hardware and settings share; None if they share none."""
        hardware = _hardware(device.telemetry)
        if hardware is None or not workload.shared:
            return None
        return _path(self.folder, f"{workload.cache_prefix}-equals", *workload.cache_key, hardware)

    def _link_path(self, pair: tuple[str, str]) -> Path:
        return _path(self.folder, "link", *pair)


def result_path(folder: Path, workload: Workload[R], device_id: str, settings: tuple[object, ...]) -> Path:
    """The file of a workload's result on a device; `settings`: its number of threads and its compute device."""
    return _path(folder, workload.cache_prefix, device_id, *workload.cache_key, settings)


def _hardware(telemetry: Telemetry | None) -> tuple[object, ...] | None:
    """What devices that compute equally fast have in common, as far as telemetry tells; None if it names no processor."""
    if telemetry is None or not telemetry.cpu_model:
        return None
    gpu = telemetry.gpu.name if telemetry.gpu is not None and telemetry.compute_device == "cuda" else ""
    memory_gib = round(telemetry.memory_total_bytes / (1 << 30))  # firmware leaves some MiB more or less
    processor = (telemetry.cpu_model, telemetry.num_cores, telemetry.num_threads)
    return (*processor, memory_gib, telemetry.compute_device, gpu)


def _path(folder: Path, kind: str, *parts: object) -> Path:
    key = json.dumps([_VERSION, *map(str, parts)])
    return folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _read(path: Path, kind: type[R], max_age_seconds: float = math.inf) -> R | None:
    """The content of a file; None if it is absent, invalid or too old."""
    try:
        if not math.isinf(max_age_seconds) and abs(time.time() - path.stat().st_mtime) >= max_age_seconds:
            return None  # the absolute value: the clock may have been set back
        return kind.model_validate_json(read_cached(path))
    except (OSError, ValidationError):
        return None
