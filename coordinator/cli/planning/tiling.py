"""Cut a graph into tiles for given devices."""

from __future__ import annotations

from coordinator.models.onnx.reader import OnnxModel
from coordinator.models.onnx.tiling.rewrite import tile
from coordinator.models.onnx.tiling.rules import index_spaces
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.tiles.choice import WEIGHTS_ARE_DEAR, choose_pieces, held_bytes
from coordinator.plan.graph.tiles.options import automatic_counts, check_can_cut, fixed_counts, piece_options
from hearth.errors import BadSetting

MAX_TILES = 64  # of one operator; plans of larger graphs take minutes


def num_tiles(setting: str) -> int | None:
    """The number of tiles of an operator in `--tiles`: None for `auto`, 1 for `off`. Raises BadSetting."""
    if setting in ("auto", "off"):
        return None if setting == "auto" else 1
    if not setting.isdecimal() or not 1 <= int(setting) <= MAX_TILES:
        raise BadSetting(setting="--tiles", reason=f"'{setting}' is not auto, off, or a number from 1 to {MAX_TILES}")
    return int(setting)


def tiled_for(model: OnnxModel, cluster: GraphCluster, tiles: int | None) -> OnnxModel:
    """The model in tiles for these devices: `tiles` of each product of matrices, or with None as many as are worth it.

    With None, a model that is not worth cutting is returned as it is. Otherwise raises CannotTile for one that cannot be cut.
    """
    num_devices = len(cluster.devices)
    if tiles == 1 or (tiles is None and num_devices == 1):
        return model
    counts = automatic_counts(num_devices) if tiles is None else fixed_counts(tiles)
    spaces = index_spaces(model)
    options = piece_options(model.spec, spaces, [max(row) for row in cluster.seconds], num_devices, counts)
    if tiles is not None:
        check_can_cut(model.spec, spaces, options)
    pieces = choose_pieces(model.spec, spaces, options, num_devices)
    weights = model.spec.parameter_bytes(range(model.spec.num_operators))
    rooms = sum(device.room_bytes(weights) for device in cluster.devices)
    if held_bytes(model.spec, spaces, pieces, num_devices) > rooms:  # tiles of rows copy the weights to every device
        pieces = choose_pieces(model.spec, spaces, options, num_devices, WEIGHTS_ARE_DEAR)
    return tile(model, pieces)
