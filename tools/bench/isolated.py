"""Steps of one rank without its peers: its computations, on made-up tiles that are there at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from agent.worker.transformer.comm.collectives import Collectives
from agent.worker.transformer.comm.communicator import Communicator
from agent.worker.transformer.comm.staging import CpuStaging, WireTile
from agent.worker.transformer.engine import EncoderEngine
from agent.worker.transformer.shard import Shard
from hearth.plan.plan import TransformerPlan
from hearth.transport.base import Transport
from hearth.wire.codec import Array, Conversions
from hearth.wire.framing import TileKey

_MADE_UP = np.zeros(1, np.float32)  # stands for anything that a peer would send; tiles do not read it


def isolated_engine(
    plan: TransformerPlan, rank: int, shard: Shard, transport: Transport, epoch: int, token: bytes
) -> EncoderEngine:
    """An engine whose steps compute all that this rank computes in a step, exchange nothing, and wait for nothing.

    Their output is meaningless. Of `transport` only the ranks are used.
    """
    return EncoderEngine(plan, rank, shard, _NoPeers(transport, epoch, token, {}), CpuStaging(), _MadeUpTiles)


class _NoPeers(Communicator):
    """Sends nothing; `_MADE_UP` has arrived in place of everything that peers would send."""

    def send(self, target: int, key: TileKey, tile: Array, converted: Conversions | None = None) -> None:
        """Drop the tile."""

    def reduce(self, key: TileKey, partial: Array) -> None:
        """Drop the partial sum."""

    def has_arrived(self, keys: Sequence[TileKey]) -> bool:
        return True

    def receive(self, keys: Sequence[TileKey]) -> list[Array]:
        return [_MADE_UP] * len(keys)

    def receive_first(self, groups: Sequence[Sequence[TileKey]]) -> tuple[int, list[Array]]:
        return 0, self.receive(groups[0])


class _MadeUpTiles(Collectives):
    """Writes a tile's values as the staging would, but all are 1: what memory holds by chance can be slow to compute with."""

    def _write_tile(self, tile: WireTile, into: Tensor, add: bool = False) -> None:
        (into.add_ if add else into.fill_)(1.0)
