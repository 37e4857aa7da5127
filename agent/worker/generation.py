"""Generation on one rank: executes orders, step by step. Rank 0 gives them (`scheduler`), the others follow.

There is no coordinator round trip per token: rank 0 tells all what the next step is, everyone computes, each owner of
vocabulary rows sends its candidates, and rank 0 chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent.worker import blocks, decoding, sampling, strategies
from agent.worker.collectives import Collectives
from agent.worker.communicator import Communicator
from agent.worker.kv_cache import SequenceCache
from agent.worker.shard import Shard
from agent.worker.staging import Staging
from agent.worker.tracing import Recorder
from hearth.errors import BadMessage, StepFailed
from hearth.framing import Phase
from hearth.geometry import rows_for, spans
from hearth.messages import SequenceRows, StepOrder, decode, encode
from hearth.plan import Plan

LEADER = 0


class Generation:
    """The state of all running sequences on one rank. `communicator` is started already, and owned by the caller."""

    def __init__(self, plan: Plan, rank: int, shard: Shard, communicator: Communicator, staging: Staging) -> None:
        self._plan = plan
        self._rank = rank
        self._shard = shard
        self._layers = decoding.own_layers(plan, rank, shard)
        self._communicator = communicator
        self._staging = staging
        self._caches: dict[int, SequenceCache] = {}
        self._step = 0
        self._wait_seconds = plan.wait_seconds(plan.seq_len)

    @property
    def num_sequences(self) -> int:
        return len(self._caches)

    def lead(self, order: StepOrder) -> dict[int, int]:
        """Run a step on all ranks: the next token of every sequence whose rows ask for one. Raises StepFailed."""
        self._begin()
        message_1n = torch.frombuffer(bytearray(encode(order)), dtype=torch.uint8)[None]
        self._collectives(1).broadcast(0, Phase.ORDER, message_1n)
        return self._execute(order)

    def follow(self) -> StepOrder:
        """Wait for the next order, however long, and execute it. Raises StepFailed, BadMessage."""
        self._begin()
        tile = self._communicator.await_order(self._communicator.key(0, Phase.ORDER, self._rank, LEADER))
        order = decode(tile.tobytes())
        if not isinstance(order, StepOrder):
            raise BadMessage(reason=f"rank {LEADER} sent {type(order).__name__} for an order")
        self._execute(order)
        return order

    # ---- one step -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._step += 1
        self._communicator.begin_step(self._step, self._wait_seconds, Recorder(False), after_failure=False)

    def _execute(self, order: StepOrder) -> dict[int, int]:
        for sequence in order.freed:
            self._caches.pop(sequence, None)
        if not order.rows:
            return {}
        for rows in order.rows:
            self._announce(rows)
        with torch.inference_mode():
            chosen = self._run(order)
        for rows in order.rows:
            self._caches[rows.sequence].advance()
        return chosen

    def _announce(self, rows: SequenceRows) -> None:
        if rows.new is not None:
            heads = self._plan.body.heads[self._rank]
            cache = SequenceCache(self._plan.model, heads, rows.new, self._staging.device)
            self._caches[rows.sequence] = cache
        if rows.sequence not in self._caches:
            raise StepFailed(device=f"rank {self._rank}", reason=f"the sequence {rows.sequence} is not known here")
        self._caches[rows.sequence].extend(rows.token_ids)

    def _run(self, order: StepOrder) -> dict[int, int]:
        ids = torch.tensor([token for rows in order.rows for token in rows.token_ids], dtype=torch.int64)
        sequences = spans([len(rows.token_ids) for rows in order.rows])
        caches = [self._caches[rows.sequence] for rows in order.rows]
        packed = blocks.pack(self._plan.model, ids, sequences, caches, self._staging.device)
        self._communicator.receive_inline(order.kind == "decode")
        collectives = self._collectives(len(ids))
        step = strategies.Step(self._shard, self._plan, self._rank, packed, collectives, Recorder(False))
        if order.kind == "decode":
            last_NH = decoding.decode(step, self._layers)
        else:
            wanted = [span.stop - 1 for rows, span in zip(order.rows, sequences, strict=True) if rows.sample]
            last_NH = self._last_rows(collectives, strategies.run(step), wanted)
        sampled = [rows.sequence for rows in order.rows if rows.sample]
        return self._next_tokens(collectives, last_NH, sampled)

    def _collectives(self, num_rows: int) -> Collectives:
        tiles = spans(rows_for(self._plan.body.row_weights, num_rows))
        return Collectives(self._communicator, self._staging, tiles, self._plan.body.overlap)

    def _last_rows(self, collectives: Collectives, hidden_sH: Tensor, wanted: Sequence[int]) -> Tensor:
        """The rows of the step whose next token is wanted, on every rank: their owners send them to all. [N,H]"""
        by_owner = [[row for row in wanted if tile.start <= row < tile.stop] for tile in collectives.tiles]
        own = hidden_sH[[row - collectives.own.start for row in by_owner[self._rank]]]
        if len(own):
            collectives.broadcast(0, Phase.HEAD_ROWS, own)
        parts = []
        for owner, rows in enumerate(by_owner):
            if owner == self._rank:
                parts.append(own)
            elif rows:
                received = hidden_sH.new_empty(len(rows), hidden_sH.shape[1])
                collectives.collect_rows(0, Phase.HEAD_ROWS, owner, received)
                parts.append(received)
        return torch.cat(parts)

    def _next_tokens(self, collectives: Collectives, last_NH: Tensor, sampled: Sequence[int]) -> dict[int, int]:
        """Rank 0 gets every owner's candidates and chooses; on the others the answer is empty."""
        embedding, owners = self._shard.embedding, spans(self._plan.body.vocabulary)
        assert embedding.head is not None
        found: dict[int, list[np.ndarray[Any, Any]]] = {sequence: [] for sequence in sampled}
        if not sampled:
            return {}
        if owners[self._rank].size:
            logits_NV = embedding.head.times(last_NH).cpu().numpy()
            for tile, (sequence, logits_V) in enumerate(zip(sampled, logits_NV, strict=True)):
                own = self._candidates(sequence, logits_V)
                if self._rank == LEADER:
                    found[sequence].append(own)
                else:
                    key = self._communicator.key(tile, Phase.CANDIDATES, LEADER, self._rank)
                    self._communicator.send(LEADER, key, own)
        if self._rank != LEADER:
            return {}
        others = [rank for rank, owned in enumerate(owners) if owned.size and rank != LEADER]
        keys = [
            self._communicator.key(tile, Phase.CANDIDATES, LEADER, rank) for tile in range(len(sampled)) for rank in others
        ]  # fmt: skip
        arrived = iter(self._communicator.take(keys))
        for sequence in sampled:
            found[sequence] += [next(arrived) for _ in others]
        return {sequence: self._choose(sequence, np.concatenate(parts)) for sequence, parts in found.items()}

    def _candidates(self, sequence: int, logits_V: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        cache = self._caches[sequence]
        first_id = self._shard.embedding.vocabulary.start
        return sampling.candidates(logits_V, first_id, cache.sampling, cache.tokens, self._index(cache))

    def _choose(self, sequence: int, found_n2: np.ndarray[Any, Any]) -> int:
        if found_n2.ndim != 2 or found_n2.shape[1] != 2 or not len(found_n2):
            raise BadMessage(reason=f"candidates have the shape {found_n2.shape}")
        cache = self._caches[sequence]
        return sampling.choose(found_n2, cache.sampling, self._index(cache))

    @staticmethod
    def _index(cache: SequenceCache) -> int:
        """How many tokens of the answer were generated before."""
        return cache.first_index + len(cache.tokens) - cache.num_prompt_tokens
