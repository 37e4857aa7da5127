"""The graphs that a goal's plans may divide: that of the file, and the same in tiles. Each is measured on the devices.

To tile a graph of thousands of operators takes seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.deploy.graph import SegmentChunks
from coordinator.devices.graph_profiling import graph_cluster, graph_workload
from coordinator.devices.other_models import NOTHING_TAKEN, TakenByOthers
from coordinator.devices.profile_cache import Workload
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.models.graph_file import GraphFile
from coordinator.models.onnx.reader import OnnxModel
from coordinator.models.onnx.tiling.rewrite import tile
from coordinator.models.onnx.tiling.rules import index_spaces
from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster, graph_cluster_with_limits
from coordinator.plan.graph.tiles.choice import WEIGHTS_ARE_DEAR, choose_pieces, held_bytes
from coordinator.plan.graph.tiles.options import automatic_counts, check_can_cut, fixed_counts, piece_options
from coordinator.serve.kinds.measurements import FOLDER, Measurements
from coordinator.serve.state import GraphGoal, TileCount
from hearth.errors import BadPlan, BadSetting, CannotTile
from hearth.plan.graph import CutOperator
from hearth.plan.plan import GraphPlan
from hearth.platform.disk import FILE_SECONDS
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
        measured = graph.measurements
        if measured is not None:
            await measured.reading.settled(FILE_SECONDS)
        slowdown = self._profiler.slowdown if measured is None else lambda device_id: 1.0
        profiled = await graph_cluster(self._profiler, devices, graph.graph, graph.workload, slowdown, self._taken)
        return profiled if measured is None else measured.calibrated(profiled)

    def _served(self, graph: GraphFile) -> ServedGraph:
        path = self._folder / f"{graph.fingerprint[:24]}.json"
        measurements = Measurements(path, graph.spec, self._profiler.slowdown) if self._goal.learn else None
        return ServedGraph(graph, measurements)


# ---- tiling ------------------------------------------------------------------------------------------------------------


def check_can_tile(graph: GraphFile, tiles: TileCount) -> None:
    """Raise BadSetting for a graph that is no ONNX file, CannotTile for one that cannot be cut into this number of tiles."""
    if tiles == 1:
        return
    if graph.model is None:
        raise BadSetting(setting="--tiles", reason=f"{graph.path} is no ONNX file, and only those can be cut")
    if tiles != "auto":
        spaces, spec = index_spaces(graph.model), graph.spec
        check_can_cut(spec, spaces, piece_options(spec, spaces, [0.0] * spec.num_operators, 1, fixed_counts(tiles)))


def tiled_for(graph: GraphFile, cluster: GraphCluster, tiles: TileCount) -> GraphFile:
    """The graph in tiles for these devices: `tiles` of each product of matrices, or with `auto` as many as are worth it.

    A graph that is not worth cutting is returned as it is.
    """
    model, num_devices = graph.model, len(cluster.devices)
    if model is None or tiles == 1 or (tiles == "auto" and num_devices == 1):
        return graph
    counts = automatic_counts(num_devices) if tiles == "auto" else fixed_counts(tiles)
    spaces = index_spaces(model)
    options = piece_options(model.spec, spaces, [max(row) for row in cluster.seconds], num_devices, counts)
    pieces = choose_pieces(model.spec, spaces, options, num_devices)
    weights = model.spec.parameter_bytes(range(model.spec.num_operators))
    rooms = sum(device.room_bytes(weights) for device in cluster.devices)
    if held_bytes(model.spec, spaces, pieces, num_devices) > rooms:  # tiles of rows copy the weights to every device
        pieces = choose_pieces(model.spec, spaces, options, num_devices, WEIGHTS_ARE_DEAR)
    return _with_model(graph, tile(model, pieces))


def tiled_as(graph: GraphFile, tiles: Iterable[CutOperator]) -> GraphFile:
    """The graph in the tiles of a plan. Raises BadPlan if they do not fit the graph."""
    if graph.model is None:
        return graph
    try:
        return _with_model(graph, tile(graph.model, {cut.operator: cut.pieces for cut in tiles}))
    except CannotTile as error:
        raise BadPlan(reason=f"its tiles do not fit {graph.path}: {error.explanation()}") from None


def _with_model(graph: GraphFile, model: OnnxModel) -> GraphFile:
    return graph if model is graph.model else replace(graph, spec=model.spec, model=model)
