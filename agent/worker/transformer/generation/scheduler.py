"""Scheduling on rank 0: continuous batching within the KV cache's capacity. Pure: no torch, clock or sockets.

Sequences are admitted in order of arrival, once the KV cache has room for the whole context. The prompt is then prefilled, in
chunks if it is long; prefill and decoding steps alternate, so that running answers continue.

A step may be scheduled while others are in flight; sequences that wait for a token of these have no pending tokens and are left
out. To keep several stages of a pipeline busy, decoding sequences are divided into groups that take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hearth.plan.transformer import GenerationLimits
from hearth.wire.messages import GenerateTokens, KeptCache, MovedCache, NewSequence, SequenceRows, StepOrder


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of equal tokens at the beginning."""
    return next((n for n, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), min(len(a), len(b)))


@dataclass
class SequenceState:
    """One request. `pending` are the tokens that are not in the KV cache yet: of the prompt, later the newest one."""

    number: int
    request: GenerateTokens
    pending: list[int]
    num_prompt_tokens: int
    generated: list[int] = field(default_factory=list)
    kept: KeptCache | None = None  # of an earlier plan, whose rows it takes over
    num_kept_rows: int = 0
    started: bool = False
    last_order: int = 0  # number of the last order that contained it
    prompt: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = list(self.pending)

    @property
    def capacity(self) -> int:
        """Maximum tokens in its KV cache; the last generated token is never fed to the model."""
        return self.num_prompt_tokens + self.request.max_tokens - 1

    @property
    def prefilled(self) -> bool:
        return bool(self.generated)

    @property
    def ended(self) -> bool:
        if not self.generated:
            return False
        return self.generated[-1] in self.request.stop_ids or len(self.generated) >= self.request.max_tokens

    @property
    def num_computed_rows(self) -> int:
        """Rows of its KV cache that have been ordered."""
        return len(self.prompt) + len(self.generated) - len(self.pending)

    def is_continued_by(self, request: GenerateTokens, prompt: list[int]) -> bool:
        """Whether `request` asks for the rest of this answer, with all or some of its tokens so far in the prompt."""
        own, count = self.request, len(prompt) - len(self.prompt)
        return (
            own.stream == request.stream != ""
            and 0 <= count <= len(self.generated) - self.ended
            and (request.first_index, request.max_tokens) == (own.first_index + count, own.max_tokens - count)
            and (request.sampling, request.stop_ids) == (own.sampling, own.stop_ids)
            and prompt == [*self.prompt, *self.generated[:count]]
        )


class Scheduler:
    """Decides the steps of a generation. `limits` is the capacity that the plan reserves.

    The caller assigns unique numbers to sequences. `whole_prompts`: prompts are not split into chunks, which attention by
    rows does not support. `num_groups`: number of groups of decoding sequences.
    """

    def __init__(self, limits: GenerationLimits, whole_prompts: bool = False, num_groups: int = 1) -> None:
        self._limits = limits
        self._whole_prompts = whole_prompts
        self._num_groups = num_groups
        self._num_orders = 0
        self._waiting: deque[SequenceState] = deque()
        self._running: dict[int, SequenceState] = {}
        self._freed: list[int] = []
        self._kept: dict[str, KeptCache] = {}  # of the plan's ranks, by stream, until a sequence takes it over
        self._dropped: list[str] = []
        self._paused: dict[int, SequenceState] = {}  # whose KV caches are kept, by number, oldest first
        self._prefilled_last = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and nothing to free."""
        return not (self._waiting or self._running or self._freed or self._dropped)

    @property
    def running(self) -> dict[int, SequenceState]:
        return self._running

    def fits(self, sequence: SequenceState) -> bool:
        """Whether the sequence can ever be admitted."""
        return sequence.capacity <= self.max_sequence_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum tokens of one sequence."""
        limits = self._limits
        room = min(limits.kv_tokens, limits.context or limits.kv_tokens)
        return min(room, limits.prefill_rows) if self._whole_prompts else room

    def keep(self, caches: Iterable[KeptCache]) -> None:
        """Let the sequences of these streams continue with the rows that the ranks have kept of earlier plans."""
        self._kept = {kept.stream: kept for kept in caches}

    @property
    def has_kept(self) -> bool:
        """Whether the ranks keep KV caches of earlier plans that no sequence uses."""
        return bool(self._kept)

    def drop_unclaimed(self) -> None:
        """Have the ranks free the KV caches of earlier plans for which no sequence waits."""
        claimed = {sequence.kept.stream for sequence in self._waiting if sequence.kept is not None}
        for stream in [stream for stream in self._kept if stream not in claimed]:
            self._drop(stream)

    def add(self, sequence: SequenceState) -> None:
        sequence.kept = self._kept.get(sequence.request.stream)
        self._waiting.append(sequence)

    def resume(self, request: GenerateTokens, prompt: list[int]) -> SequenceState | None:
        """The sequence that `request` continues, if there is one: of the same stream, with equal tokens. It goes on.

        It may have been cancelled or have ended, because its coordinator was gone, or still run for that one.
        """
        known = [*self._running.values(), *self._paused.values(), *self._waiting]
        found = next((sequence for sequence in known if sequence.is_continued_by(request, prompt)), None)
        if found is not None and found.number in self._paused:
            if len(self._running) >= self._limits.max_sequences:
                return None
            self._running[found.number] = self._paused.pop(found.number)
        return found

    def remove(self, number: int) -> None:
        """Remove a sequence that has not been paused. The next step frees its memory; unknown numbers are ignored."""
        sequence = self._running.pop(number, None)
        if sequence is not None and sequence.started:
            self._freed.append(number)
        elif sequence is not None and sequence.kept is not None:  # of which nothing was taken yet
            self._kept[sequence.kept.stream] = sequence.kept
        self._waiting = deque(sequence for sequence in self._waiting if sequence.number != number)

    def pause(self, number: int) -> bool:
        """End a sequence for now. One of a named stream may go on, here or in another plan: returns whether it is kept.

        Its KV cache is then kept until its room is needed, or until `expire`.
        """
        sequence = self._running.get(number)
        if sequence is not None and sequence.started and sequence.request.stream:
            self._paused[number] = self._running.pop(number)
            return True
        self.remove(number)
        return False

    def expire(self, number: int) -> None:
        """Have the ranks free the KV cache of a sequence, unless it has been freed or goes on."""
        if self._paused.pop(number, None) is not None:
            self._freed.append(number)

    def next_order(self) -> StepOrder | None:
        """Decide the next step, which must then be executed. None: nothing to do until a step in flight has ended."""
        self._admit()
        ready = [sequence for sequence in self._running.values() if sequence.pending]
        prefilling = [sequence for sequence in ready if not sequence.prefilled]
        decoding = [sequence for sequence in ready if sequence.prefilled]
        if not (ready or self._freed or self._dropped):
            return None
        freed, self._freed = tuple(self._freed), []
        dropped, self._dropped = tuple(self._dropped), []
        self._num_orders += 1
        if prefilling and not (decoding and self._prefilled_last):
            self._prefilled_last = True
            rows = self._prefill_rows(prefilling)
            return StepOrder(kind="prefill", rows=rows, freed=freed, dropped_streams=dropped)
        self._prefilled_last = False
        rows = tuple(self._rows(sequence, 1) for sequence in self._next_group(decoding))
        return StepOrder(kind="decode", rows=rows, freed=freed, dropped_streams=dropped)

    def append_token(self, number: int, token: int) -> None:
        """Append the token that a step has sampled, unless the sequence has been removed."""
        sequence = self._running.get(number) or self._paused.get(number)
        if sequence is not None:
            sequence.generated.append(token)
            sequence.pending.append(token)

    def _admit(self) -> None:
        used = sum(sequence.capacity for sequence in (*self._running.values(), *self._paused.values()))
        while self._waiting and len(self._running) < self._limits.max_sequences:
            first = self._waiting[0]
            while self._paused and used + first.capacity > self._limits.kv_tokens:
                number = next(iter(self._paused))
                used -= self._paused.pop(number).capacity
                self._freed.append(number)
            if used + first.capacity > self._limits.kv_tokens:
                return  # strictly first come, first served; otherwise a long context could wait for ever
            self._take_kept(first, used)
            used += first.capacity
            self._running[first.number] = self._waiting.popleft()

    def _take_kept(self, sequence: SequenceState, used: int) -> None:
        """Let a sequence take over what is kept of its stream, if there is memory for both at once. `used` tokens are taken.

        Drops other kept KV caches, the oldest first, if there is not memory for all.
        """
        kept, sequence.kept = self._kept.get(sequence.request.stream), None
        num_rows = 0
        if kept is not None:
            tokens = np.frombuffer(kept.token_ids, "<i4").tolist()
            # One row at least is computed: a token is sampled after it.
            num_rows = min(_common_prefix(tokens, sequence.pending), kept.num_rows, len(sequence.pending) - 1)
        own = kept.reserved_tokens if kept is not None else 0
        while True:
            others = [other for other in self._kept.values() if other is not kept]
            reserved = sum(other.reserved_tokens for other in others)
            most = used + reserved + max(sequence.capacity, num_rows + own)
            if most <= self._limits.kv_tokens or not others:
                break
            self._drop(others[0].stream)
        if kept is None:
            return
        if num_rows < 1 or most > self._limits.kv_tokens:
            self._drop(kept.stream)
            return
        del self._kept[kept.stream]
        sequence.kept, sequence.num_kept_rows = kept, num_rows

    def _drop(self, stream: str) -> None:
        del self._kept[stream]
        self._dropped.append(stream)

    def _next_group(self, sequences: list[SequenceState]) -> list[SequenceState]:
        """The group that decodes next: the sequences that have waited longest."""
        num_decoding = sum(sequence.prefilled for sequence in self._running.values())
        return sorted(sequences, key=lambda sequence: sequence.last_order)[: -(-num_decoding // self._num_groups)]

    def _prefill_rows(self, sequences: list[SequenceState]) -> tuple[SequenceRows, ...]:
        room = self._limits.prefill_rows
        chunks = []
        for sequence in sequences:
            if room == 0 or (self._whole_prompts and len(sequence.pending) > room):
                break
            rows = self._rows(sequence, room)
            room -= len(rows.token_ids)
            chunks.append(rows)
        return tuple(chunks)

    def _rows(self, sequence: SequenceState, count: int) -> SequenceRows:
        new = moved = None
        if not sequence.started and sequence.kept is not None and sequence.num_kept_rows:
            moved = MovedCache(
                stream=sequence.kept.stream,
                token_ids=tuple(sequence.pending[: sequence.num_kept_rows]),
                transfers=sequence.kept.transfers,
                transfer_seconds=sequence.kept.transfer_seconds,
            )
            sequence.pending = sequence.pending[sequence.num_kept_rows :]
        tokens, sequence.pending = sequence.pending[:count], sequence.pending[count:]
        sequence.last_order = self._num_orders
        if not sequence.started:
            sequence.started = True
            new = NewSequence(
                capacity=max(sequence.capacity, 1),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.request.sampling,
                first_index=sequence.request.first_index,
                stream=sequence.request.stream,
                moved=moved,
            )
        return SequenceRows(sequence=sequence.number, token_ids=tuple(tokens), sample=not sequence.pending, new=new)
