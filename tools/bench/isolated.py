"""Steps of one rank without its peers: its computations, on made-up tiles that are there at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agent.worker.transformer.comm.collectives import Collectives
from agent.worker.transformer.comm.communicator import Communicator
from agent.worker.transformer.comm.staging import CpuStaging, WireTile
from agent.worker.transformer.engine import EncoderEngine
from agent.worker.transformer.generation.steps import StepExecutor
from agent.worker.transformer.shard import Shard
from hearth.plan.phases import Phase
from hearth.plan.plan import TransformerPlan
from hearth.transport.base import Transport
from hearth.wire.codec import Array, Conversions
from hearth.wire.framing import TileKey

# Stands for anything that a peer would send. As candidates for the next token, it is token 0; tiles do not read it.
_MADE_UP = np.zeros((1, 2), np.float32)


def isolated_engine(
    plan: TransformerPlan, rank: int, shard: Shard, transport: Transport, epoch: int, token: bytes
) -> EncoderEngine:
    """An engine whose steps compute all that this rank computes in a step, exchange nothing, and wait for nothing.

    Their output is meaningless. Of `transport` only the ranks are used.
    """
    return EncoderEngine(plan, rank, shard, _NoPeers(transport, epoch, token, {}), CpuStaging(), _MadeUpTiles)


def isolated_executor(
    plan: TransformerPlan, rank: int, shard: Shard, transport: Transport, epoch: int, token: bytes
) -> StepExecutor:
    """A `StepExecutor` whose steps compute all that this rank computes in a step of generation, and exchange nothing.

    Each rank begins its own steps. KV caches are not copied to other ranks.
    """
    assert plan.body.generation is not None
    limits = plan.body.generation.model_copy(update={"kv_copies": False})
    plan = plan.model_copy(update={"body": plan.body.model_copy(update={"generation": limits})})
    communicator = _NoPeers(transport, epoch, token, {})
    return StepExecutor(plan, rank, shard, communicator, CpuStaging(), collectives=_MadeUpTiles)


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

    def one_shot_all_reduce(
        self, layer: int, phase: Phase, own_BH: Tensor | None, sources: Sequence[int], like_BH: Tensor
    ) -> Tensor:
        return torch.ones_like(like_BH)

    def _write_tile(self, tile: WireTile, into: Tensor, add: bool = False) -> None:
        (into.add_ if add else into.fill_)(1.0)
