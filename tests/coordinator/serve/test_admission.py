"""Admission to a deployment: order, room, exclusive maintenance, deadlines, refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.serve.admission import Admission
from hearth.errors import NotServing, QueueFull

FOREVER = 60.0
STOPPING = NotServing(state="stopping")


def door(capacity: int = 1, most_waiting: int = 3) -> Admission[str]:
    admission: Admission[str] = Admission(most_waiting)
    admission.open("one", capacity)
    return admission


async def turns(count: int = 5) -> None:
    """Let everything happen that can."""
    for _ in range(count):
        await asyncio.sleep(0)


def scenario(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), FOREVER))


async def enter(admission: Admission[str], order: list[object], number: object) -> None:
    order.append((number, await admission.enter(FOREVER)))


def test_requests_are_admitted_in_their_order_and_refused_when_too_many_wait() -> None:
    async def main() -> None:
        admission, order = door(capacity=2), list[object]()
        tasks = [asyncio.create_task(enter(admission, order, number)) for number in range(5)]
        await turns()
        assert (order, admission.waiting, admission.running) == ([(0, "one"), (1, "one")], 3, 2)
        with pytest.raises(QueueFull) as full:
            await admission.enter(FOREVER)
        assert full.value.limit == 3
        admission.leave()
        await turns()
        assert order[2:] == [(2, "one")]
        tasks[3].cancel()
        await turns()
        assert admission.waiting == 1
        admission.leave()
        await turns()
        assert (order[3:], admission.waiting, admission.running) == ([(4, "one")], 0, 2)

    scenario(main)


def test_a_newcomer_does_not_overtake() -> None:
    async def main() -> None:
        admission, order = door(capacity=2), list[object]()
        for _ in range(2):
            await admission.enter(FOREVER)
        waiting = asyncio.create_task(enter(admission, order, "first"))
        await turns()
        admission.leave()
        newcomer = asyncio.create_task(enter(admission, order, "second"))
        await turns()
        assert order == [("first", "one")]
        newcomer.cancel()
        await asyncio.gather(waiting, newcomer, return_exceptions=True)

    scenario(main)


def test_a_turn_that_comes_in_the_moment_of_giving_up_is_handed_on() -> None:
    async def main() -> None:
        admission, order = door(), list[object]()
        await admission.enter(FOREVER)
        first, second = (asyncio.create_task(enter(admission, order, number)) for number in (1, 2))
        await turns()
        admission.leave()  # the first one's turn, which it has not yet seen
        first.cancel()
        await asyncio.wait({first, second}, timeout=1)
        assert (order, admission.running) == ([(2, "one")], 1)

    scenario(main)


def test_while_it_is_closed_requests_wait_for_the_next_deployment() -> None:
    async def main() -> None:
        admission, order = door(), list[object]()
        admission.close()
        waiting = asyncio.create_task(enter(admission, order, 1))
        await turns()
        assert (order, admission.waiting) == ([], 1)
        with pytest.raises(asyncio.TimeoutError):
            await admission.enter(0.001)
        assert admission.waiting == 1
        admission.open("two", 1)
        await waiting
        assert order == [(1, "two")]

    scenario(main)


def test_a_refusal_reaches_those_that_wait_and_those_that_come() -> None:
    async def main() -> None:
        admission = door()
        await admission.enter(FOREVER)
        waiting = asyncio.create_task(admission.enter(FOREVER))
        await turns()
        admission.close(STOPPING)
        for request in (waiting, asyncio.create_task(admission.enter(FOREVER))):
            with pytest.raises(NotServing, match="stopping"):
                await request
        drained = asyncio.create_task(admission.drained())
        await turns()
        assert not drained.done()
        admission.leave()
        await drained

    scenario(main)


def test_what_is_exclusive_runs_alone_and_in_its_turn() -> None:
    async def main() -> None:
        admission, order = door(capacity=9), list[object]()

        async def exclusive() -> None:
            async with admission.exclusively():
                assert admission.running == 1
                order.append("began")
                await release.wait()
                order.append("ended")

        release = asyncio.Event()
        await admission.enter(FOREVER)
        await admission.enter(FOREVER)
        maintenance = asyncio.create_task(exclusive())
        await turns()
        late = asyncio.create_task(enter(admission, order, "late"))
        await turns()
        assert (order, admission.waiting) == ([], 1)
        admission.leave()
        await turns()
        assert order == []
        admission.leave()
        await turns()
        assert order == ["began"]
        release.set()
        await asyncio.gather(maintenance, late)
        assert order == ["began", "ended", ("late", "one")]

    scenario(main)


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_maintenance_that_is_given_up_holds_up_nobody(how: str) -> None:
    async def main() -> None:
        admission, order = door(capacity=9), list[object]()

        async def exclusive() -> None:
            with pytest.raises(asyncio.TimeoutError if how == "timed out" else asyncio.CancelledError):
                async with admission.exclusively(0.01 if how == "timed out" else None):
                    raise AssertionError

        await admission.enter(FOREVER)
        maintenance = asyncio.create_task(exclusive())
        await turns()
        late = asyncio.create_task(enter(admission, order, "late"))
        await turns()
        if how == "cancelled":
            maintenance.cancel()
        await late
        await maintenance
        assert (order, admission.running) == ([("late", "one")], 2)

    scenario(main)


@given(
    st.lists(st.sampled_from(["enter", "exclusive", "leave", "cancel", "close", "open"]), max_size=60),
    st.integers(1, 3),
)
def test_never_more_than_the_capacity_and_nothing_beside_what_is_exclusive(steps: list[str], capacity: int) -> None:
    async def main() -> None:
        admission = door(capacity, most_waiting=100)
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
            await turns(5 + 3 * len(asked))  # all that wait may come and go, one after the other
            assert admission.running == len(inside) <= capacity
            assert len(inside) == 1 or "exclusive" not in inside
        admission.open("last", capacity)
        for end in ends:
            end.set()
        await asyncio.gather(*asked, return_exceptions=True)
        assert (admission.running, admission.waiting) == (0, 0)

    scenario(main)
