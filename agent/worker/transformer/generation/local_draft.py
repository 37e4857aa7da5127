"""The draft model on rank 0: a whole small decoder, which guesses the tokens that a step then verifies (speculative decoding).

It samples with the settings of the request, and with the noise that the model itself samples with at the same place of the
answer. So its guesses are right as often as the two distributions overlap under common noise (Daliri et al. 2024, "Coupling
without communication"), also at temperatures above 0, and `sampling.verify_drafts` leaves the distribution as it is.

Its KV cache has blocks of its own. What there is of a sequence is compared with the sequence's tokens whenever it guesses: rows
of rejected guesses are dropped then, and rows of tokens that it has not seen, because others guessed or none did, are computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent.worker.transformer import blocks
from agent.worker.transformer.generation import sampling
from agent.worker.transformer.generation.block_pool import BlockPool, num_blocks_for
from agent.worker.transformer.generation.sequence import SequenceState, common_prefix
from agent.worker.transformer.generation.speculation import StepTimes
from agent.worker.transformer.paged_cache import PagedRows, SequenceCache
from agent.worker.transformer.shard import Shard
from hearth.plan.geometry import spans
from hearth.plan.kept_caches import cached_block
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import KV_BLOCK_TOKENS
from hearth.wire.messages import NewSequence

# A guess is one of the most likely tokens when a request samples: noise for the whole vocabulary costs more than it gains.
_MAX_CANDIDATES = 256


@dataclass
class _Drafted:
    """The draft model's KV cache of one sequence. The first `num_settled` tokens of its cache are no guesses."""

    cache: SequenceCache
    blocks: list[int]
    num_settled: int
    num_published: int = 0


@dataclass
class _Guess:
    """The guesses for one sequence, while they are made. `tokens` are the sequence's and the guesses."""

    sequence: SequenceState
    drafted: _Drafted
    tokens: list[int]
    count: int
    made: list[int] = field(default_factory=list)


class LocalDraft:
    """A `speculation.DraftModel`. `plan` is that of the draft model, `vocab_size` that of the model whose tokens it guesses."""

    def __init__(self, plan: TransformerPlan, shard: Shard, vocab_size: int, device: torch.device) -> None:
        limits = plan.body.generation
        assert limits is not None
        self._spec, self._shard, self._device = plan.model, shard, device
        self._vocab_size = vocab_size
        self._max_rows = limits.prefill_rows
        self._max_timed_rows = limits.max_sequences
        self._memory = PagedRows(plan.model, cached_block(plan.model, plan.body, 0), limits.num_kv_blocks, device)
        self._pool = BlockPool(limits.num_kv_blocks)
        self._sequences: dict[int, _Drafted] = {}  # by number, least recently used first
        self._times = StepTimes(of_draft=True)
        self._row_seconds = 0.0  # of the last step of more rows

    def seconds(self, num_sequences: int) -> float:
        return self._times.seconds(num_sequences)

    def catch_up_seconds(self, sequence: SequenceState) -> float:
        drafted = self._sequences.get(sequence.number)
        num_missing = (
            len(sequence.prompt) + len(sequence.generated) - (drafted.num_settled if drafted is not None else 0)
        )
        return num_missing * self._row_seconds if num_missing > self._max_timed_rows else 0.0

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """Guesses. A sequence of which too many rows are missing gets none, until some calls have computed them."""
        in_use = {sequence.number for sequence, _ in wanted}
        guesses = [self._begin(sequence, count, in_use) for sequence, count in wanted]
        found = [guess for guess in guesses if guess is not None]
        with torch.inference_mode():
            ready = self._catch_up(found)
            while ready := [guess for guess in ready if len(guess.made) < guess.count]:
                self._step([(guess, [guess.made[-1]]) for guess in ready])
        for guess in found:
            self._publish(guess)
        return [guess.made if guess is not None else [] for guess in guesses]

    def _begin(self, sequence: SequenceState, count: int, in_use: set[int]) -> _Guess | None:
        """Find or make the cache of a sequence, with room for its tokens and guesses; None if the model cannot guess here."""
        tokens = [*sequence.prompt, *sequence.generated]
        drafted = self._sequences.pop(sequence.number, None)
        count = min(count, self._spec.max_positions - len(tokens))
        if drafted is None:
            drafted = self._new(sequence, tokens)
        self._sequences[sequence.number] = drafted
        known = drafted.num_settled
        num_equal = known + common_prefix(drafted.cache.tokens[known:], tokens[known:])
        num_equal = min(num_equal, len(tokens) - 1)  # a row at least is computed: a token is guessed after it
        drafted.cache.truncate(num_equal)
        drafted.num_settled = num_equal
        if count < 1 or max(tokens[num_equal:]) >= self._spec.vocab_size:
            return None
        missing = num_blocks_for(len(tokens) + count - 1) - len(drafted.blocks)
        if missing > 0:
            self._make_room(missing, in_use)
            if self._pool.num_free < missing:
                return None
            new = self._pool.allocate(missing, drafted.blocks[-1] if drafted.blocks else None)
            drafted.blocks += new
            drafted.cache.add_blocks(new)
        return _Guess(sequence, drafted, tokens, count)

    def _new(self, sequence: SequenceState, tokens: Sequence[int]) -> _Drafted:
        """The cache of a sequence, with the rows of its first tokens that were computed for others."""
        keys = sequence.prefix_keys() if sequence.request.prefix_scope else []
        found = self._pool.take_prefix(keys[: (len(tokens) - 1) // KV_BLOCK_TOKENS])
        num_cached = len(found) * KV_BLOCK_TOKENS
        cache = SequenceCache(self._memory, NewSequence.model_construct(
            blocks=tuple(found), cached_tokens=tuple(tokens[:num_cached]), num_prompt_tokens=len(sequence.prompt),
            sampling=sequence.request.sampling,
        ))  # fmt: skip
        return _Drafted(cache, found, num_cached, len(found))

    def _make_room(self, count: int, in_use: set[int]) -> None:
        """Free the caches of other sequences, those first that were used longest ago."""
        for number in [number for number in self._sequences if number not in in_use]:
            if self._pool.num_free >= count:
                return
            self._pool.release(self._sequences.pop(number).blocks)

    def _catch_up(self, guesses: Sequence[_Guess]) -> list[_Guess]:
        """Compute missing rows of the sequences, at most those of one prefill step. Returns those that have a first guess."""
        room, rows = self._max_rows, []
        for guess in guesses:
            missing = guess.tokens[len(guess.drafted.cache.tokens) :][:room]
            room -= len(missing)
            if missing:
                rows.append((guess, missing))
        if rows:
            self._step(rows)
        return [guess for guess in guesses if guess.made]

    def _step(self, rows: Sequence[tuple[_Guess, Sequence[int]]]) -> None:
        """Compute rows of these sequences; those that have all theirs get one more guess."""
        began = time.monotonic()
        caches = [guess.drafted.cache for guess, _ in rows]
        ids = torch.tensor([token for _, tokens in rows for token in tokens], dtype=torch.int64)
        sequences = spans([len(tokens) for _, tokens in rows])
        for cache, (_, tokens) in zip(caches, rows, strict=True):
            cache.extend(tokens)
        packed = blocks.pack_rows(self._spec, ids, sequences, caches, self._device)
        hidden_TH = self._forward(packed)
        for cache in caches:
            cache.advance()
        complete = [n for n, (guess, _) in enumerate(rows) if len(guess.drafted.cache.tokens) == len(guess.tokens)]
        if complete:
            last_NH = hidden_TH[[sequences[n].stop - 1 for n in complete]]
            logits_NV = blocks.logits(self._shard, last_NH).cpu().numpy()
            for n, logits_V in zip(complete, logits_NV, strict=True):
                guess = rows[n][0]
                guess.made.append(self.next_token(guess.sequence, guess.tokens, logits_V[: self._vocab_size]))
                guess.tokens.append(guess.made[-1])
        passed = time.monotonic() - began
        if len(ids) <= self._max_timed_rows:
            self._times.record(len(ids), passed)
        else:
            self._row_seconds = passed / len(ids)

    def _forward(self, rows: blocks.PackedRows) -> Tensor:
        """The hidden states after the final norm [T,H]."""
        spec, embedding = self._spec, self._shard.embedding
        x_TH = blocks.finish_embedding(spec, embedding, embedding.word[rows.token_ids].float(), rows.positions)
        for index, layer in enumerate(self._shard.layers):
            x_TH = blocks.whole_layer(spec, index, layer, x_TH, rows)
        return blocks.normalise(spec, x_TH, embedding.norm)

    def next_token(self, sequence: SequenceState, tokens: Sequence[int], logits_V: np.ndarray[Any, Any]) -> int:
        """Sample the token after `tokens` of a sequence as the model itself would."""
        request = sequence.request
        choice = request.sampling
        if choice.temperature > 0:
            choice = choice.model_copy(update={"top_k": min(choice.top_k or _MAX_CANDIDATES, _MAX_CANDIDATES)})
        index = request.first_index + len(tokens) - sequence.num_prompt_tokens
        candidates = sampling.select_candidates(logits_V, 0, choice, tokens, index)
        return sampling.sample_token(candidates, choice, index)

    def _publish(self, guess: _Guess) -> None:
        """Let later sequences share the full blocks of tokens that are no guesses."""
        drafted, sequence = guess.drafted, guess.sequence
        drafted.num_settled = min(len(drafted.cache.tokens), len(guess.tokens) - len(guess.made))
        num_full = drafted.num_settled // KV_BLOCK_TOKENS
        if not sequence.request.prefix_scope or num_full <= drafted.num_published:
            return
        keys = sequence.prefix_keys()
        for number in range(drafted.num_published, num_full):
            self._pool.publish(drafted.blocks[number], keys[number])
        drafted.num_published = num_full
