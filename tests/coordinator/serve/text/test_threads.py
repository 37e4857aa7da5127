"""Threads for tokenising: long texts delay no short ones, and callers have deadlines."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from functools import partial

import pytest
from support.waiting import let_tasks_run

from coordinator.serve.requests.admission import CALLER
from coordinator.serve.text import threads
from coordinator.serve.text.threads import TextThreads
from hearth.errors import DeadlineExceeded, QueueFull

LONG = 1 << 20
WAIT_SECONDS = 60.0


async def test_long_texts_delay_no_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_MAX_WAITING_LONG", 2)
    pool, release = TextThreads(), threading.Event()
    long = [asyncio.create_task(pool.run(WAIT_SECONDS, LONG, partial(release.wait, WAIT_SECONDS))) for _ in range(3)]
    try:
        await asyncio.sleep(0)
        assert await pool.run(WAIT_SECONDS, 5, "short".upper) == "SHORT"
        with pytest.raises(QueueFull):
            await pool.run(WAIT_SECONDS, LONG, release.wait)
    finally:
        release.set()
    assert await asyncio.gather(*long) == [True, True, True]


async def test_keys_take_turns() -> None:
    pool, release, order = TextThreads(), threading.Event(), list[str]()

    def ask(key: str, function: Callable[[], object]) -> asyncio.Task[object]:
        context = contextvars.copy_context()
        context.run(CALLER.set, key)
        return context.run(asyncio.create_task, pool.run(WAIT_SECONDS, LONG, function))

    asked = [ask("greedy", partial(release.wait, WAIT_SECONDS))]
    asked += [ask("greedy", partial(order.append, "greedy")) for _ in range(9)]
    await let_tasks_run()
    asked.append(ask("other", partial(order.append, "other")))
    await let_tasks_run()
    release.set()
    await asyncio.gather(*asked)
    assert order.index("other") <= 1


async def test_caller_waits_no_longer_than_its_deadline() -> None:
    pool, release = TextThreads(), threading.Event()
    try:
        with pytest.raises(DeadlineExceeded):
            await pool.run(0.01, LONG, partial(release.wait, WAIT_SECONDS))
    finally:
        release.set()
    with pytest.raises(ValueError, match="invalid literal"):
        await pool.run(WAIT_SECONDS, 1, partial(int, "x"))
