"""A graph in tiles: cut for given devices, or as a plan says. Takes seconds for a graph of thousands of operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from coordinator.models.graph_file import GraphFile
from coordinator.models.onnx.reader import OnnxModel
from coordinator.models.onnx.tiling.rewrite import tile
from coordinator.models.onnx.tiling.rules import index_spaces
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.tiles.choice import WEIGHTS_ARE_DEAR, choose_pieces, held_bytes
from coordinator.plan.graph.tiles.options import automatic_counts, check_can_cut, fixed_counts, piece_options
from coordinator.serve.state import TileCount
from hearth.errors import BadPlan, BadSetting, CannotTile
from hearth.plan.graph import CutOperator


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
