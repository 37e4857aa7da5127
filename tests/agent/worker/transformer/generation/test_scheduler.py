"""Scheduling on rank 0: admission under the KV budget, prompt chunks, fairness, freed memory. Pure."""

from __future__ import annotations

import random

import pytest

from agent.worker.transformer.generation.scheduler import Scheduler, SequenceState
from hearth.plan.transformer import GenerationLimits
from hearth.wire.messages import GenerateTokens, StepOrder


def sequence(number: int, prompt: int, max_tokens: int, stop_ids: tuple[int, ...] = ()) -> SequenceState:
    request = GenerateTokens(holder="test", epoch=1, max_tokens=max_tokens, stop_ids=stop_ids)
    return SequenceState(number, request, [10 + i for i in range(prompt)], prompt)


def execute_order(scheduler: Scheduler, order: StepOrder, token: int = 7) -> None:
    """Give each sampled row a token, and remove sequences that have ended."""
    for rows in order.rows:
        if rows.sample:
            scheduler.append_token(rows.sequence, token)
            if scheduler.running[rows.sequence].ended:
                scheduler.remove(rows.sequence)


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


@pytest.mark.parametrize("seed", range(40))
def test_random_traffic_respects_limits_and_ends(seed: int) -> None:
    rng = random.Random(seed)
    limits = GenerationLimits(
        kv_tokens=rng.randint(20, 200), max_sequences=rng.randint(1, 6), prefill_rows=rng.choice([1, 3, 16, 500])
    )
    scheduler = Scheduler(limits)
    held: dict[int, int] = {}  # tokens in each KV cache of a worker
    capacity: dict[int, int] = {}
    answers: dict[int, int] = {}
    wanted: dict[int, int] = {}
    number = 0
    for _ in range(600):
        if rng.random() < 0.15 and number < 30:
            number += 1
            new = sequence(number, rng.randint(1, 40), rng.randint(1, 12), stop_ids=(3,))
            if scheduler.fits(new):
                scheduler.add(new)
                wanted[number] = new.request.max_tokens
        if rng.random() < 0.03 and wanted:
            cancelled = rng.choice(list(wanted))
            scheduler.remove(cancelled)
            wanted.pop(cancelled)
        if scheduler.idle:
            continue
        order = scheduler.next_order()
        for freed in order.freed:
            del held[freed], capacity[freed]
        assert sum(len(rows.token_ids) for rows in order.rows) <= max(limits.prefill_rows, limits.max_sequences)
        assert len({rows.sequence for rows in order.rows}) == len(order.rows)
        for rows in order.rows:
            if rows.new is not None:
                assert rows.sequence not in held
                held[rows.sequence], capacity[rows.sequence] = 0, rows.new.capacity
            held[rows.sequence] += len(rows.token_ids)
            assert held[rows.sequence] <= capacity[rows.sequence]
            assert len(rows.token_ids) == 1 or order.kind == "prefill"
        assert sum(capacity.values()) <= limits.kv_tokens
        assert len(capacity) <= limits.max_sequences
        for rows in order.rows:
            if rows.sample:
                answers[rows.sequence] = answers.get(rows.sequence, 0) + 1
        execute_order(scheduler, order, token=rng.randint(3, 30))
    for _ in range(2000):
        if scheduler.idle:
            break
        order = scheduler.next_order()
        for freed in order.freed:
            del held[freed], capacity[freed]
        for rows in order.rows:
            if rows.new is not None:
                held[rows.sequence], capacity[rows.sequence] = 0, rows.new.capacity
            if rows.sample:
                answers[rows.sequence] = answers.get(rows.sequence, 0) + 1
        execute_order(scheduler, order, token=rng.randint(3, 30))
    assert scheduler.idle
    assert not held
    assert all(1 <= answers[each] <= most for each, most in wanted.items())


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
        execute_order(scheduler, scheduler.next_order(), token=20 + step)
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
    scheduler.append_token(1, 24)
    assert scheduler.resume(*continuing(first, 5)) is first
    assert scheduler.next_order().rows[0].token_ids == (24,)


def test_stream_that_has_ended_is_repeated_until_its_room_is_needed() -> None:
    first = streaming(count=4)
    scheduler = scheduler_after(3, first)
    scheduler.next_order()
    scheduler.append_token(1, 23)
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
    scheduler = scheduler_after(4, first, kv_tokens=20)
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
