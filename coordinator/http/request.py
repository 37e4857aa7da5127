"""One HTTP request: the fields of its body that both APIs share, what its handler gets, and the two forms of answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from coordinator.http.answer_stream import Receive
from coordinator.http.failures import Failure, unknown_model, unsupported
from coordinator.http.homes import Asked, Served, wait_until_ready
from hearth.client.answers import AsyncGeneration
from hearth.client.home import AsyncHome
from hearth.errors import NotServing
from hearth.wire import messages as wire

MAX_BODY_BYTES = 8 << 20  # a chat that fills the longest contexts has a tenth of it
# Of requests that have not ended: a body and what is made of it stay in memory as long. Those of a token count longer, a second
# for the largest body: to read one costs the processor time of thousands of small requests.
MAX_BYTES_OF_TOKEN, MAX_BYTES = 12 << 20, 32 << 20
REFUSED_SECONDS = 1.0  # until too large a body is answered, so that a client that tries again at once takes little
# In a body. A chat of a hundred messages with a hundred tools has some thousands.
MAX_VALUES = 1 << 16
_MARKS = (b",", b"[", b"{")  # of which each value but the first in its list or object needs one
_READY_SECONDS = 5.0  # for a home that is not ready now: one that has lost a device plans again within a second or two
_ANSWER_SECONDS = 3600.0  # longest answer; a client that goes away ends it

_B = TypeVar("_B", bound="Body")

_T = TypeVar("_T")
# The first wrong item ends the validation, since each error takes memory.
Many = Annotated[tuple[_T, ...], Field(fail_fast=True)]
Texts = Annotated[
    Many[str], BeforeValidator(lambda given: () if given is None else (given,) if isinstance(given, str) else given)
]
NumTop = Annotated[int, Field(ge=0, le=wire.MAX_TOP_LOG_PROBS)]


class Body(BaseModel):
    """A request's JSON object. Unknown fields are refused, since they might change the answer."""

    model_config = ConfigDict(frozen=True)

    # Fields that clients send and that change no answer here.
    ignored: ClassVar[frozenset[str]] = frozenset()
    # Fields that are not supported, with the values that ask for nothing.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def read(cls: type[_B], given: object) -> _B:
        """Validate a request. Raises Failure that names the field."""
        if not isinstance(given, dict):
            raise Failure(400, "The body must be a JSON object.")
        fields = {name: value for name, value in given.items() if name not in cls.ignored}
        for name, values in cls.neutral.items():
            if name in fields and (value := fields.pop(name)) is not None and value not in values:
                raise unsupported(name)
        for name in fields:
            if name not in cls.model_fields:
                raise unsupported(name)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _failure(error) from None


def _failure(error: ValidationError) -> Failure:
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    return Failure(400, f"The field '{name}' is not valid: {first['msg']}.", param=name)


class TextPart(BaseModel):
    """A part of a message's content. Only texts are supported."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str = ""


class Sampled(Body):
    """Sampling settings and stop texts, named as in OpenAI's API; both APIs allow a few values that `generate` does not."""

    temperature: wire.Temperature | None = None
    top_k: Annotated[int, Field(ge=-1), AfterValidator(lambda number: max(number, 0))] | None = None  # -1: all
    top_p: wire.TopP | None = None
    min_p: wire.MinP | None = None
    repetition_penalty: wire.RepetitionPenalty | None = None
    presence_penalty: wire.Penalty | None = None
    frequency_penalty: wire.Penalty | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[Texts, Field(max_length=16)] = ()

    def generate(self, home: AsyncHome, max_tokens: int | None, number: int = 0, **arguments: Any) -> AsyncGeneration:
        """Begin the answer with this number to a request; `arguments` are others of `AsyncHome.generate`."""
        sampling: dict[str, Any] = {name: getattr(self, name, None) for name in wire.SamplingChoice.model_fields}
        if self.seed is not None:
            sampling["seed"] = (self.seed + number) % (1 << 63)
        return home.generate(
            **arguments, **sampling, max_tokens=max_tokens, stop=self.stop, timeout_seconds=_ANSWER_SECONDS
        )


class EventStream(NamedTuple):
    """An answer in pieces. `events` raises HearthError or Failure; `failed` is the last piece after one of them."""

    media_type: str
    events: AsyncGenerator[bytes, None]
    failed: Callable[[Failure], bytes]


class Call(NamedTuple):
    """One request: the home as its token sees it, its body as JSON, and the variables of its path."""

    served: Served
    receive: Receive
    body: object
    path: Mapping[str, str]

    async def ready(self, model: str) -> Asked:
        """The model of this name, once it is ready. Raises Failure for one that is not served, NotServing."""
        served = self.served
        if not served.models:
            raise NotServing(state="no model is served")
        if (found := served.named(model)) is None:
            raise unknown_model(model, served.models)
        return await wait_until_ready(served.home, found, _READY_SECONDS)


Answer = dict[str, Any] | EventStream
Handler = Callable[[Call], Awaitable[Answer]]


# ---- how much a body may hold ------------------------------------------------------------------------------------------


class Bodies:
    """Counts the bytes of the bodies of all requests that have not ended, and by token."""

    def __init__(self) -> None:
        self._of_token: Counter[str] = Counter()
        self._num_held = 0  # of all tokens, by requests that have not ended

    @contextmanager
    def of(self, token: str) -> Iterator[Callable[[Request], Awaitable[object]]]:
        """A function that reads the body of a request, as `_read` does. Its bytes count until the end of the block."""
        num_held = 0

        def hold(num_bytes: int) -> None:
            """Count a body with so many bytes so far. Raises Failure."""
            nonlocal num_held
            more = max(num_bytes - num_held, 0)
            if num_bytes > MAX_BODY_BYTES:
                raise Failure(413, f"The body has more than {MAX_BODY_BYTES} bytes.")
            if self._of_token[token] + more > MAX_BYTES_OF_TOKEN:
                reason = f"The requests of this token that run have more than {MAX_BYTES_OF_TOKEN} bytes."
                raise Failure(429, reason, "rate_limit_error", code="too_many_bytes")
            if self._num_held + more > MAX_BYTES:
                raise Failure(503, f"The requests that run have more than {MAX_BYTES} bytes.", "server_error")
            self._of_token[token] += more
            self._num_held += more
            num_held += more

        try:
            yield lambda request: _read(request, hold)
        finally:
            self._num_held -= num_held
            asyncio.get_running_loop().call_later(num_held / MAX_BODY_BYTES, self._forget, token, num_held)

    def _forget(self, token: str, num_bytes: int) -> None:
        self._of_token[token] -= num_bytes
        self._of_token += Counter()  # without tokens that hold nothing


async def _read(request: Request, hold: Callable[[int], None]) -> object:
    """The JSON value. Raises Failure if it is no JSON, is too large or holds too much, or if too much is sent at once."""
    try:
        body = await _bytes(request, hold)
    except Failure:
        await asyncio.sleep(REFUSED_SECONDS)
        raise
    try:
        value: object = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Failure(400, f"The body is not valid JSON: {error}.") from None
    return value


async def _bytes(request: Request, hold: Callable[[int], None]) -> bytearray:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        hold(int(declared))  # not read at all, if it is too much
    body, values = bytearray(), NumValues()
    async for piece in request.stream():
        body += piece
        hold(len(body))
        if values.add(piece) > MAX_VALUES:
            raise Failure(413, f"The body has more than {MAX_VALUES} values.")
    request.state.is_read = True
    return body


class NumValues:
    """An upper limit of the number of values and names in a JSON text that comes in pieces, of which it keeps none."""

    def __init__(self) -> None:
        self._num_quotes = 0  # that begin or end a string
        self._num_marks = 0  # outside strings
        self._is_escaped = False  # whether the last piece ended with a backslash that escapes the next character

    def add(self, piece: bytes) -> int:
        """The number with this piece."""
        plain = piece[self._is_escaped :].replace(rb"\\", b"")  # then without what is escaped in a string
        self._is_escaped = plain.endswith(b"\\") or (self._is_escaped and not piece)
        parts = plain.replace(rb"\"", b"").split(b'"')
        outside = parts[self._num_quotes % 2 :: 2]
        self._num_quotes += len(parts) - 1
        self._num_marks += sum(part.count(mark) for part in outside for mark in _MARKS)
        return 1 + self._num_quotes // 2 + self._num_marks
