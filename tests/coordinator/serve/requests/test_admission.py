"""Admission to a deployment: order, capacity, exclusive maintenance, deadlines, refusal."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import let_tasks_run

from coordinator.serve.requests.admission import CALLER, Admission
from hearth.errors import NotServing, QueueFull

FOREVER = 60.0
STOPPING = NotServing(state="stopping")


def open_admission(capacity: int = 1, most_waiting: int = 3) -> Admission[str]:
    admission: Admission[str] = Admission(most_waiting)
    admission.open("one", capacity)
    return admission


async def enter(admission: Admission[str], order: list[object], number: object) -> None:
    order.append((number, await admission.enter(FOREVER)))


async def test_admission_is_fifo_and_rejects_when_the_queue_is_full() -> None:
    admission, order = open_admission(capacity=2), list[object]()
    tasks = [asyncio.create_task(enter(admission, order, number)) for number in range(5)]
    await let_tasks_run()
    assert (order, admission.num_waiting, admission.num_running) == ([(0, "one"), (1, "one")], 3, 2)
    with pytest.raises(QueueFull) as full:
        await admission.enter(FOREVER)
    assert full.value.limit == 3
    admission.leave()
    await let_tasks_run()
    assert order[2:] == [(2, "one")]
    tasks[3].cancel()
    await let_tasks_run()
    assert admission.num_waiting == 1
    admission.leave()
    await let_tasks_run()
    assert (order[3:], admission.num_waiting, admission.num_running) == ([(4, "one")], 0, 2)


async def test_new_request_does_not_overtake_a_waiting_one() -> None:
    admission, order = open_admission(capacity=2), list[object]()
    for _ in range(2):
        await admission.enter(FOREVER)
    waiting = asyncio.create_task(enter(admission, order, "first"))
    await let_tasks_run()
    admission.leave()
    later = asyncio.create_task(enter(admission, order, "second"))
    await let_tasks_run()
    assert order == [("first", "one")]
    later.cancel()
    await asyncio.gather(waiting, later, return_exceptions=True)


async def test_slot_granted_to_a_cancelled_request_goes_to_the_next() -> None:
    admission, order = open_admission(), list[object]()
    await admission.enter(FOREVER)
    first, second = (asyncio.create_task(enter(admission, order, number)) for number in (1, 2))
    await let_tasks_run()
    admission.leave()  # grants the slot to the first task, which has not run yet
    first.cancel()
    await asyncio.wait({first, second}, timeout=1)
    assert (order, admission.num_running) == ([(2, "one")], 1)


async def test_requests_wait_for_the_next_deployment_while_closed() -> None:
    admission, order = open_admission(), list[object]()
    admission.close()
    waiting = asyncio.create_task(enter(admission, order, 1))
    await let_tasks_run()
    assert (order, admission.num_waiting) == ([], 1)
    with pytest.raises(asyncio.TimeoutError):
        await admission.enter(0.001)
    assert admission.num_waiting == 1
    admission.open("two", 1)
    await waiting
    assert order == [(1, "two")]


async def test_refusal_ends_waiting_and_new_requests() -> None:
    admission = open_admission()
    await admission.enter(FOREVER)
    waiting = asyncio.create_task(admission.enter(FOREVER))
    await let_tasks_run()
    admission.close(STOPPING)
    for request in (waiting, asyncio.create_task(admission.enter(FOREVER))):
        with pytest.raises(NotServing, match="stopping"):
            await request
    drained = asyncio.create_task(admission.wait_until_drained())
    await let_tasks_run()
    assert not drained.done()
    admission.leave()
    await drained


async def test_exclusive_maintenance_runs_alone_and_in_order() -> None:
    admission, order = open_admission(capacity=9), list[object]()

    async def exclusive() -> None:
        async with admission.exclusively():
            assert admission.num_running == 1
            order.append("began")
            await release.wait()
            order.append("ended")

    release = asyncio.Event()
    await admission.enter(FOREVER)
    await admission.enter(FOREVER)
    maintenance = asyncio.create_task(exclusive())
    await let_tasks_run()
    late = asyncio.create_task(enter(admission, order, "late"))
    await let_tasks_run()
    assert (order, admission.num_waiting) == ([], 1)
    admission.leave()
    await let_tasks_run()
    assert order == []
    admission.leave()
    await let_tasks_run()
    assert order == ["began"]
    release.set()
    await asyncio.gather(maintenance, late)
    assert order == ["began", "ended", ("late", "one")]


async def test_abandoned_maintenance_blocks_no_requests() -> None:
    admission, order = open_admission(capacity=9), list[object]()

    async def exclusive() -> None:
        with pytest.raises(asyncio.CancelledError):
            async with admission.exclusively():
                raise AssertionError

    await admission.enter(FOREVER)
    maintenance = asyncio.create_task(exclusive())
    await let_tasks_run()
    late = asyncio.create_task(enter(admission, order, "late"))
    await let_tasks_run()
    maintenance.cancel()
    await late
    await maintenance
    assert (order, admission.num_running) == ([("late", "one")], 2)


async def test_idle_time_begins_at_the_end_of_the_last_request_and_maintenance_is_none() -> None:
    admission = open_admission()
    clock = asyncio.get_running_loop().time
    began = clock()
    assert admission.idle_seconds is not None
    await admission.enter(FOREVER)
    assert admission.idle_seconds is None
    waiting = asyncio.create_task(admission.enter(FOREVER))
    await let_tasks_run()
    admission.leave()
    await waiting
    assert admission.idle_seconds is None
    admission.leave()
    ended = clock()
    async with admission.exclusively():
        await asyncio.sleep(0.02)
        assert admission.idle_seconds is not None
    assert 0.02 <= admission.idle_seconds <= clock() - began
    assert admission.idle_seconds <= clock() - ended + 0.01


async def test_closed_admission_tells_when_a_request_waits() -> None:
    admission = open_admission()
    admission.close()
    waiting = asyncio.create_task(admission.wait_for_request())
    await let_tasks_run()
    assert not waiting.done()
    request = asyncio.create_task(admission.enter(FOREVER))
    await asyncio.wait_for(waiting, FOREVER)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    again = asyncio.create_task(admission.wait_for_request())
    await let_tasks_run()
    assert not again.done()  # the request is gone
    again.cancel()


@given(
    st.lists(st.sampled_from(["enter", "exclusive", "leave", "cancel", "close", "open"]), max_size=60),
    st.integers(1, 3),
)
def test_random_sequences_respect_capacity_and_exclusiveness(steps: list[str], capacity: int) -> None:
    async def main() -> None:
        admission = open_admission(capacity, most_waiting=100)
        inside: list[str] = []
        asked: list[asyncio.Task[None]] = []

        async def run(kind: str, end: asyncio.Event) -> None:
            if kind == "exclusive":
                async with admission.exclusively():
                    await stay(kind, end)
                return
            await admission.enter(FOREVER)
            try:
                await stay(kind, end)
            finally:
                admission.leave()

        async def stay(kind: str, end: asyncio.Event) -> None:
            inside.append(kind)
            try:
                await end.wait()
            finally:
                inside.remove(kind)

        ends: list[asyncio.Event] = []
        for step in steps:
            if step in ("enter", "exclusive"):
                ends.append(asyncio.Event())
                asked.append(asyncio.create_task(run(step, ends[-1])))
            elif step == "leave" and ends:
                ends.pop(0).set()
            elif step == "cancel" and asked:
                asked[-1].cancel()
            elif step == "close":
                admission.close()
            elif step == "open":
                admission.open("next", capacity)
            await let_tasks_run(5 + 3 * len(asked))  # enough iterations for all waiting requests to enter and leave
            assert admission.num_running == len(inside) <= capacity
            assert len(inside) == 1 or "exclusive" not in inside
        admission.open("last", capacity)
        for end in ends:
            end.set()
        await asyncio.gather(*asked, return_exceptions=True)
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(asyncio.wait_for(main(), FOREVER))


def ask_as(key: str, admission: Admission[str], order: list[object], number: int) -> asyncio.Task[None]:
    context = contextvars.copy_context()
    context.run(CALLER.set, key)
    return context.run(asyncio.create_task, enter(admission, order, (key, number)))


@pytest.mark.parametrize(("num_keys", "share"), [(1, 64), (2, 43), (3, 32), (7, 16)])
async def test_key_that_asks_for_much_leaves_slots_to_the_next_one(num_keys: int, share: int) -> None:
    admission, order = Admission[str](max_waiting=9999), list[object]()
    admission.open("one", 128, reserve=True)
    asked = [ask_as(f"key {number % num_keys}", admission, order, number) for number in range(200 * num_keys)]
    await let_tasks_run(2)
    running = Counter(key for (key, _), _ in order)
    assert (len(running), min(running.values())) == (num_keys, share)
    newcomers = [ask_as("new", admission, order, number) for number in range(128 - running.total())]
    await let_tasks_run(2)
    assert sum(task.done() for task in newcomers) >= share // 2
    for key, count in running.items():
        for _ in range(count):
            admission.leave(key)
    await let_tasks_run(2)
    assert min(Counter(key for (key, _), _ in order).values()) > 0
    for task in (*asked, *newcomers):
        task.cancel()


async def test_app_that_fills_the_queue_neither_delays_nor_shuts_out_another() -> None:
    admission, order = Admission[str](max_waiting=4), list[object]()
    ask = partial(ask_as, admission=admission, order=order)
    greedy = [ask("greedy", number=number) for number in range(5)]
    await let_tasks_run()
    with pytest.raises(QueueFull):
        await greedy[4]
    other = [ask("other", number=number) for number in range(2)]
    await let_tasks_run()
    for refused in (greedy[3], greedy[2]):
        with pytest.raises(QueueFull):
            await refused
    admission.open("one", 1)
    for _ in range(4):
        await let_tasks_run()
        admission.leave(order[-1][0][0])
    await asyncio.gather(*greedy[:2], *other)
    assert [who for who, _ in order] == [("greedy", 0), ("other", 0), ("greedy", 1), ("other", 1)]
