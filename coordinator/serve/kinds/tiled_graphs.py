"""The graphs that a goal's plans may divide: that of the file, and the same in tiles. Each is measured on the devices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.deploy.graph_chunks import SegmentChunks
from coordinator.devices.graph_profiling import graph_cluster, graph_workload
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.devices.taken import NOTHING_TAKEN, TakenByOthers
from coordinator.devices.workload import Workload
from coordinator.models.graph_file import GraphFile
from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster, graph_cluster_with_limits
from coordinator.serve.kinds.measurements import FOLDER, Measurements
from coordinator.serve.planning.tiling import check_can_tile, tiled_as, tiled_for
from coordinator.serve.state import GraphGoal
from hearth.errors import BadPlan
from hearth.plan.graph import CutOperator
from hearth.plan.plan import GraphPlan
from hearth.wire.messages import GraphProfile


class ServedGraph:
    """A graph with what its plans need: the workload that devices measure, and the chunks that they store.

    `measurements`: of its requests; None without calibration.
    """

    def __init__(self, graph: GraphFile, measurements: Measurements | None) -> None:
        self.graph = graph
        self.measurements = measurements
        self.workload: Workload[GraphProfile] = graph_workload(graph)
        self.chunks = SegmentChunks(graph)


@dataclass(frozen=True)
class MeasuredGraphs:
    """The planner's input: the graphs of which the best plan is wanted, each with the devices as measured for it."""

    options: tuple[tuple[ServedGraph, GraphCluster], ...]

    @property
    def devices(self) -> tuple[ClusterDevice, ...]:
        """The devices for the first graph, which is that of the deployed plan if there is one."""
        return self.options[0][1].devices


class TiledGraphs:
    """`whole` and its tilings, each made once. Raises CannotTile if the goal asks for tiles that `whole` cannot have."""

    def __init__(
        self,
        goal: GraphGoal,
        whole: GraphFile,
        profiler: Profiler,
        state_dir: Path,
        taken: TakenByOthers = NOTHING_TAKEN,
    ) -> None:
        check_can_tile(whole, goal.tiles)
        self._goal, self._profiler, self._folder = goal, profiler, state_dir / FOLDER
        self._taken = taken
        self.whole = self._served(whole)
        self._made: dict[tuple[CutOperator, ...], ServedGraph] = {(): self.whole}

    def of(self, plan: GraphPlan) -> ServedGraph:
        """The graph that a plan divides. Raises BadPlan if it is another one."""
        tiles = plan.model.tiles
        made = self._made.get(tiles) or self._served(tiled_as(self.whole.graph, tiles))
        if plan.model.sha256 != made.graph.fingerprint:
            raise BadPlan(reason=f"it was made for another graph than {self._goal.model_file}")
        return self._made.setdefault(tiles, made)

    async def measure(
        self, devices: Sequence[Device], deployed: GraphPlan | None = None, recut: bool = False
    ) -> MeasuredGraphs:
        """Measure the devices on the graph of the deployed plan; without one, or with `recut`, on those cut for them.

        After a loss, the same tiles are placed again, since the devices that are left store most of them. Raises NoDevices, ...
        """
        graphs = [] if deployed is None else [self.of(deployed)]
        options = [(each, await self._cluster(each, devices)) for each in graphs]
        if deployed is None or recut:
            options += [each for each in await self._cut_for(devices) if each[0] not in graphs]
        return MeasuredGraphs(tuple(options))

    async def _cut_for(self, devices: Sequence[Device]) -> list[tuple[ServedGraph, GraphCluster]]:
        """The graph in the tiles that the goal asks for, on these devices; with `auto`, after the whole graph."""
        whole = await self._cluster(self.whole, devices)
        limited = graph_cluster_with_limits(whole, self._goal.limits)
        graph = await asyncio.to_thread(tiled_for, self.whole.graph, limited, self._goal.tiles)
        if graph is self.whole.graph:
            return [(self.whole, whole)]
        if graph.tiles not in self._made:
            self._made[graph.tiles] = self._served(graph)
        tiled = self._made[graph.tiles]
        option = (tiled, await self._cluster(tiled, devices))
        return [(self.whole, whole), option] if self._goal.tiles == "auto" else [option]

    async def _cluster(self, graph: ServedGraph, devices: Sequence[Device]) -> GraphCluster:
        if (measured := graph.measurements) is None:
            return await graph_cluster(self._profiler, devices, graph.graph, graph.workload, taken=self._taken)
        profiled = await graph_cluster(
            self._profiler, devices, graph.graph, graph.workload, lambda device_id: 1.0, self._taken
        )
        return measured.calibrated(profiled)

    def _served(self, graph: GraphFile) -> ServedGraph:
        path = self._folder / f"{graph.fingerprint[:24]}.json"
        measurements = Measurements(path, graph.spec, self._profiler.slowdown) if self._goal.learn else None
        return ServedGraph(graph, measurements)
