"""Deployments of transformers: their weights, steps (one at a time) and concurrent text generations."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from coordinator.deploy.chunk_scheduler import Chunk
from coordinator.deploy.deployment import Deployment, Kept, RunResult, Weights
from coordinator.deploy.kept_caches import kept_caches, kept_prefixes
from coordinator.devices.fleet import Fleet
from coordinator.models.checkpoint.checkpoint import COPY_MARKER, Checkpoint
from coordinator.models.checkpoint.chunk_layout import chunks_for_rank
from coordinator.models.checkpoint.sharding import cached_manifest, chunk_bytes
from hearth.errors import BadCheckpoint, BadMessage, ConnectionLost, DeviceLost, HearthError
from hearth.plan.common import ValueFormatName
from hearth.plan.kernels import KernelChoice
from hearth.plan.layer import LAYER_CHUNK_KINDS
from hearth.plan.plan import DRAFT_RANK, TransformerPlan, draft_plan
from hearth.plan.profile import Link
from hearth.platform.disk import FILE_SECONDS, on_disk, read_seconds
from hearth.protocol import DEFAULT_DEPLOYMENT, coordinator_run_seconds
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array
from hearth.wire.rpc import Reply

log = logging.getLogger(__name__)


async def shard_weights(
    model_dir: Path,
    plan: TransformerPlan,
    cache_dir: Path,
    kernels: Mapping[str, tuple[KernelChoice, ...]] = MappingProxyType({}),
    vocabulary: Callable[[], bytes | None] = lambda: None,
    draft_dir: Path | None = None,
) -> Weights:
    """The weight chunks of every rank's shard, and its kernels (by device id; without: the worker's defaults).

    `vocabulary`: the tokens, for grammars; ranks that hold rows of the vocabulary get them as one chunk more. `draft_dir`:
    directory of the plan's draft model, if it has one. Raises BadCheckpoint, DiskHung.
    """
    shards = await _chunks_by_rank(model_dir, plan, cache_dir)
    draft: list[_ShardChunk] = []
    if (alone := draft_plan(plan)) is not None and draft_dir is not None:
        (draft,) = await _chunks_by_rank(draft_dir, alone, cache_dir)
    drafts = [draft if rank == DRAFT_RANK else [] for rank in range(plan.num_ranks)]
    tokens = await on_disk(model_dir, FILE_SECONDS, vocabulary)
    tokens_chunks = [_vocabulary_chunk(tokens, model_dir)] if tokens is not None else []
    of_tokens = [tokens_chunks if rows else [] for rows in plan.body.vocabulary]
    return Weights(
        [
            [*(each.chunk for each in (*own, *guessing)), *words]
            for own, guessing, words in zip(shards, drafts, of_tokens, strict=True)
        ],
        [
            wire.ShardParts(
                chunks=tuple(each.ref for each in own),
                kernels=kernels.get(device.device_id, ()),
                vocabulary=words[0].hash if words else None,
                draft_chunks=tuple(each.ref for each in guessing),
            )
            for device, own, guessing, words in zip(plan.devices, shards, drafts, of_tokens, strict=True)
        ],
    )


class _ShardChunk(NamedTuple):
    """A chunk of a rank's shard, and how it is read."""

    ref: wire.ChunkRef
    chunk: Chunk


async def _chunks_by_rank(model_dir: Path, plan: TransformerPlan, cache_dir: Path) -> list[list[_ShardChunk]]:
    """The chunks of every rank's shard of one model."""

    def opened() -> tuple[Checkpoint, int, bool]:
        checkpoint = Checkpoint(model_dir)
        num_bytes = sum(file.stat().st_size for file in checkpoint.files)
        return checkpoint, num_bytes, (model_dir.parent / COPY_MARKER).exists()

    checkpoint, num_bytes, is_copy = await on_disk(model_dir, FILE_SECONDS, opened)
    manifest = await on_disk(model_dir, read_seconds(num_bytes), cached_manifest, checkpoint, plan.model, cache_dir)

    def chunk(ref: wire.ChunkRef) -> _ShardChunk:
        read = partial(chunk_bytes, checkpoint, plan.model, ref.kind, ref.layer, ref.grain)
        if is_copy:
            read = partial(_refuse_to_read, model_dir, ref)
        return _ShardChunk(ref, Chunk(ref.hash, ref.num_bytes, read, str(model_dir)))

    return [list(map(chunk, chunks_for_rank(manifest, plan, rank))) for rank in range(plan.num_ranks)]


def _vocabulary_chunk(tokens: bytes, model_dir: Path) -> Chunk:
    return Chunk(hashlib.sha256(tokens).hexdigest(), len(tokens), lambda: tokens, str(model_dir))


def _refuse_to_read(model_dir: Path, ref: wire.ChunkRef) -> bytes:
    where = f"layer {ref.layer}" if ref.kind in LAYER_CHUNK_KINDS else ref.kind
    reason = f"it is a standby's copy without weights, and no device holds the chunk {ref.hash[:12]} of {where}"
    raise BadCheckpoint(path=str(model_dir), reason=reason)


class TransformerDeployment(Deployment):
    """The caller must run steps one at a time; generations may run concurrently."""

    plan: TransformerPlan

    def __init__(self, fleet: Fleet, plan: TransformerPlan, name: str = DEFAULT_DEPLOYMENT) -> None:
        super().__init__(fleet, plan, name)
        self.values: ValueFormatName | None = None  # format of activations; None: the plan's

    @property
    def ends_requests_alone(self) -> bool:
        """Decoders: the agent ends the streams, rank 0 their sequences. An abort would end the plan."""
        return self.plan.body.generation is not None

    def _kept_caches(self, workers: Sequence[wire.WorkerBound], links: Mapping[tuple[str, str], Link]) -> Kept:
        """The KV caches that the workers have kept of the plan before, and that are whole."""
        ids = [device.device_id for device in self.plan.devices]

        def bytes_per_second(source: int, target: int) -> float:
            return links[ids[source], ids[target]].bytes_per_second

        caches = kept_caches(self.plan, [worker.caches for worker in workers], bytes_per_second)
        for cache in caches:
            log.info("%d tokens of the KV cache of a stream are kept", cache.num_rows)
        return Kept(caches, kept_prefixes(self.plan, [worker.prefixes for worker in workers], bytes_per_second))

    async def run_step(
        self,
        token_ids: np.ndarray[Any, Any],
        cumulative_lengths: np.ndarray[Any, Any],
        output: Literal["hidden", "mean"],
        trace: bool = False,
        values: ValueFormatName | None = None,
    ) -> RunResult[np.ndarray[Any, Any]]:
        """Run one forward pass on all ranks. Raises as `run` does.

        The outputs are hidden states [T,H] for "hidden", and row sums of each sequence [N,H] for "mean".
        """

        def join(arrays: Sequence[dict[str, np.ndarray[Any, Any]]]) -> np.ndarray[Any, Any]:
            parts = [outputs[output] for outputs in arrays]
            if output == "hidden":
                return np.concatenate(parts)
            rows: np.ndarray[Any, Any] = parts[0].copy()
            for part in parts[1:]:  # in rank order, so that results are bit-reproducible
                rows += part
            return rows

        inputs = [{"token_ids": token_ids, "cumulative_lengths": cumulative_lengths}] * self.plan.num_ranks
        seconds = self.plan.peer_timeout_seconds(len(token_ids))
        request = wire.Run(
            **self.command_fields,
            step=0,
            timeout_seconds=seconds,
            trace=trace,
            output=output,
            values=values or self.values,
        )
        return await self.run(request, inputs, join, coordinator_run_seconds(seconds))

    async def generate(
        self,
        token_ids: np.ndarray[Any, Any],
        request: wire.GenerateTokens,
        timeout_seconds: float,
        may_return: Callable[[], bool] = lambda: False,
    ) -> AsyncGenerator[wire.TokensGenerated | wire.GenerationEnded, None]:
        """Stream rank 0's continuation of a prompt [T] int32: tokens, then the end. Closing early drops the sequence.

        If the stream `may_return` then, here or on the next deployment, rank 0 keeps its KV cache for a while.
        `timeout_seconds` bounds the wait for each reply. The format of activations is that of the request, else the
        deployment's.

        Raises as `run` does; except for errors of scope `request`, a failure ends all running sequences.
        """
        self.check_may_run()
        request = request.model_copy(update={"values": request.values or self.values})
        first = self.plan.devices[0].device_id
        stream = self._fleet.stream(
            first, request, pack_array(token_ids), wire.GenerationEnded, timeout_seconds, may_return
        )
        async with aclosing(stream) as replies:
            while True:
                message = (await self._next_reply(replies)).message
                if not isinstance(message, wire.TokensGenerated | wire.GenerationEnded):
                    raise BadMessage(reason=f"a worker answered with {type(message).__name__}")
                yield message
                if isinstance(message, wire.GenerationEnded):
                    return

    async def _next_reply(self, replies: AsyncGenerator[Reply, None]) -> Reply:
        """The next reply. Raises the error that ended the stream or the deployment."""

        async def read_reply() -> Reply | HearthError:
            try:
                return await anext(replies)
            except HearthError as error:
                first = self.plan.devices[0]
                if isinstance(error, DeviceLost) and await self._fleet.answers_again(first.device_id):
                    return ConnectionLost(endpoint=first.name)
                if error.scope != "request":
                    raise
                return error  # concerns this sequence alone: do not abort the others

        (reply,) = await self.gather_or_abort([read_reply()], wire.Abort(**self.command_fields, reason=""))
        if isinstance(reply, HearthError):
            raise reply
        return reply
