"""What live devices take for each operator of a graph, and the links between them. Measures only what is not cached."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from coordinator.devices.fleet import Fleet
from coordinator.devices.profiling import Profiler, fully_linked, on_each
from coordinator.devices.registry import Device
from coordinator.models.graph_file import Graph
from coordinator.models.onnx.cutting import cut
from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster
from hearth.errors import BadMessage, NoDevices
from hearth.files import read_json, write_atomically
from hearth.plan.graph_spec import GraphSpec
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES
from hearth.wire.messages import GraphProfile, OperatorsOf, Profile, Profiled

_PROFILE_SECONDS = 240.0
_CACHE_VERSION = 1


class GraphProfiler:
    """Measures through a fleet, and keeps results under `cache_dir`; `links` measures and keeps those."""

    def __init__(self, fleet: Fleet, links: Profiler, cache_dir: Path, report: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._links = links
        self._cache_dir = cache_dir
        self._report = report

    async def cluster(self, devices: Sequence[Device], graph: Graph) -> GraphCluster:
        """The profile of these devices for this graph. A device that fails while it is measured is left out.

        Raises NoDevices when none is left; what went wrong, when it was the same everywhere.
        """
        await self._fleet.refresh_telemetry()
        devices = [self._fleet.devices[device.device_id] for device in devices]
        links = await self._links.measure_links(devices)
        profiles, failures = await on_each(devices, lambda device: self._profile(device, graph))
        if failures and not profiles:
            raise next(iter(failures.values()))
        for name, error in failures.items():
            self._report(f"{name} is left out: {error}")
        known = [device for device in devices if device.device_id in profiles and device.telemetry is not None]
        connected = fully_linked([device.device_id for device in known], links)
        known = [device for device in known if device.device_id in connected]
        if not known:
            raise NoDevices(seconds=0)
        ids = [device.device_id for device in known]
        per_device = [operator_seconds(graph.spec, profiles[each]) for each in ids]
        return GraphCluster(
            devices=tuple(
                ClusterDevice(
                    device_id=device.device_id,
                    name=device.name,
                    budget_bytes=device.telemetry.memory_budget_bytes if device.telemetry else 0,
                    process_bytes=profile.process_bytes,
                    load_bytes=profile.load_bytes,
                    loading_bytes=max(profile.peak_bytes - profile.process_bytes - profile.load_bytes, 0),
                    run_bytes=profile.run_bytes,
                    wire=profile.wire,
                )
                for device, profile in ((device, profiles[device.device_id]) for device in known)
            ),
            seconds=tuple(zip(*per_device, strict=True)),
            bytes_per_second=tuple(
                tuple(math.inf if a == b else links[a, b].bytes_per_second for b in ids) for a in ids
            ),
            latency_seconds=tuple(
                tuple(0.0 if a == b else links[a, b].round_trip_seconds / 2 for b in ids) for a in ids
            ),
            measured=True,
        )

    async def _profile(self, device: Device, graph: Graph) -> GraphProfile:
        telemetry = device.telemetry
        settings = (telemetry.num_threads, telemetry.compute_device) if telemetry else ()
        key = json.dumps([_CACHE_VERSION, device.device_id, graph.fingerprint, settings])
        path = self._cache_dir / f"graph-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        try:
            return GraphProfile.model_validate(read_json(path))
        except ValidationError:
            pass
        self._report(f"profiling {graph.spec.name} on {device.name}")
        reply = await self._fleet.call(
            device.device_id,
            Profile(subject=OperatorsOf(), timeout_seconds=_PROFILE_SECONDS),
            await asyncio.to_thread(_frames, graph),
            timeout_seconds=_PROFILE_SECONDS + 10.0,
        )
        if not isinstance(reply.message, Profiled) or not isinstance(reply.message.result, GraphProfile):
            raise BadMessage(reason=f"an agent answered Profile with {type(reply.message).__name__}")
        write_atomically(path, reply.message.result.model_dump_json())
        return reply.message.result


def _frames(graph: Graph) -> list[bytes]:
    """The graph without its weights."""
    from coordinator.models.onnx.segments import segment_model

    assert graph.model is not None
    (whole,) = cut(graph.spec, [0] * graph.spec.num_operators)
    proto = segment_model(graph.model, whole).proto
    return [proto[start : start + MAX_PAYLOAD_FRAME_BYTES] for start in range(0, len(proto), MAX_PAYLOAD_FRAME_BYTES)]


def operator_seconds(spec: GraphSpec, profiled: GraphProfile) -> tuple[float, ...]:
    """[n]: a kernel's seconds, shared out by FLOPs among the operators that it stands for.

    In all they are the seconds of a whole run: kernels of onnxruntime's own and what passes between kernels count with
    the operators, in proportion.
    """
    number = {operator.name: index for index, operator in enumerate(spec.operators)}
    found = [0.0] * spec.num_operators
    for kernel in profiled.kernels:
        own = [number[name] for name in kernel.operators if name in number]
        flops = sum(spec.operators[index].flops for index in own)
        for index in own:
            share = spec.operators[index].flops / flops if flops > 0 else 1 / len(own)
            found[index] += kernel.seconds * share
    total = sum(found)
    if total <= 0:  # too short for the profiler's clock
        return (profiled.run_seconds / spec.num_operators,) * spec.num_operators
    return tuple(seconds * profiled.run_seconds / total for seconds in found)
