"""Tasks that last as long as their process, and groups of calls."""

from __future__ import annotations

import asyncio
import logging

import pytest

from hearth.platform.asyncio_tools import Signal, all_or_first_error, cancel_all, supervised, with_timeout


async def _end(error: Exception | None) -> None:
    if error is not None:
        raise error


@pytest.mark.parametrize("error", [None, RuntimeError("a fault")])
def test_end_of_a_supervised_task_ends_the_process_after_its_cleanup(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    cleaned_up = []

    async def main() -> None:
        supervised(_end(error), "the receive loop")
        try:
            await asyncio.sleep(60)
        finally:
            cleaned_up.append(True)

    with caplog.at_level(logging.CRITICAL), pytest.raises(SystemExit) as ended:
        asyncio.run(main())
    assert ended.value.code == 70
    assert cleaned_up == [True]
    assert "the receive loop ended unexpectedly" in caplog.text


async def test_supervised_task_may_be_cancelled() -> None:
    await cancel_all([supervised(asyncio.sleep(60), "the receive loop")])  # this process goes on


async def _fail_when_set(event: asyncio.Event) -> None:
    await event.wait()
    raise ConnectionError("the device is gone")


@pytest.mark.parametrize("num_turns", range(1, 4))
async def test_cancellation_is_not_lost_when_a_call_fails_at_the_same_moment(num_turns: int) -> None:
    async def work(event: asyncio.Event) -> str:
        try:
            await all_or_first_error([_fail_when_set(event), asyncio.sleep(60)])
        except ConnectionError:
            return "goes on"
        return "ended"

    event = asyncio.Event()
    working = asyncio.create_task(work(event))
    await asyncio.sleep(0)
    event.set()
    for _ in range(num_turns):  # of the loop, since the failure
        await asyncio.sleep(0)
    assert working.cancel()
    await asyncio.wait({working})
    assert working.cancelled()


async def test_all_calls_return_or_the_first_error_ends_them() -> None:
    assert await all_or_first_error([asyncio.sleep(0, "a"), asyncio.sleep(0.01, "b")]) == ["a", "b"]
    assert await all_or_first_error([]) == []
    slow = asyncio.ensure_future(asyncio.sleep(60))
    with pytest.raises(ConnectionError):
        await all_or_first_error([slow, _end(ConnectionError())])
    assert slow.cancelled()


async def test_timeout_ends_the_call_and_keeps_its_error() -> None:
    slow = asyncio.ensure_future(asyncio.sleep(60))
    with pytest.raises(asyncio.TimeoutError):
        await with_timeout(0.001, slow)
    assert slow.cancelled()
    with pytest.raises(ConnectionError):
        await with_timeout(60, _end(ConnectionError()))


async def test_wait_for_a_signal_ends_when_it_is_set_or_in_time() -> None:
    signal = Signal()
    assert not await signal.wait(0.001)
    asyncio.get_running_loop().call_soon(signal.set)
    assert await signal.wait(60)
    assert await signal.wait(0)
    signal.clear()
    assert not await signal.wait(0.001)


async def test_wait_for_a_signal_may_be_cancelled() -> None:
    signal = Signal()
    waiting = asyncio.create_task(signal.wait(60))
    await asyncio.sleep(0)
    waiting.cancel()
    signal.set()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
