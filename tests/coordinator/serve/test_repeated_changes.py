"""Changes that a client repeats because the answer was lost."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.serve import service
from coordinator.serve.service import RepeatedChanges
from hearth.errors import BadRequest
from hearth.wire.messages import Done


class Changes:
    """Counts the changes that were carried out. The second one is refused."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self) -> Done:
        self.count += 1
        await asyncio.sleep(0)
        if self.count == 2:
            raise BadRequest(reason="there is an app already")
        return Done()


async def test_repeated_change_is_carried_out_once_and_gets_the_same_answer() -> None:
    changes, repeated = Changes(), RepeatedChanges()
    answers = await asyncio.gather(*(repeated.once("admin", "1", changes) for _ in range(3)))
    assert (answers, changes.count) == ([Done()] * 3, 1)
    for _ in range(2):
        with pytest.raises(BadRequest, match="already"):
            await repeated.once("admin", "2", changes)
    assert await repeated.once("admin", "1", changes) == Done()
    assert changes.count == 2
    await repeated.once("another", "1", changes)
    await repeated.once("admin", "", changes)
    await repeated.once("admin", "", changes)
    assert changes.count == 5


async def test_kept_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MAX_ANSWERS", 3)

    changes, repeated = Changes(), RepeatedChanges()
    changes.count = 10
    for number in range(10):
        await repeated.once("admin", str(number), changes)
    await repeated.once("admin", "9", changes)
    assert changes.count == 20
    await repeated.once("admin", "0", changes)
    assert changes.count == 21
