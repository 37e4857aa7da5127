"""Profiling for transformers: measures the blocks of a layer on each device and builds the planner's cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.devices.other_models import NOTHING_TAKEN, TakenByOthers, left_bytes
from coordinator.devices.profile_smoothing import smooth_profiles
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.devices.workload import Workload
from hearth.errors import UnsupportedWeights
from hearth.plan.kernels import KernelChoice, choose_kernels, chosen_bytes_per_weight
from hearth.plan.model_spec import INT4_MIN_CAPABILITY, ModelSpec
from hearth.plan.profile import BlockProfile, ClusterProfile, DeviceProfile
from hearth.wire.messages import BlocksOf, Profile, Telemetry

BLOCKS_PREFIX = "blocks"  # of the files of cached profiles
# Memory of onnxruntime in a worker: 37 MiB were measured for the library, onnx and one session (onnxruntime 1.31).
_ONNXRUNTIME_BYTES = 40 << 20
_KERNELS_VERSION = 4  # part of the cache key: profiles whose kernels were timed otherwise are measured again
# Timeout on the device: a slow one has to import torch, and to time kernels and the blocks of a wide layer.
_PROFILE_SECONDS = 180.0


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
        links=tuple(taken.links_left(measured.links, measured.media).values()),
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
