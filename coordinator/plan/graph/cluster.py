"""The devices that a graph is planned for: memory, seconds per operator, links. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations

from coordinator.plan.limits import MemoryLimit, limited_budgets
from hearth.plan.plan import GraphPlan, Plan
from hearth.plan.profile import Link, SharedMedium, WireCost, media_between, media_of

FloatTable = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ClusterDevice:
    """Memory of one device, in bytes. A worker may hold `budget_bytes`; of those, `reserved_bytes` are not for weights.

    `store_room_bytes`: the weights that its store can take besides those of deployed plans; None: not known, no limit.
    `with_coordinator`: the coordinator runs on the same machine.
    """

    device_id: str
    name: str
    budget_bytes: int
    reserved_bytes: int = 0
    process_bytes: int = 0  # a worker that holds no model
    load_bytes: int = 0  # the whole graph once loaded; more than its file where kernels repack weights
    loading_bytes: int = 0  # temporary, while the graph is loaded
    run_bytes: int = 0  # on top of `load_bytes`, while the graph runs
    wire: WireCost = field(default_factory=WireCost)
    store_room_bytes: int | None = None
    with_coordinator: bool = False

    def room_bytes(self, graph_bytes: int) -> int:
        """Room for weights, in bytes as they are in the file; `graph_bytes` is the weight size of the whole graph.

        Loading them takes memory in proportion to what is loaded at once: at most all weights of the device.
        """
        factor = max(self.load_bytes / graph_bytes, 1.0) + self.loading_bytes / graph_bytes if graph_bytes else 1.0
        return int(max(self.budget_bytes - self.reserved_bytes, 0) / factor)


@dataclass(frozen=True)
class GraphCluster:
    """K devices, as the planner of a graph of n operators sees them.

    `seconds` [n][K]; `bytes_per_second` [K][K] from row to column, infinite on the diagonal; `latency_seconds` [K][K] of
    the first byte. `measured`: the devices are live, and all memory of a worker counts. Otherwise only weights count, as
    in the papers.
    """

    devices: tuple[ClusterDevice, ...]
    seconds: FloatTable
    bytes_per_second: FloatTable
    latency_seconds: FloatTable
    measured: bool = False
    media: tuple[SharedMedium, ...] = ()

    @cached_property
    def media_crossed(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[K][K]: the numbers of the shared media that a transfer crosses; on the diagonal those of the device."""
        ids = [device.device_id for device in self.devices]
        return tuple(tuple(media_between(self.media, a, b) for b in ids) for a in ids)

    @cached_property
    def coordinator_device(self) -> int | None:
        """The first device on the coordinator's machine, whose links are the coordinator's; None if there is none."""
        return next((index for index, device in enumerate(self.devices) if device.with_coordinator), None)

    def with_reserved_bytes(self, reserved_bytes: Sequence[int]) -> GraphCluster:
        devices = tuple(
            replace(device, reserved_bytes=reserved)
            for device, reserved in zip(self.devices, reserved_bytes, strict=True)
        )
        return replace(self, devices=devices)

    def rank_devices(self, plan: GraphPlan) -> list[int]:
        """For each rank of the plan, the index of its device in this cluster."""
        index = {device.device_id: index for index, device in enumerate(self.devices)}
        return [index[device.device_id] for device in plan.devices]

    def links(self) -> tuple[Link, ...]:
        """Every ordered pair of devices."""
        ids = [device.device_id for device in self.devices]
        return tuple(
            Link(
                source=ids[a],
                target=ids[b],
                bytes_per_second=self.bytes_per_second[a][b],
                round_trip_seconds=2 * self.latency_seconds[a][b],
            )
            for a, b in permutations(range(len(ids)), 2)
        )

    def subset(self, device_ids: Sequence[str]) -> GraphCluster:
        """The same cluster with only these devices, in this order."""
        index = {device.device_id: index for index, device in enumerate(self.devices)}
        chosen = [index[each] for each in device_ids]

        def columns(row: Sequence[float]) -> tuple[float, ...]:
            return tuple(row[each] for each in chosen)

        return replace(
            self,
            devices=tuple(self.devices[each] for each in chosen),
            seconds=tuple(map(columns, self.seconds)),
            bytes_per_second=tuple(columns(self.bytes_per_second[each]) for each in chosen),
            latency_seconds=tuple(columns(self.latency_seconds[each]) for each in chosen),
            media=media_of(self.media, device_ids),
        )


def cluster_from_links(
    devices: Sequence[ClusterDevice],
    seconds: FloatTable,
    links: Mapping[tuple[str, str], Link],
    measured: bool,
    media: Sequence[SharedMedium] = (),
) -> GraphCluster:
    """A cluster whose links are given by (source, target); `seconds` [n][K]."""
    ids = [device.device_id for device in devices]
    return GraphCluster(
        devices=tuple(devices),
        seconds=seconds,
        bytes_per_second=tuple(tuple(math.inf if a == b else links[a, b].bytes_per_second for b in ids) for a in ids),
        latency_seconds=tuple(tuple(0.0 if a == b else links[a, b].round_trip_seconds / 2 for b in ids) for a in ids),
        measured=measured,
        media=media_of(media, ids),
    )


def graph_cluster_with_limits(
    cluster: GraphCluster, limits: Sequence[MemoryLimit], deployed: Plan | None = None
) -> GraphCluster:
    """The cluster with the budgets that `coordinator.plan.limits.limited_budgets` computes."""
    budgets = limited_budgets(cluster.devices, limits, deployed)
    return replace(
        cluster, devices=tuple(replace(each, budget_bytes=budgets[each.device_id]) for each in cluster.devices)
    )
