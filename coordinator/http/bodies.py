"""Bodies of requests: how many bytes a token and all together may send at once, and how much JSON they may hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic_core import from_json
from starlette.requests import Request

from coordinator.http.failures import Failure

MAX_BODY_BYTES = 8 << 20  # a chat that fills the longest contexts has a tenth of it
# Of requests that have not ended: a body and what is made of it stay in memory as long.
MAX_BYTES_OF_TOKEN, MAX_BYTES = 12 << 20, 32 << 20
# In a body. A chat of a hundred messages with a hundred tools has some thousands.
MAX_VALUES = 1 << 16


class Bodies:
    """Counts the bytes of the bodies of all requests that have not ended."""

    def __init__(self) -> None:
        self._of_token: Counter[str] = Counter()

    @contextmanager
    def of(self, token: str) -> Iterator[BodyReader]:
        """The reader of one request's body, whose bytes count until the end of the block."""
        reader = BodyReader(self._of_token, token)
        try:
            yield reader
        finally:
            self._of_token[token] -= reader.num_bytes
            if not self._of_token[token]:
                del self._of_token[token]


class BodyReader:
    """Reads the body of one request of a token."""

    def __init__(self, of_token: Counter[str], token: str) -> None:
        self.num_bytes = 0
        self._of_token, self._token = of_token, token

    async def read(self, request: Request) -> object:
        """The JSON value. Raises Failure if it is no JSON, is too large or holds too much, or if too much is sent at once."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal():
            self._take(int(declared))  # not read at all, if it is too much
        body = bytearray()
        async for piece in request.stream():
            body += piece
            self._take(len(body) - self.num_bytes)
        if num_values(body) > MAX_VALUES:
            raise Failure(413, f"The body has more than {MAX_VALUES} values.")
        try:
            value: object = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise Failure(400, f"The body is not valid JSON: {error}.") from None
        return value

    def _take(self, more_bytes: int) -> None:
        """Count bytes of the body. Raises Failure."""
        if more_bytes <= 0:
            return
        if self.num_bytes + more_bytes > MAX_BODY_BYTES:
            raise Failure(413, f"The body has more than {MAX_BODY_BYTES} bytes.")
        if self._of_token[self._token] + more_bytes > MAX_BYTES_OF_TOKEN:
            reason = f"Requests of this token that have not been answered have more than {MAX_BYTES_OF_TOKEN} bytes."
            raise Failure(429, reason, "rate_limit_error", code="too_many_bytes")
        if self._of_token.total() + more_bytes > MAX_BYTES:
            reason = f"Requests that have not been answered have more than {MAX_BYTES} bytes."
            raise Failure(503, reason, "server_error", code="too_many_bytes")
        self._of_token[self._token] += more_bytes
        self.num_bytes += more_bytes


def num_values(text: bytes | bytearray) -> int:
    """An upper limit of the number of values and names in a JSON text, which builds none of them."""
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")  # without what is escaped in a string
    num_strings = plain.count(b'"') // 2
    if num_strings > MAX_VALUES:
        return num_strings
    outside = b"".join(plain.split(b'"')[::2])
    return 1 + num_strings + sum(outside.count(mark) for mark in (b",", b"[", b"{"))
