"""Scheduling on rank 0: continuous batching within the KV cache's capacity. Pure: no torch, clock or sockets.

Sequences are admitted once the paged KV cache has room for the prompt: those of one caller in order of arrival, and of several
callers that of the one with the smallest share. A caller's share is that of the running sequences or of the KV cache, whichever
is larger (dominant resource fairness: Ghodsi et al., NSDI 2011). The prompt is then prefilled, in chunks if it is long, without
the full blocks that the prefix cache has of it, and callers take turns; prefill and decoding steps alternate, so that running
answers continue. A sequence takes further blocks as it grows. If there are none, or if a sequence waits for room with which its
caller's share would still be smaller, the newest sequence of the caller with the largest is preempted, of heavy callers (below)
first: its blocks are freed, and it waits for room again. Then it is computed once more, with the tokens that it has generated,
but for what the prefix cache has.

A caller with more than twice as many sequences as another one is heavy. While there are lighter ones, also such as have just
got their answers, heavy callers get an eighth of the time that these take: while they have had more, orders have rows of theirs
only if no lighter caller has any. Their prompts are prefilled in small chunks, since a lighter caller may wait for each.

A decoding step may verify guesses of a sequence's next tokens (`speculation`): they are further rows of the step. Nothing is
preempted for them, and they take no block that another sequence could need soon.

A step may be scheduled while others are in flight; sequences that wait for a token of these have no pending tokens and are left
out. To keep several stages of a pipeline busy, decoding sequences are divided into groups that take turns.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from agent.worker.transformer.generation.block_pool import BlockPool, num_blocks_for
from agent.worker.transformer.generation.sequence import SequenceState, common_prefix
from agent.worker.transformer.generation.speculation import Speculation
from hearth.plan.transformer import KV_BLOCK_TOKENS, GenerationLimits
from hearth.wire import messages as wire

_HEAVY = 2  # times the sequences of another caller make one heavy
_HEAVY_SHARE = 0.125  # of the time of lighter callers, for the heavy ones
_HEAVY_CHUNK_ROWS = 64  # of their prompts in one step: enough for matrix products to be efficient
# For which a caller counts that has no sequence any more: an app asks again soon, or not at all.
_EXPECTED_SECONDS = 1.0


class _Order(NamedTuple):
    """An order in flight: the number of its rows of light and of heavy callers, and whether any caller is heavy."""

    num_light: int
    num_heavy: int
    is_shared: bool


class Scheduler:
    """Decides the steps of a generation. `limits` is the capacity that the plan reserves.

    The caller assigns unique numbers to sequences. `whole_prompts`: prompts are not split into chunks, which attention by
    rows does not support, nor are they taken from the prefix cache. `num_groups`: number of groups of decoding sequences.
    """

    def __init__(
        self,
        limits: GenerationLimits,
        whole_prompts: bool = False,
        num_groups: int = 1,
        speculation: Speculation | None = None,
    ) -> None:
        self._limits = limits
        self._speculation = speculation or Speculation()
        self._whole_prompts = whole_prompts
        self._num_groups = num_groups
        self._num_orders = 0
        self._num_caches = 0
        self._pool = BlockPool(limits.num_kv_blocks)
        self._waiting: deque[SequenceState] = deque()
        self.running: dict[int, SequenceState] = {}
        self._by_cache: dict[int, SequenceState] = {}  # running and paused ones
        self._freed: list[int] = []
        self._published: list[wire.PublishedBlock] = []  # since the last order
        self._kept_prefixes: wire.KeptPrefixes | None = None  # of the plan's ranks, until the first order
        self._kept: dict[str, wire.KeptCache] = {}  # of the plan's ranks, by stream, until a sequence takes it over
        self._dropped: list[str] = []
        self._paused: dict[int, SequenceState] = {}  # whose KV caches are kept, by number, oldest first
        self._prefilled_last = False
        self._in_flight: deque[_Order] = deque()
        self._heavy: frozenset[str] = frozenset()  # callers, as of the last order
        self._owed_seconds = 0.0  # that heavy callers have had beyond their share
        self._seconds = 0.0  # of all orders
        self._seen: dict[str, tuple[float, int]] = {}  # by caller: `_seconds`, and its sequences, when it had some
        self._prefilled_in: Counter[str] = Counter()  # by caller: the number of the last order with rows of its prompts

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and nothing to free."""
        return not (self._waiting or self.running or self._freed or self._dropped or self._kept_prefixes)

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks of the KV cache that no sequence uses."""
        return self._pool.num_free

    def with_cache(self, number: int) -> SequenceState | None:
        """The sequence of the KV cache with this number, by which orders name sequences."""
        return self._by_cache.get(number)

    def fits(self, sequence: SequenceState) -> bool:
        """Whether the sequence can ever be admitted."""
        return sequence.capacity <= self.max_sequence_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum tokens of one sequence."""
        limits = self._limits
        room = min(limits.kv_tokens, limits.context or limits.kv_tokens)
        return min(room, limits.prefill_rows) if self._whole_prompts else room

    def keep(self, caches: Iterable[wire.KeptCache], prefixes: wire.KeptPrefixes | None = None) -> None:
        """Let sequences use what the ranks have kept of earlier plans: those of these streams, and the prefix cache."""
        self._kept = {kept.stream: kept for kept in caches}
        self._kept_prefixes = prefixes

    @property
    def has_kept(self) -> bool:
        """Whether the ranks keep KV caches of earlier plans that no sequence uses."""
        return bool(self._kept)

    def drop_unclaimed(self) -> None:
        """Have the ranks free the KV caches of earlier plans for which no sequence waits."""
        claimed = {sequence.request.stream for sequence in self._waiting}
        for stream in [stream for stream in self._kept if stream not in claimed]:
            self._drop(stream)

    def add(self, sequence: SequenceState) -> None:
        if sequence.request.max_drafted:
            sequence.drafter = self._speculation.new_drafter()
        self._waiting.append(sequence)

    def resume(self, request: wire.GenerateTokens, prompt: list[int]) -> SequenceState | None:
        """The sequence that `request` continues, if there is one: of the same stream, with equal tokens. It goes on.

        It may have been cancelled or have ended, because its coordinator was gone, or still run for that one.
        """
        known = [*self.running.values(), *self._paused.values(), *self._waiting]
        found = next((sequence for sequence in known if sequence.is_continued_by(request, prompt)), None)
        if found is not None and found.number in self._paused:
            if len(self.running) >= self._limits.max_sequences:
                return None
            self.running[found.number] = self._paused.pop(found.number)
        return found

    def remove(self, number: int) -> None:
        """Remove a sequence that has not been paused. The next step frees its memory; unknown numbers are ignored."""
        if (sequence := self.running.pop(number, None)) is not None:
            self._free(sequence)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.number != number)

    def pause(self, number: int) -> bool:
        """End a sequence for now. One of a named stream may go on, here or in another plan: returns whether it is kept.

        Its KV cache is then kept until its room is needed, or until `expire`.
        """
        sequence = self.running.get(number)
        if sequence is not None and sequence.request.stream:
            self._paused[number] = self.running.pop(number)
            return True
        self.remove(number)
        return False

    def expire(self, number: int) -> None:
        """Have the ranks free the KV cache of a sequence, unless it has been freed or goes on."""
        if (sequence := self._paused.pop(number, None)) is not None:
            self._free(sequence)

    def next_order(self) -> wire.StepOrder | None:
        """Decide the next step, which must then be executed. None: nothing to do until a step in flight has ended."""
        if self._kept_prefixes is not None:
            return self._adopt(self._kept_prefixes)
        self._num_orders += 1
        self._heavy = self._heavy_callers()
        rows = self._next_rows(self._heavy) if self._owed_seconds > 0 else ()
        rows = rows or self._next_rows(frozenset())
        if not (rows or self._freed or self._dropped):
            return None
        num_rows = sum(len(each.token_ids) for each in rows)
        of_heavy = (each for each in rows if self._by_cache[each.sequence].request.caller in self._heavy)
        num_heavy = sum(len(each.token_ids) for each in of_heavy)
        self._in_flight.append(_Order(num_rows - num_heavy, num_heavy, bool(self._heavy)))
        freed, self._freed = tuple(self._freed), []
        dropped, self._dropped = tuple(self._dropped), []
        published, self._published = [each for each in self._published if self._pool.is_cached(*each)], []
        kind: Literal["prefill", "decode"] = "prefill" if self._prefilled_last else "decode"
        return wire.StepOrder(kind=kind, rows=rows, freed=freed, dropped_streams=dropped, published=tuple(published))

    def took(self, seconds: float) -> None:
        """The oldest order in flight has ended, after so many seconds."""
        if not self._in_flight:  # of a scheduler before this one
            return
        num_light, num_heavy, is_shared = self._in_flight.popleft()
        self._seconds += seconds
        if not is_shared:
            self._owed_seconds = 0.0
            return
        times = self._speculation.times
        light_seconds = seconds * num_light / max(num_light + num_heavy, 1)
        if num_heavy and times.is_measured(num_light):
            light_seconds = min(times.seconds(num_light), seconds)
        owed_seconds = self._owed_seconds + seconds - (1 + _HEAVY_SHARE) * light_seconds
        # What heavy callers have while a lighter one is expected is limited: they would wait too long once it has come.
        self._owed_seconds = min(max(owed_seconds, 0.0), max(_EXPECTED_SECONDS, seconds))

    def _heavy_callers(self) -> frozenset[str]:
        """The callers with more than twice as many sequences as another one."""
        present = Counter(each.request.caller for each in (*self.running.values(), *self._waiting))
        expected = self._seconds - _EXPECTED_SECONDS
        self._seen = {caller: (at, count) for caller, (at, count) in self._seen.items() if at >= expected}
        self._seen |= {caller: (self._seconds, count) for caller, count in present.items()}
        if len(self._seen) < 2:
            return frozenset()
        least = min(count for _, count in self._seen.values())
        return frozenset(caller for caller, (_, count) in self._seen.items() if count > _HEAVY * least)

    def _next_rows(self, left_out: Container[str]) -> tuple[wire.SequenceRows, ...]:
        """The next rows to prefill or to decode, but none of the callers `left_out`."""
        running = [each for each in self.running.values() if each.request.caller not in left_out]
        decoding = [each for each in running if each.pending and each.prefilled]
        rows = self._prefill_rows(left_out) if not (decoding and self._prefilled_last) else ()
        self._prefilled_last = bool(rows)
        return rows or self._decode_rows(decoding)

    def _adopt(self, kept: wire.KeptPrefixes) -> wire.StepOrder:
        """Have the ranks take what they have kept of the prefix cache into blocks of this plan, as far as there is room."""
        self._kept_prefixes = None
        self._in_flight.append(_Order(0, 0, False))
        num_blocks = len(kept.keys) // wire.PREFIX_KEY_BYTES
        num_dropped = max(num_blocks - max(self._pool.num_free - self._num_kept_blocks, 0), 0)
        kept = kept.model_copy(update={"keys": kept.keys[num_dropped * wire.PREFIX_KEY_BYTES :]})
        blocks = self._pool.adopt(wire.split_keys(kept.keys))
        return wire.StepOrder(kind="decode", rows=(), adopted=wire.AdoptedPrefixes(kept=kept, blocks=tuple(blocks)))

    def append_tokens(self, cache: int, tokens: Sequence[int]) -> tuple[SequenceState | None, list[int]]:
        """Append a step's accepted drafts and the token after them, up to a stop token.

        Returns the sequence and what was appended; None and nothing if it was removed or preempted.
        """
        sequence = self._by_cache.get(cache)
        if sequence is None:
            return None, []
        num_accepted = len(tokens) - 1
        if sequence.drafter is not None:
            self._speculation.record(sequence.drafter, len(sequence.drafts), num_accepted)
        sequence.num_drafted += len(sequence.drafts)
        sequence.num_accepted += num_accepted
        stop = next((n for n, token in enumerate(tokens) if token in sequence.request.stop_ids), num_accepted)
        appended = list(tokens[: stop + 1])
        sequence.generated += appended
        sequence.pending.append(appended[-1])
        sequence.num_rejected = len(sequence.drafts) - stop
        sequence.drafts = ()
        self._publish(sequence)
        return sequence, appended

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _admit(self, sequence: SequenceState) -> wire.NewSequence | None:
        """Start the next waiting sequence, with the rows that it does not have to compute, once there is room for it.

        None of the others goes before it then, since a long prompt could wait for ever. A block per running sequence stays
        free, so that these can grow for a while before the new one must be preempted.
        """
        while (admitted := self._start(sequence)) is None:
            shares, victim = self._shares_with(sequence), self._victim()
            if victim is None or shares[victim.request.caller] <= shares[sequence.request.caller]:
                return None
            self._preempt(victim)
        return admitted

    def _next_waiting(self, left_out: Container[str]) -> SequenceState | None:
        """The sequence that is admitted next: the first one of the caller with the smallest share, but none `left_out`."""
        waiting = [each for each in self._waiting if each.request.caller not in left_out]
        if not waiting:
            return None
        shares = self._shares_with()
        return min(waiting, key=lambda each: shares[each.request.caller])

    def _victim(self) -> SequenceState | None:
        """The running sequence to preempt, except those that are in this order."""
        others = (each for each in self.running.values() if each.last_order < self._num_orders)
        return max(others, key=self._preemption_order(), default=None)

    def _preemption_order(self) -> Callable[[SequenceState], tuple[bool, float, int]]:
        """A key by which the sequence to preempt is the largest: of a heavy caller, of the largest share, the newest."""
        shares = self._shares_with()
        return lambda each: (each.request.caller in self._heavy, shares[each.request.caller], each.cache)

    def _shares_with(self, *further: SequenceState) -> defaultdict[str, float]:
        """Each caller's share of the running sequences or of the KV cache, whichever is larger, as if `further` ran too.

        Blocks that several sequences of a caller share count once.
        """
        num_sequences = Counter(each.request.caller for each in (*self.running.values(), *further))
        blocks = defaultdict[str, set[int]](set)
        for each in self.running.values():
            blocks[each.request.caller].update(each.blocks)
        num_blocks = Counter({caller: len(of_caller) for caller, of_caller in blocks.items()})
        for each in further:
            num_blocks[each.request.caller] += num_blocks_for(len(each.pending))
        shares = defaultdict[str, float](float)
        for caller, count in num_sequences.items():
            held = num_blocks[caller] / self._limits.num_kv_blocks
            shares[caller] = max(count / self._limits.max_sequences, held)
        return shares

    def _start(self, sequence: SequenceState) -> wire.NewSequence | None:
        """Start a waiting sequence if there is room for it."""
        if len(self.running) >= self._limits.max_sequences:
            return None
        kept = self._kept.get(sequence.request.stream)
        blocks = self._cached_prefix(sequence) if kept is None else []
        count = num_blocks_for(len(sequence.pending)) - len(blocks)
        if not self._make_room(count + len(self.running), kept):
            if kept is None or not self._make_room(count + len(self.running)):
                self._pool.release(blocks)
                return None
            kept = None
        num_cached = len(blocks) * KV_BLOCK_TOKENS
        sequence.blocks = blocks + self._pool.allocate(count, blocks[-1] if blocks else None)
        self._num_caches += 1
        sequence.cache = self._num_caches
        self._by_cache[sequence.cache] = self.running[sequence.number] = sequence
        self._waiting.remove(sequence)
        moved = self._take_kept(sequence, kept) if kept is not None else None
        cached, sequence.pending = sequence.pending[:num_cached], sequence.pending[num_cached:]
        if not sequence.last_order:
            sequence.num_kept_rows = len(moved.token_ids) if moved is not None else num_cached
        return wire.NewSequence(
            blocks=tuple(sequence.blocks),
            cached_tokens=tuple(cached),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.request.sampling,
            first_index=sequence.request.first_index,
            stream=sequence.request.stream,
            grammar=sequence.request.grammar,
            top_log_probs=sequence.request.top_log_probs,
            moved=moved,
        )

    def _cached_prefix(self, sequence: SequenceState) -> list[int]:
        """Use the blocks of a sequence's first tokens in the prefix cache. One row at least is computed: the last."""
        if not self._shares_prefixes(sequence):
            return []
        return self._pool.take_prefix(sequence.prefix_keys()[: (len(sequence.pending) - 1) // KV_BLOCK_TOKENS])

    def _shares_prefixes(self, sequence: SequenceState) -> bool:
        return not self._whole_prompts and bool(sequence.request.prefix_scope)

    def _make_room(self, count: int, kept: wire.KeptCache | None = None) -> bool:
        """Have so many free blocks, in addition to what is kept of earlier plans. Returns whether there are.

        Frees paused sequences first, and drops the KV caches of earlier plans but `kept` then; the oldest of each first.
        """
        while self._pool.num_free < count and self._paused:
            self._free(self._paused.pop(next(iter(self._paused))))
        if self._pool.num_free < count:
            return False
        for stream, other in list(self._kept.items()):
            if self._pool.num_free - self._num_kept_blocks >= count:
                break
            if other is not kept:
                self._drop(stream)
        return self._pool.num_free - self._num_kept_blocks >= count

    @property
    def _num_kept_blocks(self) -> int:
        """Number of blocks that would take the memory of what is kept of earlier plans."""
        return sum(num_blocks_for(kept.reserved_tokens) for kept in self._kept.values())

    def _grow(self, sequence: SequenceState, num_rows: int) -> tuple[int, ...] | None:
        """The blocks that a decoding sequence takes for further rows, after preemptions if necessary; None: of itself."""
        count = num_blocks_for(sequence.num_computed_rows + num_rows) - len(sequence.blocks)
        if count <= 0:
            return ()
        while not self._make_room(count):
            victim = self._victim()
            assert victim is not None  # `sequence` at least
            self._preempt(victim)
            if victim is sequence:
                return None
        new = self._pool.allocate(count, sequence.blocks[-1])
        sequence.blocks += new
        return tuple(new)

    def _preempt(self, sequence: SequenceState) -> None:
        """Free a sequence's KV cache, and let it wait, before all others, to be computed again."""
        self._free(self.running.pop(sequence.number))
        sequence.pending = [*sequence.prompt, *sequence.generated]
        self._waiting.appendleft(sequence)

    def _free(self, sequence: SequenceState) -> None:
        del self._by_cache[sequence.cache]
        self._freed.append(sequence.cache)
        self._pool.release(sequence.blocks)
        sequence.cache, sequence.blocks, sequence.num_published = 0, [], 0
        sequence.drafts, sequence.num_rejected = (), 0

    def _take_kept(self, sequence: SequenceState, kept: wire.KeptCache) -> wire.MovedCache | None:
        """Let a sequence take over what is kept of its stream; None if its tokens are others."""
        tokens = np.frombuffer(kept.token_ids, "<i4").tolist()
        # One row at least is computed: a token is sampled after it.
        num_rows = min(common_prefix(tokens, sequence.pending), kept.num_rows, len(sequence.pending) - 1)
        if num_rows < 1:
            self._drop(kept.stream)
            return None
        del self._kept[kept.stream]
        moved = wire.MovedCache(
            stream=kept.stream,
            token_ids=tuple(sequence.pending[:num_rows]),
            transfers=kept.transfers,
            transfer_seconds=kept.transfer_seconds,
        )
        sequence.pending = sequence.pending[num_rows:]
        return moved

    def _drop(self, stream: str) -> None:
        del self._kept[stream]
        self._dropped.append(stream)

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _decode_rows(self, sequences: list[SequenceState]) -> tuple[wire.SequenceRows, ...]:
        """The next rows of the group that decodes next: the sequences that have waited longest."""
        num_decoding = sum(sequence.prefilled for sequence in self.running.values())
        group = sorted(sequences, key=lambda each: each.last_order)[: -(-num_decoding // self._num_groups)]
        if len(group) > 1:  # the last to be preempted first: one whose rows are in the order stays
            group.sort(key=self._preemption_order())
        rows = []
        for sequence, drafts in zip(group, self._drafts(group), strict=True):
            if sequence.cache and (blocks := self._grow(sequence, 1 + len(drafts))) is not None:
                rows.append(self._rows(sequence, 1, blocks, drafts=drafts))
        return tuple(rows)

    def _drafts(self, group: Sequence[SequenceState]) -> list[list[int]]:
        """The drafted tokens of each sequence of a decoding step.

        The plan has memory for `max_sequences` rows of logits; and as for admission, a block per running sequence stays free.
        """
        if not any(sequence.drafter for sequence in group):
            return [[] for _ in group]
        num_free = self._pool.num_free - self._num_kept_blocks - len(self.running)
        num_blocks = max(num_free, 0) // len(group)  # further ones of each sequence
        most = [
            min(
                sequence.request.max_drafted,
                sequence.request.max_tokens - len(sequence.generated) - 1,
                (len(sequence.blocks) + num_blocks) * KV_BLOCK_TOKENS - sequence.num_computed_rows - 1,
            )
            for sequence in group
        ]
        return self._speculation.drafts(group, most, self._limits.max_sequences - len(group))

    def _prefill_rows(self, left_out: Container[str]) -> tuple[wire.SequenceRows, ...]:
        """The next rows of prompts: of the caller that has waited longest, of running sequences before those it admits."""
        room = self._limits.prefill_rows
        # A step of one block's rows takes little longer than to read the weights.
        chunk_rows = KV_BLOCK_TOKENS if self._owed_seconds > 0 else _HEAVY_CHUNK_ROWS
        heavy_room = room if self._whole_prompts else min(room, chunk_rows)
        chunks: list[wire.SequenceRows] = []
        is_full = False  # whether the next waiting sequence has no room
        while True:
            others = (each for each in self.running.values() if each.request.caller not in left_out)
            unfinished = (each for each in others if each.pending and not each.prefilled)
            candidates = [each for each in unfinished if each.last_order < self._num_orders]
            if not is_full and (waiting := self._next_waiting(left_out)) is not None:
                candidates.append(waiting)
            following = min(candidates, key=lambda each: self._prefilled_in[each.request.caller], default=None)
            if following is None:
                break
            is_heavy = following.request.caller in self._heavy
            most = min(room, heavy_room) if is_heavy else room
            if most <= 0 or (self._whole_prompts and len(following.pending) > most):
                break
            new = None
            if not following.cache and (new := self._admit(following)) is None:
                is_full = True
                continue
            rows = self._rows(following, most, new=new)
            room -= len(rows.token_ids)
            heavy_room -= len(rows.token_ids) if is_heavy else 0
            chunks.append(rows)
            self._prefilled_in[following.request.caller] = self._num_orders
        return tuple(chunks)

    def _rows(
        self,
        sequence: SequenceState,
        count: int,
        blocks: tuple[int, ...] = (),
        new: wire.NewSequence | None = None,
        drafts: Sequence[int] = (),
    ) -> wire.SequenceRows:
        """The next rows of a sequence, at most `count` and its `drafts`."""
        tokens, sequence.pending = sequence.pending[:count], sequence.pending[count:]
        sequence.last_order = self._num_orders
        self._publish(sequence)
        num_rejected, sequence.num_rejected, sequence.drafts = sequence.num_rejected, 0, tuple(drafts)
        return wire.SequenceRows(
            sequence=sequence.cache,
            token_ids=(*tokens, *drafts),
            sample=not sequence.pending,
            num_drafted=len(drafts),
            num_rejected=num_rejected,
            blocks=blocks,
            new=new,
        )

    def _publish(self, sequence: SequenceState) -> None:
        """Let sequences that start later share the blocks that have become full.

        In a step, all rows of a layer are stored before one attends to them, so these may be sequences of the same step.
        """
        num_full = sequence.num_computed_rows // KV_BLOCK_TOKENS
        if num_full > sequence.num_published and self._shares_prefixes(sequence):
            keys = sequence.prefix_keys()
            for index in range(sequence.num_published, num_full):
                if self._pool.publish(sequence.blocks[index], keys[index]):
                    self._published.append(wire.PublishedBlock(sequence.blocks[index], keys[index]))
            sequence.num_published = num_full
