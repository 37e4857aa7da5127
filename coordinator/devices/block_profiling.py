"""Profiling for transformers: measures the blocks of a layer on each device and builds the planner's cluster."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.devices.profile_smoothing import smooth_profiles
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.devices.workload import Workload
from hearth.errors import UnsupportedWeights
from hearth.plan.model_spec import INT4_DEVICES, ModelSpec
from hearth.plan.profile import BlockProfile, ClusterProfile, DeviceProfile
from hearth.wire.messages import BlocksOf, Profile

_PROFILE_SECONDS = 140.0  # timeout on the device: a slow one has to import torch and time the blocks of a wide layer


def block_workload(spec: ModelSpec, seq_len: int) -> Workload[BlockProfile]:
    """The workload: the blocks of a layer, with up to `seq_len` rows."""

    def check(device: Device) -> None:
        if device.telemetry and spec.weights == "int4" and device.telemetry.compute_device not in INT4_DEVICES:
            raise UnsupportedWeights(
                device=device.name, weights=spec.weights, compute_device=device.telemetry.compute_device
            )

    # Results depend on the shape, not on name or depth. Decoders are an exception: a shallow one may fit in the CPU cache.
    depth = set() if spec.causal else {"num_layers"}
    shape = spec.model_dump(exclude={"name", "vocab_size", "dtype"} | depth)
    return Workload(
        title=spec.name,
        request=Profile(subject=BlocksOf(model=spec, seq_len=seq_len), timeout_seconds=_PROFILE_SECONDS),
        result=BlockProfile,
        cache_prefix="blocks",
        cache_key=(shape, seq_len),
        total_seconds=lambda blocks: blocks.attention(spec.num_heads) + blocks.mlp(spec.ffn_size),
        check=check,
        shared=True,
    )


async def block_cluster(
    profiler: Profiler, devices: Sequence[Device], workload: Workload[BlockProfile]
) -> ClusterProfile:
    """Measure the devices and smooth their profiles. Raises as `Profiler.measure` does."""
    measured = await profiler.measure(devices, workload)
    blocks = smooth_profiles(measured.results)
    return ClusterProfile(
        devices=tuple(
            DeviceProfile(
                device_id=device.device_id,
                name=device.name,
                budget_bytes=device.budget_bytes,
                blocks=blocks[device.device_id].scaled(profiler.slowdown(device.device_id)),
                store_room_bytes=device.store_room_bytes,
            )
            for device in measured.devices
        ),
        links=tuple(measured.links.values()),
    )
