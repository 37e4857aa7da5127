"""Threads for tokenising: long texts delay no short ones, and callers have deadlines."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from coordinator.serve.text import threads
from coordinator.serve.text.threads import TextThreads
from hearth.errors import DeadlineExceeded, QueueFull

LONG = 1 << 20
WAIT_SECONDS = 60.0


async def test_long_texts_delay_no_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_MAX_WAITING_LONG", 2)
    pool, release = TextThreads(), threading.Event()
    long = [asyncio.create_task(pool.run(WAIT_SECONDS, LONG, partial(release.wait, WAIT_SECONDS))) for _ in range(2)]
    try:
        await asyncio.sleep(0)
        assert await pool.run(WAIT_SECONDS, 5, "short".upper) == "SHORT"
        with pytest.raises(QueueFull):
            await pool.run(WAIT_SECONDS, LONG, release.wait)
    finally:
        release.set()
    assert await asyncio.gather(*long) == [True, True]


async def test_caller_waits_no_longer_than_its_deadline() -> None:
    pool, release = TextThreads(), threading.Event()
    try:
        with pytest.raises(DeadlineExceeded):
            await pool.run(0.01, LONG, partial(release.wait, WAIT_SECONDS))
    finally:
        release.set()
    with pytest.raises(ValueError, match="invalid literal"):
        await pool.run(WAIT_SECONDS, 1, partial(int, "x"))
