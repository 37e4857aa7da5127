"""How much the bodies of requests may hold."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from starlette.requests import Request

from coordinator.http import bodies
from coordinator.http.bodies import MAX_BODY_BYTES, MAX_VALUES, Bodies, BodyReader, num_values
from coordinator.http.failures import Failure


def request_of(*pieces: bytes, declared: int | None = None) -> Request:
    """A request whose body comes in pieces."""
    incoming = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    incoming.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return incoming.pop(0)

    headers = [(b"content-length", str(declared).encode())] if declared is not None else []
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def read(reader: BodyReader, *pieces: bytes, declared: int | None = None) -> object:
    return asyncio.run(reader.read(request_of(*pieces, declared=declared)))


def status_of(reader: BodyReader, *pieces: bytes, declared: int | None = None) -> int:
    with pytest.raises(Failure) as failure:
        read(reader, *pieces, declared=declared)
    return failure.value.status


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a",:[]{}\\\u00e9'), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def counted(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + counted(each) for each in value.values())
    return 1 + sum(map(counted, value)) if isinstance(value, list) else 1


@given(_JSON, st.booleans())
def test_values_are_counted_without_reading_them(value: object, is_ascii: bool) -> None:
    found = num_values(json.dumps(value, ensure_ascii=is_ascii).encode())
    assert counted(value) <= found <= 2 * counted(value) + 1


def test_body_with_too_many_values_is_refused_and_a_long_text_is_not() -> None:
    with Bodies().of("t") as reader:
        assert status_of(reader, b"[" + b"[]," * MAX_VALUES + b"[]]") == 413
    with Bodies().of("t") as reader:
        assert status_of(reader, b"[" + b'"",' * MAX_VALUES + b'""]') == 413
    text = '[1,{"a":[]}],' * MAX_VALUES
    with Bodies().of("t") as reader:
        assert read(reader, json.dumps([text]).encode()) == [text]


def test_bytes_count_until_the_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BYTES_OF_TOKEN", 10)
    monkeypatch.setattr(bodies, "MAX_BYTES", 16)
    held = Bodies()
    with ExitStack() as stack:

        def reader(token: str) -> BodyReader:
            return stack.enter_context(held.of(token))

        assert read(reader("one"), b"[1,", b"2,3]") == [1, 2, 3]
        assert status_of(reader("one"), b"[1]", b" ") == 429
        assert status_of(reader("one"), declared=4) == 429
        assert read(reader("two"), b"[1,2]") == [1, 2]
        assert status_of(reader("three"), b"[1,2,3]") == 503
    with held.of("one") as again:
        assert read(again, b"[1,2,3,4]", declared=9) == [1, 2, 3, 4]


def test_body_that_is_declared_too_large_is_not_read() -> None:
    with Bodies().of("t") as reader:
        assert status_of(reader, declared=MAX_BODY_BYTES + 1) == 413
