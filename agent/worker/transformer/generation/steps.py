"""Execution of a generation's steps on one rank. Rank 0 sends the orders (`scheduler`); the other ranks follow them.

There is no coordinator round trip per token: rank 0 sends the order of a step to all ranks, all compute, each owner of
vocabulary rows sends its candidates to rank 0, and rank 0 samples. In a pipeline, the last stage sends the rows to sample from
to rank 0, which holds the vocabulary; meanwhile rank 0 may begin further steps, which every stage runs in order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from agent.worker.tracing import Recorder, StepBegun, log_fact
from agent.worker.transformer import blocks, micro_batches, strategies
from agent.worker.transformer.comm.collectives import Collectives
from agent.worker.transformer.comm.communicator import Communicator, link_formats
from agent.worker.transformer.comm.staging import Staging
from agent.worker.transformer.generation import decoding, sampling
from agent.worker.transformer.generation.block_pool import PrefixBlocks
from agent.worker.transformer.generation.cache_exchange import CacheExchange
from agent.worker.transformer.generation.constraints import Constraints
from agent.worker.transformer.kv_cache import KeptCaches, KeptPrefixes
from agent.worker.transformer.paged_cache import PagedRows, SequenceCache
from agent.worker.transformer.shard import Shard
from agent.worker.transformer.strategies.pipeline import run_stage
from agent.worker.transformer.strategies.step import Step
from hearth.errors import BadGrammar, BadMessage, StepFailed
from hearth.grammars import Grammars
from hearth.plan.geometry import Span, rows_per_rank, spans
from hearth.plan.kept_caches import cached_block
from hearth.plan.phases import Phase
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import KV_BLOCK_TOKENS
from hearth.platform.machine import give_back_freed_buffers
from hearth.wire import messages as wire

log = logging.getLogger("hearth.worker")

LEADER_RANK = 0  # the rank that schedules the steps
# Orders without rows, after which rank 0 waits for nobody: a rank may be that many behind. They free sequences, of which a plan
# has some dozens.
_MAX_ORDERS_BEHIND = 64


class NewTokens(NamedTuple):
    """The new tokens of a sequence: accepted drafts, and one more; none if its grammar cannot be followed any further."""

    token_ids: list[int]
    log_probs: list[wire.TokenLogProbs]  # of each token, if they are asked for


SampledTokens: TypeAlias = dict[int, NewTokens]  # by the number of the sequence


class _SampledRow(NamedTuple):
    """A row of a step after which a token is sampled: the token after the sequence's first `num_tokens`."""

    sequence: int
    num_tokens: int


@dataclass(frozen=True)
class _InFlightStep:
    """A step of a pipeline in flight, as seen by rank 0, which waits for its rows from the last stage."""

    collectives: Collectives
    phase: Phase
    buffer: Tensor  # receives the rows, or for the message that the step is done
    sampled: tuple[_SampledRow, ...]  # of the buffer


class StepExecutor:
    """The state of all running sequences on one rank. The caller owns `communicator` and has started it."""

    def __init__(
        self,
        plan: TransformerPlan,
        rank: int,
        shard: Shard,
        communicator: Communicator,
        staging: Staging,
        kept: KeptCaches | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`kept` are KV caches of earlier plans, with which sequences may begin. `grammars`: of the model's tokens."""
        self._plan = plan
        self._rank = rank
        self._shard = shard
        self._layers = decoding.decode_layers(plan, rank, shard)
        self._communicator = communicator
        self._staging = staging
        assert plan.body.generation is not None
        part = cached_block(plan.model, plan.body, rank)
        self._memory = PagedRows(plan.model, part, plan.body.generation.num_kv_blocks, staging.device)
        self._prefixes = PrefixBlocks()
        self._caches: dict[int, SequenceCache] = {}
        kept = KeptCaches() if kept is None else kept  # not `or`: without streams it is falsy, and may hold prefixes
        self._exchange = CacheExchange(plan, rank, communicator, staging, kept)
        self._constraints = Constraints(grammars, spans(plan.body.vocabulary)[rank])
        self._in_flight: deque[_InFlightStep | SampledTokens] = deque()  # steps begun and not finished, oldest first
        self._step = 0
        self.peer_timeout_seconds = plan.peer_timeout_seconds(plan.body.seq_len)
        self._last_rank = plan.num_ranks - 1
        self._is_pipeline = plan.body.num_stages > 1
        self._confirming = _ranks_without_share(plan)
        # Of rank 0: called with the number of a sequence's KV cache and all ranks' candidates for its next token, each [n,2].
        self.observe_candidates: Callable[[int, Sequence[np.ndarray[Any, Any]]], None] = lambda sequence, candidates: (
            None
        )
        communicator.allow_steps_ahead(plan.body.max_steps_in_flight + plan.body.micro_batches + _MAX_ORDERS_BEHIND)

    @property
    def num_sequences(self) -> int:
        return len(self._caches)

    @property
    def num_in_flight(self) -> int:
        """Number of steps that rank 0 has begun and not finished."""
        return len(self._in_flight)

    @property
    def can_begin(self) -> bool:
        """Whether another step may be begun."""
        return len(self._in_flight) < self._plan.body.max_steps_in_flight

    def begin(self, order: wire.StepOrder) -> None:
        """Begin a step on all ranks. Raises StepFailed."""
        self._begin(self._step + 1 - len(self._in_flight))
        message_1n = np.frombuffer(wire.encode(order), np.uint8)[None]
        for rank in range(self._plan.num_ranks):
            if rank != self._rank:  # a message, which is never on a GPU, and so needs no staging
                self._communicator.send(rank, self._communicator.key(0, Phase.ORDER, rank, self._rank), message_1n)
        tokens = self._execute(order)
        self._in_flight.append(self._in_flight_step(order) if self._is_pipeline else tokens)

    def oldest_has_ended(self) -> bool:
        """Whether `finish` would return without waiting."""
        if not self._in_flight:
            return False
        oldest = self._in_flight[0]
        return isinstance(oldest, dict) or oldest.collectives.has_arrived(
            0, oldest.phase, self._last_rank, oldest.buffer
        )

    def finish(self) -> SampledTokens:
        """Wait for the oldest step in flight; return the new tokens of each sequence. Raises StepFailed."""
        oldest = self._in_flight[0]
        if not isinstance(oldest, dict):
            with torch.inference_mode():
                oldest.collectives.receive_rows(0, oldest.phase, self._last_rank, oldest.buffer)
                self._in_flight[0] = self._sample_rows(oldest)
        tokens = self._in_flight.popleft()
        assert isinstance(tokens, dict)
        return tokens

    def execute_next(self) -> wire.StepOrder:
        """Wait for the next order, without a timeout, and execute it. Raises StepFailed, BadMessage."""
        self._begin()
        tile = self._communicator.receive_order(self._communicator.key(0, Phase.ORDER, self._rank, LEADER_RANK))
        order = wire.decode(tile.tobytes())
        if not isinstance(order, wire.StepOrder):
            raise BadMessage(reason=f"rank {LEADER_RANK} sent {type(order).__name__} instead of an order")
        self._execute(order)
        return order

    def keep_caches(self) -> KeptCaches:
        """Hand over all KV caches of named streams, and the prefix cache, for the next plan, which ends this executor."""
        for cache in self._caches.values():
            self._prefixes.use(cache.blocks)
        kept = self._exchange.keep(self._caches)
        if self._memory.part.size and (newest := self._prefixes.newest(wire.MAX_KEPT_BLOCKS)):
            kept.prefixes = KeptPrefixes(self._memory, newest)
        return kept

    # ---- one step -------------------------------------------------------------------------------------------------

    def _begin(self, oldest_step: int | None = None) -> None:
        self._step += 1
        self._communicator.begin_step(
            self._step, self.peer_timeout_seconds, Recorder(False), clear_failure=False, oldest_step=oldest_step
        )

    def _execute(self, order: wire.StepOrder) -> SampledTokens:
        if log.isEnabledFor(logging.DEBUG):
            counts = {rows.sequence: len(rows.token_ids) for rows in order.rows}
            log_fact(log, StepBegun(kind=order.kind, rows=counts, freed=order.freed))
        if order.values is not None:
            self._communicator.set_values(link_formats(self._plan, self._rank, order.values))
        for sequence in order.freed:
            if (cache := self._caches.pop(sequence, None)) is not None:
                self._prefixes.use(cache.blocks)
            self._constraints.free(sequence)
        self._exchange.free(order)
        if order.adopted is not None:
            self._adopt(order.adopted)
        if not order.rows:
            self._publish(order)
            if not self._caches:
                give_back_freed_buffers()  # idle: leave the memory to other programs
            if self._is_pipeline:
                self._return_rows(self._collectives(1), None)
            return {}
        if self._rank in self._confirming:
            self._collectives(1).send_rows(LEADER_RANK, 0, Phase.STEP_DONE, self._done_marker())
        self._add_sequences(order)
        for rows in order.rows:
            self._add_rows(rows)
        with torch.inference_mode():
            tokens = self._run(order)
        if self._rank == LEADER_RANK:
            for rank in self._confirming:
                self._collectives(1).receive_rows(0, Phase.STEP_DONE, rank, self._done_marker())
        for rows in order.rows:
            self._caches[rows.sequence].advance()
        self._publish(order)
        self._exchange.send_copies(self._caches)
        return tokens

    def _publish(self, order: wire.StepOrder) -> None:
        """Take note of full blocks, whose rows have been computed."""
        for block, key in order.published:
            self._prefixes.publish(block, key)

    def _adopt(self, adopted: wire.AdoptedPrefixes) -> None:
        """Take blocks of the prefix cache of earlier plans into this plan's memory."""
        with torch.inference_mode():
            self._exchange.adopt(adopted, self._memory)
        for block, key in zip(adopted.blocks, wire.split_keys(adopted.kept.keys), strict=True):
            self._prefixes.publish(block, key)

    def _add_sequences(self, order: wire.StepOrder) -> None:
        """Make the KV caches of sequences that begin, with the rows that ranks have kept of earlier plans."""
        moves = []
        for rows in order.rows:
            if rows.new is not None:
                cache = self._caches[rows.sequence] = SequenceCache(self._memory, rows.new)
                self._prefixes.forget(rows.new.blocks[len(rows.new.cached_tokens) // KV_BLOCK_TOKENS :])
                self._exchange.begin(rows.sequence)
                self._constraints.add(rows.sequence, rows.new.grammar)
                if rows.new.moved is not None:
                    moves.append((rows.new.moved, cache))
        if moves:
            with torch.inference_mode():
                self._exchange.move(moves)

    def _add_rows(self, rows: wire.SequenceRows) -> None:
        if rows.sequence not in self._caches:
            raise StepFailed(device=f"rank {self._rank}", reason=f"the sequence {rows.sequence} is not known here")
        cache = self._caches[rows.sequence]
        cache.reject(rows.num_rejected)
        cache.add_blocks(rows.blocks)
        self._prefixes.forget(rows.blocks)
        cache.extend(rows.token_ids, rows.num_drafted)

    def _run(self, order: wire.StepOrder) -> SampledTokens:
        ids = torch.tensor([token for rows in order.rows for token in rows.token_ids], dtype=torch.int64)
        sequences = spans([len(rows.token_ids) for rows in order.rows])
        caches = [self._caches[rows.sequence] for rows in order.rows]
        packed = blocks.pack_rows(self._plan.model, ids, sequences, caches, self._staging.device)
        self._communicator.set_inline_receiving(order.kind == "decode")
        collectives = self._collectives(len(ids))
        step = Step(self._shard, self._plan, self._rank, packed, collectives, Recorder(False))
        sampled_rows = [
            row
            for rows, span in zip(order.rows, sequences, strict=True)
            if rows.sample
            for row in range(span.stop - 1 - rows.num_drafted, span.stop)
        ]
        if self._is_pipeline:
            rows_TH = run_stage(step)
            self._return_rows(collectives, rows_TH[sampled_rows] if sampled_rows else None)
            return {}
        if order.kind == "decode":
            last_NH = decoding.run_decode_step(step, self._layers)
        elif len(parts := self._micro_batches(packed)) > 1:
            last_NH = self._run_micro_batches(parts, sampled_rows)
        else:
            last_NH = self._last_rows(collectives, strategies.run(step), sampled_rows)
        return self._next_tokens(last_NH, self._sampled(order))

    # ---- prefill in micro-batches -------------------------------------------------------------------------------------

    def _micro_batches(self, packed: blocks.PackedRows) -> list[tuple[Span, blocks.PackedRows]]:
        """Split the rows of a step into the plan's number of equal micro-batches, or into fewer if there are few rows."""
        max_count = packed.num_rows // (micro_batches.MIN_ROWS_PER_RANK * self._plan.num_ranks)
        count = max(min(self._plan.body.micro_batches, max_count), 1)
        edges = [packed.num_rows * index // count for index in range(count + 1)]
        parts = [Span(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
        return [(span, packed.slice_rows(span)) for span in parts]

    def _run_micro_batches(
        self, parts: Sequence[tuple[Span, blocks.PackedRows]], sampled_rows: Sequence[int]
    ) -> Tensor:
        """Run the micro-batches concurrently. Returns the hidden states of `sampled_rows` [N,H], on every rank."""
        first_step, spec = self._step, self._plan.model
        self._step += len(parts) - 1  # each has its own step number, the same on all ranks

        def run(index: int, order: micro_batches.MicroBatchOrder) -> Tensor:
            span, rows = parts[index]
            collectives = self._collectives(rows.num_rows, first_step + index)
            step = Step(self._shard, self._plan, self._rank, rows, collectives, Recorder(False), order)
            failed = True
            try:
                with torch.inference_mode():
                    hidden_sH = strategies.run(step)
                    own = [row - span.start for row in sampled_rows if span.start <= row < span.stop]
                    last_NH = self._last_rows(collectives, hidden_sH, own)
                failed = False
                return last_NH
            finally:
                order.end(failed)

        orders: list[micro_batches.MicroBatchOrder] = []
        for _ in parts:
            previous = orders[-1] if orders else None
            orders.append(micro_batches.MicroBatchOrder(spec.num_layers, self.peer_timeout_seconds, previous))
        runs = [partial(run, index, order) for index, order in enumerate(orders)]
        return torch.cat(micro_batches.run_concurrently(runs, self._communicator.abort))

    # ---- a pipeline's last stage, which returns rows to the first -----------------------------------------------------

    def _return_rows(self, collectives: Collectives, sampled_NH: Tensor | None) -> None:
        """On the last stage, answer every step, with rows or without, so that rank 0 can limit the steps in flight."""
        if self._rank == self._last_rank:
            if sampled_NH is None:
                collectives.send_rows(LEADER_RANK, 0, Phase.STEP_DONE, self._done_marker())
            else:
                collectives.send_rows(LEADER_RANK, 0, Phase.HEAD_ROWS, sampled_NH)

    def _done_marker(self) -> Tensor:
        return torch.zeros(1, 1, dtype=torch.uint8, device=self._staging.device)

    def _in_flight_step(self, order: wire.StepOrder) -> _InFlightStep:
        sampled = self._sampled(order)
        collectives = Collectives(self._communicator, self._staging, (), False, self._step)
        if not sampled:
            return _InFlightStep(collectives, Phase.STEP_DONE, self._done_marker(), sampled)
        into_NH = torch.empty(len(sampled), self._plan.model.hidden_size, device=self._staging.device)
        return _InFlightStep(collectives, Phase.HEAD_ROWS, into_NH, sampled)

    def _sample_rows(self, step: _InFlightStep) -> SampledTokens:
        """Sample the next tokens of the sequences that were not freed meanwhile."""
        running = [row for row, sampled in enumerate(step.sampled) if sampled.sequence in self._caches]
        if not running:
            return {}
        last_NH = blocks.normalise(self._plan.model, step.buffer[running], self._shard.embedding.norm)
        return self._next_tokens(last_NH, [step.sampled[row] for row in running])

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def _collectives(self, num_rows: int, step: int | None = None) -> Collectives:
        tiles = spans(rows_per_rank(self._plan.body.row_weights, num_rows))
        return Collectives(self._communicator, self._staging, tiles, self._plan.body.overlap, step)

    def _last_rows(self, collectives: Collectives, hidden_sH: Tensor, sampled_rows: Sequence[int]) -> Tensor:
        """The rows to sample from [N,H], on every rank; their owners send them to all."""
        by_owner = [[row for row in sampled_rows if tile.start <= row < tile.stop] for tile in collectives.tiles]
        own = hidden_sH[[row - collectives.own_rows.start for row in by_owner[self._rank]]]
        if len(own):
            collectives.broadcast(0, Phase.HEAD_ROWS, own)
        parts = []
        for owner, rows in enumerate(by_owner):
            if owner == self._rank:
                parts.append(own)
            elif rows:
                received = hidden_sH.new_empty(len(rows), hidden_sH.shape[1])
                collectives.receive_rows(0, Phase.HEAD_ROWS, owner, received)
                parts.append(received)
        return torch.cat(parts)

    def _sampled(self, order: wire.StepOrder) -> tuple[_SampledRow, ...]:
        """The rows after which the step samples a token. The sequences have the tokens of the step."""
        return tuple(
            _SampledRow(rows.sequence, len(self._caches[rows.sequence].tokens) - num_later)
            for rows in order.rows
            if rows.sample
            for num_later in range(rows.num_drafted, -1, -1)
        )

    def _next_tokens(self, last_NH: Tensor, sampled: Sequence[_SampledRow]) -> SampledTokens:
        """Send candidates to rank 0, which samples the tokens. Returns an empty result on other ranks."""
        owners = spans(self._plan.body.vocabulary)
        candidates: list[list[np.ndarray[Any, Any]]] = [[] for _ in sampled]
        if not sampled:
            return {}
        if owners[self._rank].size:
            logits_NV = blocks.logits(self._shard, last_NH).cpu().numpy()
            for tile, (row, logits_V) in enumerate(zip(sampled, logits_NV, strict=True)):
                own = self._candidates(row, logits_V)
                if self._rank == LEADER_RANK:
                    candidates[tile].append(own)
                else:
                    key = self._communicator.key(tile, Phase.CANDIDATES, LEADER_RANK, self._rank)
                    self._communicator.send(LEADER_RANK, key, own)
        if self._rank != LEADER_RANK:
            return {}
        others = [rank for rank, owned in enumerate(owners) if owned.size and rank != LEADER_RANK]
        keys = [
            self._communicator.key(tile, Phase.CANDIDATES, LEADER_RANK, rank) for tile in range(len(sampled)) for rank in others
        ]  # fmt: skip
        arrived = iter(self._communicator.receive(keys))
        of_sequences: dict[int, list[list[np.ndarray[Any, Any]]]] = {}
        for row, parts in zip(sampled, candidates, strict=True):
            of_sequences.setdefault(row.sequence, []).append([*parts, *(next(arrived) for _ in others)])
        for sequence, rows in of_sequences.items():
            if self._caches[sequence].top_log_probs is None:  # the coordinator's own request asks for none
                self.observe_candidates(sequence, rows[0])
        return {sequence: self._sample_tokens(sequence, rows) for sequence, rows in of_sequences.items()}

    def _candidates(self, row: _SampledRow, logits_V: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        cache, first_id = self._caches[row.sequence], self._shard.embedding.head_rows.start
        tokens = cache.tokens[: row.num_tokens]
        index = _answer_index(cache, len(tokens))
        selected: np.ndarray[Any, Any]
        try:
            allowed_V = self._constraints.allowed(row.sequence, tokens[len(tokens) - index :])
        except BadGrammar as error:
            log.warning("%s", error)
            selected = np.array([[first_id, np.nan]], np.float32)  # tells rank 0 that no token may be chosen
        else:
            selected = sampling.select_candidates(logits_V, first_id, cache.sampling, tokens, index, allowed_V)
        if cache.top_log_probs is None:
            return selected
        return sampling.log_prob_share(selected, logits_V, first_id, cache.top_log_probs)

    def _sample_tokens(self, sequence: int, candidates: Sequence[list[np.ndarray[Any, Any]]]) -> NewTokens:
        """The new tokens of a sequence, given the candidates after its newest settled token and after each drafted one."""
        cache = self._caches[sequence]
        num_settled = len(cache.settled_tokens)

        found: list[wire.TokenLogProbs] = []

        def sample(num_drafted: int) -> int | None:
            shares = candidates[num_drafted]
            if cache.top_log_probs is not None:
                merged = sampling.MergedShares(shares)
                shares = merged.candidates
            candidates_n2 = np.concatenate(shares)
            is_form = candidates_n2.ndim == 2 and candidates_n2.shape[1] == 2
            if not is_form or not (len(candidates_n2) or cache.is_constrained):
                raise BadMessage(reason=f"candidates have the shape {candidates_n2.shape}")
            if cache.is_constrained and (not len(candidates_n2) or np.isnan(candidates_n2).any()):
                return None
            index = _answer_index(cache, num_settled + num_drafted)
            token_id = sampling.sample_token(candidates_n2, cache.sampling, index)
            if cache.top_log_probs is not None:
                found.append(merged.log_probs(token_id, cache.top_log_probs))
            return token_id

        return NewTokens(sampling.verify_drafts(cache.tokens[num_settled:], sample), found)


def _answer_index(cache: SequenceCache, num_tokens: int) -> int:
    """Number of tokens of the answer among the first `num_tokens` of a sequence."""
    return cache.first_index + num_tokens - cache.num_prompt_tokens


def _ranks_without_share(plan: TransformerPlan) -> tuple[int, ...]:
    """The ranks other than 0 that have no heads and no columns."""
    shares = enumerate(zip(plan.body.heads, plan.body.columns, strict=True))
    return tuple(rank for rank, share in shares if rank != LEADER_RANK and not any(share))
