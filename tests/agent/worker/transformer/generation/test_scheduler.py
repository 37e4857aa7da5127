"""Scheduling on rank 0: admission under the KV budget, prompt chunks, fairness, freed memory. Pure."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.worker.transformer.generation.block_pool import PrefixBlocks
from agent.worker.transformer.generation.sampling import verify_drafts
from agent.worker.transformer.generation.scheduler import Scheduler
from agent.worker.transformer.generation.sequence import SequenceState
from agent.worker.transformer.generation.speculation import Speculation
from coordinator.plan.transformer.request import GenerationRequest
from hearth.plan.transformer import KV_BLOCK_TOKENS, GenerationLimits
from hearth.wire.messages import GenerateTokens, KeptPrefixes, SequenceRows, StepOrder, split_keys


def sequence(number: int, prompt: int, max_tokens: int, caller: str = "", scope: str = "") -> SequenceState:
    request = GenerateTokens(holder="test", epoch=1, max_tokens=max_tokens, caller=caller, prefix_scope=scope)
    return SequenceState(number, request, [10 + i for i in range(prompt)], prompt)


def execute_order(
    scheduler: Scheduler, order: StepOrder, answer: Callable[[SequenceRows], list[int]] = lambda rows: [7]
) -> None:
    """Give each sampled row its new tokens, and remove sequences that have ended."""
    for rows in order.rows:
        if rows.sample:
            sequence, _ = scheduler.append_tokens(rows.sequence, answer(rows))
            if sequence is not None and sequence.ended:
                scheduler.remove(sequence.number)


def test_long_prompt_is_prefilled_in_chunks() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=100, max_sequences=4, prefill_rows=8))
    scheduler.add(sequence(1, 20, 3))
    sizes, samples = [], []
    for _ in range(3):
        order = scheduler.next_order()
        assert order.kind == "prefill"
        sizes.append(len(order.rows[0].token_ids))
        samples.append(order.rows[0].sample)
        assert (order.rows[0].new is not None) == (len(sizes) == 1)
        execute_order(scheduler, order)
    assert sizes == [8, 8, 4]
    assert samples == [False, False, True]
    assert scheduler.next_order().kind == "decode"


def test_whole_prompts_are_not_split() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=100, max_sequences=4, prefill_rows=8), whole_prompts=True)
    assert scheduler.max_sequence_tokens == 8
    for number, prompt in ((1, 5), (2, 4), (3, 2)):
        scheduler.add(sequence(number, prompt, 3))
    order = scheduler.next_order()
    assert [(rows.sequence, len(rows.token_ids)) for rows in order.rows] == [(1, 5)]
    execute_order(scheduler, order)
    execute_order(scheduler, scheduler.next_order())
    assert [rows.sequence for rows in scheduler.next_order().rows] == [2, 3]


def test_decode_alternates_with_chunks_of_a_new_prompt() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=100, max_sequences=4, prefill_rows=4))
    scheduler.add(sequence(1, 4, 20))
    execute_order(scheduler, scheduler.next_order())
    scheduler.add(sequence(2, 12, 2))
    kinds = []
    for _ in range(6):
        order = scheduler.next_order()
        kinds.append(order.kind)
        execute_order(scheduler, order)
    assert kinds[:5] == ["decode", "prefill", "decode", "prefill", "decode"] or kinds[:5] == [
        "prefill", "decode", "prefill", "decode", "prefill",
    ]  # fmt: skip


def test_waiting_long_context_is_not_overtaken() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=50, max_sequences=4, prefill_rows=64))
    for number, prompt in ((1, 30), (2, 40), (3, 2)):
        scheduler.add(sequence(number, prompt, 5))
    order = scheduler.next_order()
    assert [rows.sequence for rows in order.rows] == [1]


def test_idle_scheduler_has_freed_all_sequences() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=50, max_sequences=4, prefill_rows=64))
    scheduler.add(sequence(1, 5, 2))
    execute_order(scheduler, scheduler.next_order())
    execute_order(scheduler, scheduler.next_order())
    assert not scheduler.idle
    order = scheduler.next_order()
    assert order.freed == (1,)
    assert not order.rows
    assert scheduler.idle


def test_sequence_cancelled_before_start_is_not_freed() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=50, max_sequences=1, prefill_rows=64))
    scheduler.add(sequence(1, 5, 9))
    scheduler.add(sequence(2, 5, 9))
    execute_order(scheduler, scheduler.next_order())
    scheduler.remove(2)
    scheduler.remove(99)
    scheduler.remove(1)
    assert scheduler.next_order().freed == (1,)
    assert scheduler.idle


class Ranks:
    """What the ranks hold. A row's value is the history of its tokens, on which keys and values depend."""

    def __init__(self, limits: GenerationLimits) -> None:
        self.limits = limits
        self.memory: dict[int, tuple[int, ...]] = {}  # by block and row
        self.blocks: dict[int, list[int]] = {}  # of each KV cache
        self.tokens: dict[int, list[int]] = {}
        self.prefixes = PrefixBlocks()

    def execute(self, order: StepOrder) -> None:
        """Execute an order; check that no row is attended to which is not there, or another's."""
        for freed in order.freed:
            self.prefixes.use(self.blocks[freed])
            del self.blocks[freed], self.tokens[freed]
        assert sum(len(rows.token_ids) for rows in order.rows) <= max(
            self.limits.prefill_rows, self.limits.max_sequences
        )
        assert sum(1 + rows.num_drafted for rows in order.rows if rows.sample) <= self.limits.max_sequences
        assert len({rows.sequence for rows in order.rows}) == len(order.rows)
        for rows in order.rows:
            if rows.new is not None:
                assert rows.sequence not in self.tokens
                self.blocks[rows.sequence] = list(rows.new.blocks)
                self.tokens[rows.sequence] = list(rows.new.cached_tokens)
                self.prefixes.forget(rows.new.blocks[len(rows.new.cached_tokens) // KV_BLOCK_TOKENS :])
            self.prefixes.forget(rows.blocks)
            self.blocks[rows.sequence] += rows.blocks
            del self.tokens[rows.sequence][len(self.tokens[rows.sequence]) - rows.num_rejected :]
            assert len(rows.token_ids) == 1 + rows.num_drafted or order.kind == "prefill"
            for token in rows.token_ids:
                self.tokens[rows.sequence].append(token)
                self.memory[self._place(rows.sequence, len(self.tokens[rows.sequence]) - 1)] = self.history(
                    rows.sequence
                )
        for block, key in order.published:
            self.prefixes.publish(block, key)
        assert len(self.tokens) <= self.limits.max_sequences
        for cache in self.tokens:  # also those that did not take part
            for row in range(len(self.tokens[cache])):
                assert self.memory[self._place(cache, row)] == self.history(cache, row + 1)
        assert (
            max((block for blocks in self.blocks.values() for block in blocks), default=0) < self.limits.num_kv_blocks
        )

    def adopt(self, order: StepOrder, earlier: Ranks) -> None:
        """Take the rows of blocks that were kept of an earlier plan."""
        assert order.adopted is not None
        kept = dict(earlier.prefixes.newest(1 << 20))
        for block, key in zip(order.adopted.blocks, split_keys(order.adopted.kept.keys), strict=True):
            for row in range(KV_BLOCK_TOKENS):
                self.memory[block * KV_BLOCK_TOKENS + row] = earlier.memory[kept[key] * KV_BLOCK_TOKENS + row]
            self.prefixes.publish(block, key)

    def _place(self, cache: int, row: int) -> int:
        return self.blocks[cache][row // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + row % KV_BLOCK_TOKENS

    def history(self, cache: int, count: int | None = None) -> tuple[int, ...]:
        return tuple(self.tokens[cache][:count])

    def answer(self, rows: SequenceRows) -> list[int]:
        """The new tokens of a sequence after a step."""
        num_settled = len(self.tokens[rows.sequence]) - rows.num_drafted
        drafts = self.tokens[rows.sequence][num_settled:]
        return verify_drafts(drafts, lambda count: answer_token(self.history(rows.sequence, num_settled + count)))


def answer_token(history: tuple[int, ...]) -> int:
    """The token that a model would choose: the same whenever these tokens are computed."""
    return 3 + hash(history) % 40


class Oracle:
    """Guesses that are right with a probability of 0.7."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        known = list(tokens)
        for _ in range(count):
            known.append(answer_token(tuple(known)) if self._rng.random() < 0.7 else self._rng.randint(3, 42))
        return known[len(tokens) :]


def generated_alone(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(answer_token(tuple(tokens)))
        if tokens[-1] == 3:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("scope", ["", "app"])
@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_computes_what_each_sequence_would_alone(seed: int, scope: str) -> None:
    rng = random.Random(seed)
    limits = GenerationLimits(
        kv_tokens=rng.randint(20, 300), max_sequences=rng.randint(1, 6), prefill_rows=rng.choice([1, 3, 16, 500])
    )
    speculation = Speculation(lambda: Oracle(rng))
    scheduler, ranks = Scheduler(limits, num_groups=rng.choice([1, 2]), speculation=speculation), Ranks(limits)
    states: dict[int, SequenceState] = {}
    system = [rng.randint(4, 40) for _ in range(60)]
    for step in range(3000):
        if step < 300 and rng.random() < 0.2:
            prompt = system[: rng.choice([0, 16, 40, 60])] + [rng.randint(4, 40) for _ in range(rng.randint(1, 30))]
            request = GenerateTokens(
                holder="test", epoch=1, max_tokens=rng.randint(1, 40), stop_ids=(3,), prefix_scope=scope,
                max_drafted=rng.choice([0, 3, 20]), caller=rng.choice("aaab"),
            )  # fmt: skip
            new = SequenceState(step, request, prompt, len(prompt))
            if scheduler.fits(new):
                scheduler.add(new)
                states[step] = new
        if rng.random() < 0.03 and states:
            scheduler.remove(cancelled := rng.choice(list(states)))
            del states[cancelled]
        if step > 300 and scheduler.idle:
            break
        if (order := scheduler.next_order()) is None:
            continue
        ranks.execute(order)
        speculation.times.record(sum(len(rows.token_ids) for rows in order.rows), 1.0)
        execute_order(scheduler, order, ranks.answer)
    assert scheduler.idle
    assert not ranks.tokens
    assert scheduler.num_free_blocks == limits.num_kv_blocks
    for state in states.values():
        assert state.generated == generated_alone(state.prompt, state.request.max_tokens)


@pytest.mark.parametrize("seed", range(6))
def test_prefix_cache_outlives_plans_under_pressure(seed: int) -> None:
    """`Ranks.execute` checks each row that a sequence finds, in whichever plan it was computed."""
    rng = random.Random(seed)
    system = [rng.randint(4, 40) for _ in range(60)]
    earlier, num_found = None, 0
    for _ in range(5):
        limits = GenerationLimits(kv_tokens=rng.randint(100, 400), max_sequences=6, prefill_rows=rng.choice([5, 64]))
        scheduler, ranks = Scheduler(limits), Ranks(limits)
        if earlier is not None:
            keys = [key for key, _ in earlier.prefixes.newest(1 << 20)]
            scheduler.keep((), KeptPrefixes(keys=b"".join(keys), transfers=(), transfer_seconds=0))
            assert not scheduler.idle
            order = scheduler.next_order()
            assert order is not None
            ranks.adopt(order, earlier)
            assert len(order.adopted.blocks) == min(len(keys), limits.num_kv_blocks)
            assert scheduler.num_free_blocks == limits.num_kv_blocks
        for step in range(60):
            if rng.random() < 0.2 or step == 0:
                prompt = system[: rng.choice([0, 16, 40, 60])] + [rng.randint(4, 40) for _ in range(rng.randint(1, 20))]
                request = GenerateTokens(holder="test", epoch=1, max_tokens=rng.randint(1, 30), prefix_scope="app")
                new = SequenceState(step, request, prompt, len(prompt))
                if scheduler.fits(new):
                    scheduler.add(new)
            if (order := scheduler.next_order()) is None:
                continue
            ranks.execute(order)
            num_found += sum(len(rows.new.cached_tokens) for rows in order.rows if rows.new is not None and step == 0)
            execute_order(scheduler, order, ranks.answer)
        for blocks in ranks.blocks.values():
            ranks.prefixes.use(blocks)
        earlier = ranks
    if seed == 0:
        assert num_found > 0


def test_sequences_run_by_what_they_use_and_the_newest_is_preempted() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=4 * KV_BLOCK_TOKENS, max_sequences=8, prefill_rows=64))
    for number in (1, 2, 3):
        scheduler.add(sequence(number, 10, 40))
    execute_order(scheduler, scheduler.next_order())
    assert list(scheduler.running) == [1, 2]  # a free block is left for each sequence that runs
    preempted: list[int] = []
    while not scheduler.idle:
        order = scheduler.next_order()
        preempted += [cache for cache in order.freed if scheduler.with_cache(cache) is None and 1 in scheduler.running]
        execute_order(scheduler, order)
    assert preempted[0] == 2
    assert scheduler.num_free_blocks == 4


@settings(max_examples=12)
@given(
    num_whole=st.integers(1, 24), quarter=st.integers(3, 8).map(lambda n: n * KV_BLOCK_TOKENS), share=st.floats(0, 1)
)
def test_room_for_n_whole_contexts_runs_3_n_quarters_at_once(num_whole: int, quarter: int, share: float) -> None:
    count, num_prompt_tokens = 3 * num_whole, 1 + int(share * (quarter - 2))
    limits = GenerationRequest(4 * quarter, num_whole).limits(seq_len=count * quarter)
    scheduler = Scheduler(limits)
    for number in range(count):
        scheduler.add(sequence(number, num_prompt_tokens, quarter - num_prompt_tokens))
    execute_order(scheduler, scheduler.next_order())
    for _ in range(quarter - num_prompt_tokens - 1):
        assert len(scheduler.running) == count
        order = scheduler.next_order()
        assert len(order.rows) == count
        assert not order.freed  # no sequence is preempted
        execute_order(scheduler, order)
    assert not scheduler.running


# ---- several callers -------------------------------------------------------------------------------------------------


def running_of(scheduler: Scheduler, caller: str) -> list[int]:
    return [number for number, each in scheduler.running.items() if each.request.caller == caller]


@pytest.mark.parametrize(
    "limits",
    [
        GenerationLimits(kv_tokens=400 * KV_BLOCK_TOKENS, max_sequences=8, prefill_rows=640),
        GenerationLimits(kv_tokens=15 * KV_BLOCK_TOKENS, max_sequences=99, prefill_rows=640),
    ],
    ids=["sequences", "memory"],
)
def test_caller_that_fills_the_batch_gives_up_to_another_at_once(limits: GenerationLimits) -> None:
    scheduler = Scheduler(limits)
    for number in range(20):
        scheduler.add(sequence(number, 4, 100, "greedy"))
    execute_order(scheduler, scheduler.next_order())
    most = len(scheduler.running)
    assert most == 8
    for number in range(20, 24):
        scheduler.add(sequence(number, 4, 100, "other"))
    for _ in range(2):  # a step of prompts, before or after one of decoding
        execute_order(scheduler, scheduler.next_order())
    assert (running_of(scheduler, "greedy"), running_of(scheduler, "other")) == ([0, 1, 2, 3], [20, 21, 22, 23])
    for number in range(24, 30):  # nobody gets more than half now
        scheduler.add(sequence(number, 4, 100, "other"))
        execute_order(scheduler, scheduler.next_order())
    assert (running_of(scheduler, "greedy"), running_of(scheduler, "other")) == ([0, 1, 2, 3], [20, 21, 22, 23])


def test_long_prompts_in_most_of_the_cache_give_up_to_short_ones_and_go_on() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=32 * KV_BLOCK_TOKENS, max_sequences=4, prefill_rows=64))
    numbers = itertools.count()
    open_of: dict[str, list[SequenceState]] = {"short": [], "long": []}
    num_together = num_rows = num_ended = 0
    for _ in range(2000):
        num_ended += sum(each.ended for each in open_of["long"])
        for caller, count, prompt in (("short", 2, 30), ("long", 8, 400)):
            open_of[caller] = [each for each in open_of[caller] if not each.ended]
            for number in itertools.islice(numbers, count - len(open_of[caller])):
                open_of[caller].append(sequence(number, prompt, 10, caller, scope=str(number)))
                scheduler.add(open_of[caller][-1])
        order = scheduler.next_order()
        num_together += len(running_of(scheduler, "short")) == 2
        of_long = [rows for rows in order.rows if scheduler.with_cache(rows.sequence).request.caller == "long"]
        num_rows += sum(len(rows.token_ids) for rows in of_long)
        execute_order(scheduler, order)
        scheduler.took(1e-3 * (1 + sum(len(rows.token_ids) for rows in order.rows)))
    assert num_together > 0.8 * 2000
    assert num_rows < 2 * 400 * num_ended


def test_prefix_that_sequences_of_a_caller_share_counts_once() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=32 * KV_BLOCK_TOKENS, max_sequences=8, prefill_rows=640))
    for number in range(4):
        scheduler.add(sequence(number, 10 * KV_BLOCK_TOKENS, 100, "sharing", scope="sharing"))
        for _ in range(2):  # a step of prompts, before or after one of decoding
            execute_order(scheduler, scheduler.next_order())
    assert running_of(scheduler, "sharing") == [0, 1, 2, 3]
    assert scheduler.num_free_blocks > 32 - 2 * 10  # by their sum, they would hold more than there is
    scheduler.add(sequence(9, 18 * KV_BLOCK_TOKENS, 5, "other"))  # more than the caller of the four holds
    for _ in range(3):
        execute_order(scheduler, scheduler.next_order())
    assert running_of(scheduler, "sharing") == [0, 1, 2, 3]


def run_for(scheduler: Scheduler, num_orders: int) -> tuple[float, Counter[str], int]:
    """Execute orders, each of which takes a millisecond, and one more for each row.

    Returns the milliseconds of all, the tokens of each caller, and the most rows of an order.
    """
    milliseconds, tokens, most = 0.0, Counter[str](), 0
    for _ in range(num_orders):
        order = scheduler.next_order()
        num_rows = sum(len(rows.token_ids) for rows in order.rows)
        tokens.update(scheduler.with_cache(rows.sequence).request.caller for rows in order.rows if rows.sample)
        execute_order(scheduler, order)
        scheduler.took(1e-3 * (1 + num_rows))
        milliseconds, most = milliseconds + 1 + num_rows, max(most, num_rows)
    return milliseconds, tokens, most


def test_caller_with_many_sequences_takes_an_eighth_of_the_time_of_one_with_few() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=20000, max_sequences=16, prefill_rows=640))
    scheduler.add(sequence(99, 10, 3000, "light"))
    run_for(scheduler, 10)
    for number in range(40):
        scheduler.add(sequence(number, 20, 100, "heavy"))
    milliseconds, tokens, most = run_for(scheduler, 1500)
    assert 0.85 < tokens["light"] * 2.0 / milliseconds <= 1  # of the time that its steps take alone
    assert tokens["heavy"] > 0.03 * tokens["light"]
    assert most <= 64 + 16


def test_callers_with_about_as_many_sequences_are_not_kept_waiting() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=20000, max_sequences=16, prefill_rows=640))
    for number, caller in enumerate(["one", "one", "two", "two", "two"]):
        scheduler.add(sequence(number, 200, 300, caller))
    _, tokens, most = run_for(scheduler, 200)
    assert most > 64
    assert tokens["two"] > 1.4 * tokens["one"]


def test_prompts_of_callers_are_prefilled_in_turns() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=4000, max_sequences=9, prefill_rows=64))
    for number in range(4):
        scheduler.add(sequence(number, 640, 5, "greedy"))
    execute_order(scheduler, scheduler.next_order())
    scheduler.add(sequence(9, 10, 5, "other"))
    assert [len(rows.token_ids) for rows in scheduler.next_order().rows] == [10, 54]


def test_growing_sequence_takes_the_room_of_the_caller_with_the_most() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=8 * KV_BLOCK_TOKENS, max_sequences=9, prefill_rows=64))
    for number in (1, 2, 3):
        scheduler.add(sequence(number, 10, 50, "greedy"))
    execute_order(scheduler, scheduler.next_order())
    scheduler.add(newest := sequence(4, 10, 50, "other"))
    while not (cache := newest.cache):
        execute_order(scheduler, scheduler.next_order())
    while not newest.ended:
        assert newest.cache == cache
        execute_order(scheduler, scheduler.next_order())
    assert len(running_of(scheduler, "greedy")) < 3


def test_repeated_prompt_of_whole_blocks_computes_the_last_one() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=200, max_sequences=8, prefill_rows=64))
    request = GenerateTokens(holder="test", epoch=1, max_tokens=4, prefix_scope="app")
    prompt = list(range(100, 100 + 2 * KV_BLOCK_TOKENS))
    for number in (1, 2):
        scheduler.add(SequenceState(number, request, prompt, len(prompt)))
    first, second = scheduler.next_order().rows
    assert (first.token_ids, second.token_ids) == (tuple(prompt), tuple(prompt[KV_BLOCK_TOKENS:]))
    assert second.new.cached_tokens == tuple(prompt[:KV_BLOCK_TOKENS])


def test_equal_prefixes_are_held_once_also_in_one_step() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=64 * KV_BLOCK_TOKENS, max_sequences=9, prefill_rows=512))
    request = GenerateTokens(holder="test", epoch=1, max_tokens=4, prefix_scope="app")
    for number in range(1, 9):
        prompt = [*range(100, 100 + 2 * KV_BLOCK_TOKENS), number, number]
        scheduler.add(SequenceState(number, request, prompt, len(prompt)))
    order = scheduler.next_order()
    assert [len(rows.token_ids) for rows in order.rows] == [2 * KV_BLOCK_TOKENS + 2, *[2] * 7]
    assert len({rows.new.blocks[:2] for rows in order.rows}) == 1
    assert scheduler.num_free_blocks == 64 - 2 - 8
    other = request.model_copy(update={"prefix_scope": "another app"})
    scheduler.add(SequenceState(9, other, prompt, len(prompt)))
    (rows,) = scheduler.next_order().rows
    assert rows.new.cached_tokens == ()


# ---- requests that continue a sequence of the same plan ------------------------------------------------------------


def streaming(number: int = 1, prompt: int = 6, count: int = 10, stream: str = "story") -> SequenceState:
    request = GenerateTokens(holder="test", epoch=1, max_tokens=count, stream=stream)
    return SequenceState(number, request, [10 + i for i in range(prompt)], prompt)


def continuing(sequence: SequenceState, num_tokens: int, **changes: object) -> tuple[GenerateTokens, list[int]]:
    """The request that a client sends which has received so many tokens, and its prompt."""
    fields = {"first_index": num_tokens, "max_tokens": sequence.request.max_tokens - num_tokens, **changes}
    return sequence.request.model_copy(update=fields), [*sequence.prompt, *sequence.generated[:num_tokens]]


def scheduler_after(num_steps: int, first: SequenceState, **limits: int) -> Scheduler:
    scheduler = Scheduler(GenerationLimits(**{"kv_tokens": 100, "max_sequences": 4, "prefill_rows": 64, **limits}))
    scheduler.add(first)
    for step in range(num_steps):
        execute_order(scheduler, scheduler.next_order(), lambda rows, token=20 + step: [token])
    return scheduler


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize("num_received", [0, 2, 4])
def test_request_that_continues_a_sequence_computes_nothing_again(cancelled: bool, num_received: int) -> None:
    first = streaming()
    scheduler = scheduler_after(4, first)
    if cancelled:
        scheduler.pause(1)
        assert scheduler.next_order() is None
    assert scheduler.resume(*continuing(first, num_received)) is first
    order = scheduler.next_order()
    assert [(rows.sequence, rows.token_ids, rows.new) for rows in order.rows] == [(1, (23,), None)]
    assert not order.freed


def test_token_of_a_step_in_flight_is_not_lost_with_the_request() -> None:
    first = streaming()
    scheduler = scheduler_after(4, first)
    scheduler.next_order()
    scheduler.pause(1)
    scheduler.append_tokens(1, [24])
    assert scheduler.resume(*continuing(first, 5)) is first
    assert scheduler.next_order().rows[0].token_ids == (24,)


def test_stream_that_has_ended_is_repeated_until_its_room_is_needed() -> None:
    first = streaming(count=4)
    scheduler = scheduler_after(3, first)
    scheduler.next_order()
    scheduler.append_tokens(1, [23])
    assert first.ended
    scheduler.pause(1)
    assert scheduler.idle
    assert scheduler.resume(*continuing(first, 2)) is first
    scheduler.pause(1)
    scheduler.expire(1)
    assert scheduler.resume(*continuing(first, 2)) is None
    assert scheduler.next_order().freed == (1,)


def test_prefill_goes_on_where_it_was_cancelled() -> None:
    first = streaming(prompt=30)
    scheduler = scheduler_after(2, first, prefill_rows=8)
    scheduler.pause(1)
    assert scheduler.resume(*continuing(first, 0)) is first
    assert len(scheduler.next_order().rows[0].token_ids) == 8
    assert first.num_computed_rows == 24


@pytest.mark.parametrize(
    "changes", [{"stream": "other"}, {"stream": ""}, {"first_index": 1}, {"max_tokens": 9}, {"stop_ids": (5,)}], ids=str
)
def test_other_requests_continue_no_sequence(changes: dict[str, object]) -> None:
    first = streaming()
    scheduler = scheduler_after(4, first)
    scheduler.pause(1)
    assert scheduler.resume(*continuing(first, 2, **changes)) is None
    request, prompt = continuing(first, 2)
    assert scheduler.resume(request, [*prompt[:-1], 99]) is None


def test_sequence_whose_room_was_needed_is_not_resumed() -> None:
    first = streaming()
    scheduler = scheduler_after(4, first, kv_tokens=KV_BLOCK_TOKENS)
    scheduler.pause(1)
    scheduler.add(sequence(2, 6, 10))
    assert scheduler.next_order().freed == (1,)
    assert scheduler.resume(*continuing(first, 2)) is None


def test_resumed_sequence_takes_no_more_than_its_place() -> None:
    first = streaming()
    scheduler = scheduler_after(4, first, max_sequences=1)
    scheduler.pause(1)
    scheduler.add(sequence(2, 6, 10))
    scheduler.next_order()
    assert scheduler.resume(*continuing(first, 2)) is None
