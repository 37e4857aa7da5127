"""Tasks that last as long as their process."""

from __future__ import annotations

import asyncio
import logging

import pytest

from hearth.platform.asyncio_tools import cancel_all, supervised


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


def test_supervised_task_may_be_cancelled() -> None:
    async def main() -> str:
        await cancel_all([supervised(asyncio.sleep(60), "the receive loop")])
        return "goes on"

    assert asyncio.run(main()) == "goes on"
