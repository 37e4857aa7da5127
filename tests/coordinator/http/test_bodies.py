"""How much the bodies of requests may hold."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

pytest.importorskip("starlette")

from starlette.requests import Request
from support.waiting import until

from coordinator.http import app as app  # which imports all bodies
from coordinator.http import request as module
from coordinator.http.failures import Failure
from coordinator.http.request import MAX_BODY_BYTES, MAX_VALUES, Bodies, Body, NumValues


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSED_SECONDS", 0.0)


async def read(reader: Callable[[Request], Awaitable[object]], *pieces: bytes, declared: int | None = None) -> object:
    """The value of a body that comes in pieces, or the status of its refusal."""
    incoming = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]

    async def receive() -> Any:
        return incoming.pop(0) if incoming else {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"content-length", str(declared).encode())] if declared is not None else []

    try:
        return await reader(Request({"type": "http", "method": "POST", "headers": headers}, receive))
    except Failure as failure:
        return failure.status


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a",:[]{}\\\u00e9'), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def counted(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + counted(each) for each in value.values())
    return 1 + sum(map(counted, value)) if isinstance(value, list) else 1


@given(_JSON, st.booleans(), st.lists(st.integers(0, 200)))
def test_values_are_counted_without_reading_them(value: object, is_ascii: bool, cuts: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    ends = sorted(cuts)
    values = NumValues()
    *_, found = (values.add(text[begin:end]) for begin, end in zip([0, *ends], [*ends, None], strict=True))
    assert counted(value) <= found <= 2 * counted(value) + 1


def bodies(kind: type[Body] = Body) -> set[type[Body]]:
    return {kind}.union(*map(bodies, kind.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(bodies(), key=lambda kind: (kind.__module__, kind.__name__)))
def test_a_field_with_many_wrong_values_gives_few_errors(kind: type[Body]) -> None:
    many: list[Any] = [
        [None] * 999,
        [[None] * 999],
        [[None]] * 999,
        [{"": None}] * 999,
        dict.fromkeys(map(str, range(999))),
    ]
    for name in kind.model_fields:
        for wrong in many:
            try:
                kind.model_validate({name: wrong})
            except ValidationError as error:
                assert sum(each["loc"][0] == name for each in error.errors()) < 10
    with pytest.raises(Failure, match="'0'"):
        kind.read(many[-1])


@pytest.mark.parametrize("each", [b"[],", b'"",', b"0,", b'{"":0},'])
async def test_body_with_too_many_values_is_refused(each: bytes) -> None:
    with Bodies().of("t") as reader:
        assert await read(reader, b"[" + each * MAX_VALUES + b"0]") == 413
        assert await read(reader, text := json.dumps(str(each * MAX_VALUES)).encode()) == json.loads(text)


async def test_bytes_count_until_the_request_ends_and_for_their_share_of_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES_OF_TOKEN", 10)
    monkeypatch.setattr(module, "MAX_BYTES", 16)
    bodies = Bodies()
    with ExitStack() as stack:
        one, two, three, again = (stack.enter_context(bodies.of(token)) for token in ("one", "two", "three", "one"))
        assert await read(one, b"[1,", b"2,3]") == [1, 2, 3]
        assert await read(again, declared=4) == await read(again, b"[1]", b" ") == 429
        assert await read(two, b"[1,2]") == [1, 2]
        assert await read(three, b"[1,2,3]") == 503
        assert await read(three, declared=MAX_BODY_BYTES + 1) == 413
    with bodies.of("one") as reader:
        await until("the end of the token's second", lambda: not bodies._of_token)
        assert await read(reader, b"[1,2,3,4]", declared=9) == [1, 2, 3, 4]
