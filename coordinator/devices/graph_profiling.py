"""Profiling for ONNX graphs: measures every operator on each device and builds the planner's cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.devices.other_models import NOTHING_TAKEN, TakenByOthers, left_bytes, links_left
from coordinator.devices.profile_cache import Workload
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.models.graph_file import GraphFile
from coordinator.models.onnx.cutting import cut
from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster, cluster_from_links
from hearth.plan.graph_spec import GraphSpec
from hearth.platform.network import interfaces
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES
from hearth.wire.messages import GraphProfile, OperatorsOf, Profile

_PROFILE_SECONDS = 240.0  # timeout on the device: longer than for the blocks of one layer, since whole graphs are run


def graph_workload(graph: GraphFile) -> Workload[GraphProfile]:
    """The workload: all operators of a graph, sent without its weights."""
    return Workload(
        title=graph.spec.name,
        request=Profile(subject=OperatorsOf(), timeout_seconds=_PROFILE_SECONDS),
        result=GraphProfile,
        cache_prefix="graph",
        cache_key=(graph.fingerprint,),
        total_seconds=lambda profile: profile.run_seconds,
        frames=lambda: _frames(graph),
        path=graph.path,
    )


async def graph_cluster(
    profiler: Profiler,
    devices: Sequence[Device],
    graph: GraphFile,
    workload: Workload[GraphProfile],
    slowdown: Callable[[str], float] | None = None,
    taken: TakenByOthers = NOTHING_TAKEN,
) -> GraphCluster:
    """Measure the devices and price every operator. `slowdown`: a factor on the seconds of a device (default: its drift).

    Budgets, times and links account for what other deployments take (`taken`).

    Raises as `Profiler.measure` does.
    """
    slowdown = slowdown or profiler.slowdown
    measured = await profiler.measure(devices, workload, taken.traffic)
    profiles = [(device, measured.results[device.device_id]) for device in measured.devices]
    per_device = [
        [
            slowdown(device.device_id) * taken(device).slowdown * seconds
            for seconds in operator_seconds(graph.spec, profile)
        ]
        for device, profile in profiles
    ]
    seconds = tuple(zip(*per_device, strict=True))
    here = {each.address for each in interfaces()}
    return cluster_from_links(
        [_device(device, profile, left_bytes(device, taken), device.host in here) for device, profile in profiles],
        seconds,
        links_left(taken.traffic(), measured.links, measured.media),
        measured=True,
        media=measured.media,
    )


def _device(device: Device, profile: GraphProfile, budget_bytes: int, with_coordinator: bool) -> ClusterDevice:
    return ClusterDevice(
        device_id=device.device_id,
        name=device.name,
        budget_bytes=budget_bytes,
        process_bytes=profile.process_bytes,
        load_bytes=profile.load_bytes,
        loading_bytes=max(profile.peak_bytes - profile.process_bytes - profile.load_bytes, 0),
        run_bytes=profile.run_bytes,
        wire=profile.wire,
        store_room_bytes=device.store_room_bytes,
        with_coordinator=with_coordinator,
    )


def _frames(graph: GraphFile) -> list[bytes]:
    """The ONNX protobuf of the graph without its weights, cut into payload frames."""
    from coordinator.models.onnx.segments import segment_model

    assert graph.model is not None
    (whole,) = cut(graph.spec, [0] * graph.spec.num_operators)
    proto = segment_model(graph.model, whole).proto
    return [proto[start : start + MAX_PAYLOAD_FRAME_BYTES] for start in range(0, len(proto), MAX_PAYLOAD_FRAME_BYTES)]


def operator_seconds(spec: GraphSpec, profiled: GraphProfile) -> tuple[float, ...]:
    """Seconds of each operator [n]: the time of a kernel is split by FLOPs among the operators fused into it.

    Scaled so that the sum is the time of a whole run: kernels that onnxruntime inserts and time between kernels are
    spread over all operators in proportion.
    """
    number = {operator.name: index for index, operator in enumerate(spec.operators)}
    seconds_of = [0.0] * spec.num_operators
    for kernel in profiled.kernels:
        operators = [number[name] for name in kernel.operators if name in number]
        flops = sum(spec.operators[index].flops for index in operators)
        for index in operators:
            share = spec.operators[index].flops / flops if flops > 0 else 1 / len(operators)
            seconds_of[index] += kernel.seconds * share
    total = sum(seconds_of)
    if total <= 0:  # too short for the resolution of the profiler's clock
        return (profiled.run_seconds / spec.num_operators,) * spec.num_operators
    return tuple(seconds * profiled.run_seconds / total for seconds in seconds_of)
