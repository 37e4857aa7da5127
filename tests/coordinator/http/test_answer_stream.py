"""Parts of answers: signs of life, cancellation; host names; errors as HTTP answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

pytest.importorskip("starlette")

from coordinator.http.answer_stream import parts_of
from coordinator.http.app import is_allowed_host
from coordinator.http.failures import failure
from hearth.client.answers import AsyncGeneration, Token, Usage
from hearth.errors import ERROR_TYPES, error_from_wire

USAGE = Usage(1, 1, "stop", 0.1, 0.0, 0.0)


def generation(pauses: list[float], ended: list[int], number: int = 0) -> AsyncGeneration:
    async def parts() -> AsyncGenerator[Token | Usage, None]:
        try:
            for pause in pauses:
                await asyncio.sleep(pause)
                yield Token(f"{number}", number, 0.0)
            yield USAGE
        finally:
            ended.append(number)

    return AsyncGeneration(parts())


async def test_silence_gives_a_sign_of_life_and_loses_nothing() -> None:
    parts = [part async for part in parts_of([generation([0.0, 0.2], [])], silence_seconds=0.05)]
    assert None in parts
    assert [part.token.text if part.token else part.usage for part in parts if part] == ["0", "0", USAGE]


async def test_closing_cancels_all_answers() -> None:
    ended: list[int] = []
    parts = parts_of([generation([0.0, 60.0], ended, number) for number in range(3)])
    assert await anext(parts) is not None
    await parts.aclose()
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("", True), ("localhost:47880", True), ("127.0.0.1", True), ("[::1]:47880", True), ("kitchen.local:80", True),
        ("Attic.Home.Arpa", True), ("hearth.example.org", True), ("attacker.example", False), ("127.0.0.1.evil.example", False),
        ("local", False), ("x.local.evil.example:47880", False),
    ],
)  # fmt: skip
def test_host_names(header: str, allowed: bool) -> None:
    assert is_allowed_host(header, ("hearth.example.org",)) is allowed


def test_every_error_has_a_status_and_its_advice() -> None:
    for code in ERROR_TYPES:
        error = error_from_wire(code, {})
        shown = failure(error)
        assert 400 <= shown.status < 600
        assert (shown.status == 500) == (error.code == "InternalError")
        assert shown.status == 401 or error.next_step() in shown.message
