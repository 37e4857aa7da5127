"""Profiling for transformers: measures the blocks of a layer on each device and builds the planner's cluster.

Profiles are smoothed: devices of one kind share a common profile, so that a point disturbed by background load is outvoted. A
planner takes every difference between devices as real. Four equal devices, each measured with an error of 10 to 20 %, would get
unequal shares, and all would wait for the one that seemed fastest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import BaseModel, ValidationError

from coordinator.devices.other_models import NOTHING_TAKEN, TakenByOthers, left_bytes, links_left
from coordinator.devices.profile_cache import MeasuredOn, Workload
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.models.cache_files import read_cached
from hearth.errors import UnsupportedWeights
from hearth.plan.kernels import KernelChoice, KernelTime, choose_kernels, chosen_bytes_per_weight
from hearth.plan.model_spec import INT4_MIN_CAPABILITY, ModelSpec
from hearth.plan.profile import BlockProfile, ClusterProfile, DeviceProfile, LatencyCurve
from hearth.wire.messages import BlocksOf, Profile, Telemetry

BLOCKS_PREFIX = "blocks"  # of the files of cached profiles
# Memory of onnxruntime in a worker: 37 MiB were measured for the library, onnx and one session (onnxruntime 1.31).
_ONNXRUNTIME_BYTES = 40 << 20
_KERNELS_VERSION = 4  # part of the cache key: profiles whose kernels were timed otherwise are measured again
# Timeout on the device: a slow one has to import torch, and to time kernels and the blocks of a wide layer.
_PROFILE_SECONDS = 180.0
_CURVES = ("qkv", "core", "out", "up", "down", "mlp_rows", "connective", "embedding")
_COMPARED_CURVES = _CURVES[:6]  # used to compare devices; the other curves are so short that noise is half of them
# Largest factor by which a curve may differ from the common shape: above the noise of a curve (10 to 20 %), below the
# difference between kinds of processor.
_MAX_LOG_MISFIT = math.log(1.3)
# Largest factor between devices that count as equally fast: within the error of a measurement.
_MAX_LOG_SPEED_DIFFERENCE = math.log(1.15)

_LogCurves = dict[str, list[float]]  # by curve: logarithms of seconds


def block_workload(spec: ModelSpec, seq_len: int, deterministic: bool = False) -> Workload[BlockProfile]:
    """The workload: the blocks of a layer, with up to `seq_len` rows. `deterministic`: as in `BlocksOf`."""

    def check(device: Device) -> None:
        if device.telemetry and spec.weights == "int4" and not _has_int4_kernel(device.telemetry):
            raise UnsupportedWeights(
                device=device.name, weights=spec.weights, compute_device=device.telemetry.compute_device
            )

    # Results depend on the shape, not on name or depth. Decoders are an exception: a shallow one may fit in the CPU cache.
    depth = set() if spec.causal else {"num_layers"}
    shape = spec.model_dump(exclude={"name", "vocab_size", "dtype"} | depth)
    subject = BlocksOf(model=spec, seq_len=seq_len, deterministic=deterministic)
    return Workload(
        title=spec.name,
        request=Profile(subject=subject, timeout_seconds=_PROFILE_SECONDS),
        probe=Profile(subject=subject.model_copy(update={"quick": True}), timeout_seconds=_PROFILE_SECONDS),
        described=subject,
        result=BlockProfile,
        cache_prefix=BLOCKS_PREFIX,
        cache_key=(shape, seq_len, _KERNELS_VERSION, deterministic),
        total_seconds=lambda blocks: blocks.attention(spec.num_heads) + blocks.mlp(spec.ffn_size),
        check=check,
        shared=True,
    )


def _has_int4_kernel(telemetry: Telemetry) -> bool:
    """Whether the device's worker may have one; with a GPU that reports no version, its profiler finds out."""
    version = telemetry.gpu.compute_capability if telemetry.gpu is not None else None
    return telemetry.compute_device == "cpu" or version is None or version >= INT4_MIN_CAPABILITY


async def block_cluster(
    profiler: Profiler,
    devices: Sequence[Device],
    workload: Workload[BlockProfile],
    taken: TakenByOthers = NOTHING_TAKEN,
) -> ClusterProfile:
    """Measure the devices and smooth their profiles.

    Budgets, times and links account for what other deployments take (`taken`).

    Raises as `Profiler.measure` does.
    """
    measured = await profiler.measure(devices, workload, taken.traffic)
    blocks = smooth_profiles(measured.results)
    subject = _subject(workload)
    return ClusterProfile(
        devices=tuple(
            DeviceProfile(
                device_id=device.device_id,
                name=device.name,
                budget_bytes=budget_for_layouts(left_bytes(device, taken), subject, measured.results[device.device_id]),
                blocks=blocks[device.device_id].scaled(profiler.slowdown(device.device_id) * taken(device).slowdown),
                store_room_bytes=device.store_room_bytes,
            )
            for device in measured.devices
        ),
        links=tuple(links_left(taken.traffic(), measured.links, measured.media).values()),
        media=measured.media,
    )


def chosen_kernels(cluster: ClusterProfile, workload: Workload[BlockProfile]) -> dict[str, tuple[KernelChoice, ...]]:
    """The kernels with which each device was profiled, by device id."""
    single = _subject(workload).deterministic
    return {device.device_id: choose_kernels(device.blocks.kernels, single) for device in cluster.devices}


def known_kernels(
    profiler: Profiler, devices: Iterable[Device], workload: Workload[BlockProfile]
) -> dict[str, tuple[KernelChoice, ...]]:
    """The kernels by earlier measurements, by device id, for a plan that was made without profiling now."""
    known = {device.device_id: profiler.known_result(device, workload) for device in devices}
    single = _subject(workload).deterministic
    return {device_id: choose_kernels(blocks.kernels, single) for device_id, blocks in known.items() if blocks}


def _subject(workload: Workload[BlockProfile]) -> BlocksOf:
    subject = workload.request.subject
    assert isinstance(subject, BlocksOf)
    return subject


def budget_for_layouts(budget_bytes: int, subject: BlocksOf, blocks: BlockProfile) -> int:
    """The budget for a plan, whose matrices count `ModelSpec.matrix_bytes`, although the chosen layouts take more.

    Never too much: all other memory counts as if it grew with the matrices.
    """
    choices = choose_kernels(blocks.kernels, subject.deterministic)
    if not any(choice.layout == "onnxruntime" for choice in choices):
        return budget_bytes
    growth = max(chosen_bytes_per_weight(blocks.kernels, choices) / subject.model.matrix_bytes, 1.0)
    return max(int((budget_bytes - _ONNXRUNTIME_BYTES) / growth), 0)


# ---- smoothing -------------------------------------------------------------------------------------------------------


def smooth_profiles(blocks: Mapping[str, BlockProfile]) -> dict[str, BlockProfile]:
    """Profiles by device id, with a common curve shape for devices that differ only by a speed factor.

    Devices whose factors are close get the same factor. A device of another kind keeps its own profile.
    """
    comparable: dict[object, list[str]] = defaultdict(list)
    for name, profile in blocks.items():
        sizes = tuple(_curve(profile, curve).sizes for curve in _CURVES)
        if all(second > 0 for curve in _CURVES for second in _curve(profile, curve).seconds):
            comparable[profile.seq_len, sizes].append(name)
    result = dict(blocks)
    for names in comparable.values():
        curves = {name: _log_curves(blocks[name]) for name in names}
        common = _common_curves(curves)
        curves = {name: own for name, own in curves.items() if _misfit(own, common) <= _MAX_LOG_MISFIT}
        if len(curves) > 1:
            common = _common_curves(curves)
            slowdowns = {name: _log_slowdown(own, common) for name, own in curves.items()}
            for name, factor in _speed_factors(slowdowns).items():
                result[name] = _with_curves(blocks[name], common, factor)
    return result


def _curve(profile: BlockProfile, name: str) -> LatencyCurve:
    curve = getattr(profile, name)
    assert isinstance(curve, LatencyCurve)
    return curve


def _log_curves(profile: BlockProfile) -> _LogCurves:
    return {name: [math.log(second) for second in _curve(profile, name).seconds] for name in _CURVES}


def _log_slowdown(own: _LogCurves, common: _LogCurves) -> float:
    """Logarithm of the factor by which a device is slower than `common`."""
    return median(a - b for name in _COMPARED_CURVES for a, b in zip(own[name], common[name], strict=True))


def _misfit(own: _LogCurves, common: _LogCurves) -> float:
    """Deviation of the worst-fitting curve from the common shape: the median over its points, as a logarithm."""
    slowdown = _log_slowdown(own, common)
    return max(
        abs(median(a - b for a, b in zip(own[name], common[name], strict=True)) - slowdown) for name in _COMPARED_CURVES
    )


def _common_curves(curves: Mapping[str, _LogCurves]) -> _LogCurves:
    """Point-wise median over all devices, after scaling each to the speed of the first."""
    first = next(iter(curves.values()))
    slowdowns = {name: _log_slowdown(own, first) for name, own in curves.items()}
    return {
        curve: [
            median(own[curve][index] - slowdowns[name] for name, own in curves.items()) for index in range(len(points))
        ]
        for curve, points in first.items()
    }


def _speed_factors(slowdowns: Mapping[str, float]) -> dict[str, float]:
    """Speed factors by device; devices within `_MAX_LOG_SPEED_DIFFERENCE` of each other get their geometric mean."""
    groups: list[list[str]] = []
    for name in sorted(slowdowns, key=lambda name: slowdowns[name]):
        if groups and slowdowns[name] - slowdowns[groups[-1][0]] <= _MAX_LOG_SPEED_DIFFERENCE:
            groups[-1].append(name)
        else:
            groups.append([name])
    return {name: math.exp(fmean(slowdowns[each] for each in group)) for group in groups for name in group}


def _with_curves(profile: BlockProfile, common: _LogCurves, factor: float) -> BlockProfile:
    def curve(name: str, logarithms: Sequence[float]) -> LatencyCurve:
        seconds = tuple(factor * math.exp(value) for value in logarithms)
        return _curve(profile, name).model_copy(update={"seconds": seconds})

    return profile.model_copy(update={name: curve(name, logarithms) for name, logarithms in common.items()})


# ---- kept times of kernels -------------------------------------------------------------------------------------------


class KernelTable(BaseModel, frozen=True):
    """The part of a kept profile that says how fast each kernel was on one device. Equal devices compute as fast."""

    measured_on: MeasuredOn
    subject: BlocksOf
    kernels: tuple[KernelTime, ...]

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        """The kernels with which such a device computes."""
        return choose_kernels(self.kernels, self.subject.deterministic)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.measured_on.model_dump(),
            "weights": self.subject.model.weights,
            "deterministic": self.subject.deterministic,
            "times": [time.model_dump() for time in self.kernels],
            "choices": [choice.model_dump() for choice in self.choices],
        }


def kept_kernel_tables(folder: Path) -> list[KernelTable]:
    """The newest table for each class of device, weight format and set of shapes, among the profiles in `folder`."""
    newest: dict[tuple[object, ...], KernelTable] = {}
    for path in sorted(folder.glob(f"{BLOCKS_PREFIX}-*.json"), key=lambda path: path.stat().st_mtime):
        try:
            table = KernelTable.model_validate_json(read_cached(path))
        except (OSError, ValidationError):  # of a version without this description, or no profile
            continue
        shapes = frozenset((time.num_outputs, time.num_inputs, time.rows) for time in table.kernels)
        hardware = table.measured_on.model_copy(update={"device": ""})
        if shapes:
            newest[hardware, table.subject.model.weights, table.subject.deterministic, shapes] = table
    return list(newest.values())
