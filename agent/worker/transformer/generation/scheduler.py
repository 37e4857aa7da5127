"""What rank 0 does next: continuous batching under the KV cache's budget. Pure: neither torch nor clock nor sockets.

A sequence is admitted, in the order of arrival, when the whole of its context has room. Then its prompt is prefilled, in
chunks where it is long; a step of decoding comes between two of prefilling, so that running answers go on.

An order may be given while others are still in flight: sequences that wait for a token have nothing pending, and are
left out. So that the stages of a pipeline decode at the same time, sequences then take turns in a few groups.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hearth.plan.transformer import GenerationLimits
from hearth.wire.messages import GenerateTokens, NewSequence, SequenceRows, StepOrder


@dataclass
class Sequence:
    """One request. `pending` are tokens that are in no KV cache yet: the prompt's, later the newest one."""

    number: int
    request: GenerateTokens
    pending: list[int]
    num_prompt_tokens: int
    generated: list[int] = field(default_factory=list)
    started: bool = False
    last_turn: int = 0  # the order that it was last in

    @property
    def capacity(self) -> int:
        """Tokens that its KV cache holds at the end: the last token that is generated is never fed."""
        return self.num_prompt_tokens + self.request.max_tokens - 1

    @property
    def prefilled(self) -> bool:
        return bool(self.generated)

    @property
    def ended(self) -> bool:
        if not self.generated:
            return False
        return self.generated[-1] in self.request.stop_ids or len(self.generated) >= self.request.max_tokens


class Scheduler:
    """`promise` is the plan's. Sequences are numbered by the caller, and never twice.

    `whole_prompts`: none comes in chunks (where attention is split by rows, earlier chunks are not at hand).
    `num_groups`: the sequences that decode are spread over as many steps.
    """

    def __init__(self, promise: GenerationLimits, whole_prompts: bool = False, num_groups: int = 1) -> None:
        self._promise = promise
        self._whole_prompts = whole_prompts
        self._num_groups = num_groups
        self._num_orders = 0
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._freed: list[int] = []
        self._prefilled_last = False

    @property
    def idle(self) -> bool:
        """Nothing to compute and nothing to free."""
        return not (self._waiting or self._running or self._freed)

    @property
    def running(self) -> dict[int, Sequence]:
        return self._running

    def fits(self, sequence: Sequence) -> bool:
        """Whether it can ever be admitted."""
        return sequence.capacity <= self.room

    @property
    def room(self) -> int:
        """Tokens of one sequence at most."""
        promise = self._promise
        room = min(promise.kv_tokens, promise.context or promise.kv_tokens)
        return min(room, promise.prefill_rows) if self._whole_prompts else room

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, number: int) -> None:
        """Cancelled or ended: its memory is freed with the next step. An unknown number is none of ours any more."""
        sequence = self._running.pop(number, None)
        if sequence is not None and sequence.started:
            self._freed.append(number)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.number != number)

    def next_order(self) -> StepOrder | None:
        """The next step; it is taken to be executed. None: there is nothing to do before a step in flight has ended."""
        self._admit()
        ready = [sequence for sequence in self._running.values() if sequence.pending]
        new = [sequence for sequence in ready if not sequence.prefilled]
        old = [sequence for sequence in ready if sequence.prefilled]
        if not (ready or self._freed):
            return None
        freed, self._freed = tuple(self._freed), []
        self._num_orders += 1
        if new and not (old and self._prefilled_last):
            self._prefilled_last = True
            return StepOrder(kind="prefill", rows=self._chunks(new), freed=freed)
        self._prefilled_last = False
        rows = tuple(self._rows(sequence, 1) for sequence in self._group(old))
        return StepOrder(kind="decode", rows=rows, freed=freed)

    def take(self, number: int, token: int) -> None:
        """The token that a step chose."""
        sequence = self._running[number]
        sequence.generated.append(token)
        sequence.pending.append(token)

    def _admit(self) -> None:
        used = sum(sequence.capacity for sequence in self._running.values())
        while self._waiting and len(self._running) < self._promise.max_sequences:
            first = self._waiting[0]
            if used + first.capacity > self._promise.kv_tokens:
                return  # whoever came later waits as well, or a long context would wait for ever
            used += first.capacity
            self._running[first.number] = self._waiting.popleft()

    def _group(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those whose turn it is: who has waited longest comes first."""
        num_decoding = sum(sequence.prefilled for sequence in self._running.values())
        return sorted(sequences, key=lambda sequence: sequence.last_turn)[: -(-num_decoding // self._num_groups)]

    def _chunks(self, sequences: list[Sequence]) -> tuple[SequenceRows, ...]:
        room = self._promise.prefill_rows
        found = []
        for sequence in sequences:
            if room == 0 or (self._whole_prompts and len(sequence.pending) > room):
                break
            rows = self._rows(sequence, room)
            room -= len(rows.token_ids)
            found.append(rows)
        return tuple(found)

    def _rows(self, sequence: Sequence, count: int) -> SequenceRows:
        tokens, sequence.pending = sequence.pending[:count], sequence.pending[count:]
        sequence.last_turn = self._num_orders
        new = None
        if not sequence.started:
            sequence.started = True
            new = NewSequence(
                capacity=max(sequence.capacity, 1),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.request.sampling,
                first_index=sequence.request.first_index,
            )
        return SequenceRows(sequence=sequence.number, token_ids=tuple(tokens), sample=not sequence.pending, new=new)
