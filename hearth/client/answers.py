"""Client side of answers: named arrays of an ONNX graph; requests for text, and iterating over its tokens as they arrive."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from typing_extensions import Self

from hearth.errors import BadRequest, HearthError
from hearth.protocol import MAX_PAYLOAD_FRAMES
from hearth.validation import first_error
from hearth.wire import messages as wire

if TYPE_CHECKING:
    import numpy as np

    Arrays: TypeAlias = Mapping[str, np.ndarray[Any, Any]]
else:
    Arrays = Mapping

_CLOSE_SECONDS = 10.0  # longest wait of `close` for the event loop: as for other calls that run no model

_M = TypeVar("_M", bound=BaseModel)
_I = TypeVar("_I")
_S = TypeVar("_S", bound="_Source")

Chat = Sequence[wire.ChatMessage | Mapping[str, Any]]  # {"role": "user", "content": "..."}
RunCoroutine = Callable[[Coroutine[Any, Any, Any]], Any]


class InferenceResult(NamedTuple):
    """The outputs by name, and how long the request ran. `latency_seconds` excludes the time in the queue."""

    outputs: dict[str, np.ndarray[Any, Any]]
    latency_seconds: float
    traces: tuple[wire.DeviceTrace, ...]


def array_frames(inputs: Arrays) -> list[Any]:
    """Encode the inputs as two frames each. Raises BadRequest for an input that cannot be sent, FrameTooLarge."""
    import numpy as np

    from hearth.wire.framing import pack_array

    if 2 * len(inputs) > MAX_PAYLOAD_FRAMES:
        raise BadRequest(reason=f"{len(inputs)} inputs; one request takes at most {MAX_PAYLOAD_FRAMES // 2}")
    frames: list[Any] = []
    for name, value in inputs.items():
        try:
            frames += pack_array(np.asarray(value))
        except ValueError as error:
            raise BadRequest(reason=f"the input '{name}' cannot be sent: {error}") from None
    return frames


def decode_inference(message: wire.Message, payload: Sequence[Any]) -> InferenceResult:
    """Decode the coordinator's answer. Raises BadMessage."""
    from hearth.wire.framing import unpack_arrays

    answer = wire.expect_message(message, wire.Inferred, "the coordinator")
    return InferenceResult(unpack_arrays(answer.names, payload), answer.latency_seconds, answer.traces)


class Token(NamedTuple):
    """One generated token and the text that it adds; with tools, also the reasoning and the complete calls.

    `text` is empty while a character, or a possible stop text, is incomplete. If text is still held back when the answer
    ends, it comes last, with `token_id` None.
    """

    text: str
    token_id: int | None
    seconds: float  # from sending the request to receiving this token
    reasoning: str = ""
    tool_calls: tuple[wire.ToolCall, ...] = ()
    log_probs: wire.TokenLogProbs | None = None  # if they were asked for

    @property
    def logprob(self) -> float | None:
        """The logarithm of the probability that the model gave the token, before penalties, temperature and grammar."""
        return None if self.log_probs is None else self.log_probs.chosen.value

    @property
    def top_logprobs(self) -> tuple[wire.LogProb, ...]:
        """The most likely tokens in its place: `token_id`, `value` and `piece`, the token's bytes."""
        return () if self.log_probs is None else self.log_probs.top


class Usage(NamedTuple):
    """Token counts and timings of one answer. `num_tokens` counts the generated tokens."""

    num_prompt_tokens: int
    num_tokens: int
    finish_reason: Literal["stop", "length"]
    first_token_seconds: float  # from sending the request, as measured by the client; includes the time in the queue
    queued_seconds: float
    decode_seconds: float  # for all tokens after the first
    num_cached_tokens: int = 0  # of the prompt's: their keys and values were there from earlier requests
    num_drafted_tokens: int = 0  # that were guessed before they were computed (speculative decoding)
    num_accepted_tokens: int = 0  # of these, tokens of the answer

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed over the tokens after the first; 0 if there are none."""
        return (self.num_tokens - 1) / self.decode_seconds if self.num_tokens > 1 and self.decode_seconds > 0 else 0.0


class AsyncGeneration(AbstractAsyncContextManager["AsyncGeneration"], AsyncIterator[Token]):
    """Iterator over the tokens of one answer. The request is sent when the first token is awaited; closing cancels it.

    `token_ids`, `log_probs`, `tool_calls` and `reasoning` hold what was received so far; `usage` is set at the end.
    """

    def __init__(self, parts: AsyncGenerator[Token | Usage, None]) -> None:
        self.token_ids: list[int] = []
        self.tool_calls: list[wire.ToolCall] = []
        self.log_probs: list[wire.TokenLogProbs] = []
        self.reasoning = ""
        self.usage: Usage | None = None
        self._parts = parts
        self._texts: list[str] = []
        self._next: asyncio.Future[Token | Usage] | None = None

    async def __anext__(self) -> Token:
        self._next = asyncio.ensure_future(anext(self._parts))
        part = await self._next
        if isinstance(part, Usage):
            self.usage = part
            await self._parts.aclose()
            raise StopAsyncIteration
        self._texts.append(part.text)
        self.reasoning += part.reasoning
        self.tool_calls += part.tool_calls
        if part.token_id is not None:
            self.token_ids.append(part.token_id)
        if part.log_probs is not None:
            self.log_probs.append(part.log_probs)
        return part

    async def text(self) -> str:
        """Wait for the end of the answer and return its whole text."""
        async for _ in self:
            pass
        return "".join(self._texts)

    async def aclose(self) -> None:
        """Cancel the answer, also on the coordinator. Does nothing if it has ended."""
        if self._next is not None and not self._next.done():
            self._next.cancel()
            await asyncio.wait({self._next})
        await self._parts.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Source(Protocol):
    def __anext__(self) -> Awaitable[Any]: ...

    async def aclose(self) -> None: ...


class BlockingIterator(Iterator[_I], Generic[_S, _I]):
    """An asynchronous iterator, for programs without an event loop. Closing or deleting it, or Ctrl-C, closes that one."""

    def __init__(self, source: _S, run: RunCoroutine, loop: asyncio.AbstractEventLoop) -> None:
        """`run` runs a coroutine in `loop`, which runs in another thread, and waits for its result."""
        self._source = source
        self._run = run
        self._loop = loop
        self._next_lock = threading.Lock()
        self._ended = False

    def __next__(self) -> _I:
        with self._next_lock:
            try:
                item: _I | None = self._run(self._next_item())
            except HearthError:
                self._ended = True
                raise
            except BaseException:  # Ctrl-C
                self.close()
                raise
        if item is None:
            self._ended = True
            raise StopIteration
        return item

    def close(self) -> None:
        """End the request, also on the coordinator. Does nothing if it has ended."""
        if (closing := self._close()) is not None:
            with suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
                closing.result(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> concurrent.futures.Future[None] | None:
        if self._ended:
            return None
        self._ended = True
        closing = self._source.aclose()
        try:
            return asyncio.run_coroutine_threadsafe(closing, self._loop)
        except RuntimeError:  # the connection was closed, and its event loop with it
            closing.close()
            return None

    async def _next_item(self) -> _I | None:
        try:
            item: _I = await anext(self._source)
            return item
        except StopAsyncIteration:
            return None


class Generation(BlockingIterator[AsyncGeneration, Token]):
    """As `AsyncGeneration`, for programs without an event loop. Closing or deleting it, or Ctrl-C, cancels the answer."""

    @property
    def token_ids(self) -> list[int]:
        """The token ids received so far."""
        return self._source.token_ids

    @property
    def log_probs(self) -> list[wire.TokenLogProbs]:
        """The tokens' log-probabilities received so far, if they were asked for."""
        return self._source.log_probs

    @property
    def tool_calls(self) -> list[wire.ToolCall]:
        """The calls of tools received so far."""
        return self._source.tool_calls

    @property
    def reasoning(self) -> str:
        """The reasoning received so far, if the answer's parts were asked for."""
        return self._source.reasoning

    @property
    def usage(self) -> Usage | None:
        """Token counts and timings; None until the answer has ended."""
        return self._source.usage

    def text(self) -> str:
        """Wait for the end of the answer and return its whole text."""
        text: str = self._run(self._source.text())
        return text


# ---- requests and their parts ----------------------------------------------------------------------------------------


def stream_parts(message: wire.Message, seconds: float, first_token_seconds: float) -> list[Token | Usage]:
    """Convert one message of a stream. The text of a message with several tokens is given to the last of them."""
    if isinstance(message, wire.TextGenerated):
        *others, last = message.token_ids or (None,)
        log_probs = message.log_probs or (None,) * (len(others) + 1)
        newest = Token(message.text, last, seconds, message.reasoning, message.tool_calls, log_probs[-1])
        earlier = zip(others, log_probs, strict=False)
        return [*(Token("", token_id, seconds, log_probs=each) for token_id, each in earlier), newest]
    end = wire.expect_message(message, wire.TextEnded, "the coordinator")
    usage = Usage(
        end.num_prompt_tokens,
        end.num_tokens,
        end.reason,
        first_token_seconds,
        end.queued_seconds,
        end.decode_seconds,
        end.num_cached_tokens,
        end.num_drafted_tokens,
        end.num_accepted_tokens,
    )
    held_back = Token(end.text, None, seconds, end.reasoning, end.tool_calls)
    return [*([held_back] if end.text or end.reasoning or end.tool_calls else []), usage]


def chat_message(message: wire.ChatMessage | Mapping[str, Any]) -> wire.ChatMessage:
    """Convert one message of a chat, also with calls of tools in the form of OpenAI's API. Raises BadRequest."""
    if isinstance(message, wire.ChatMessage):
        return message
    if not isinstance(message, Mapping):
        raise BadRequest(reason="each message of a chat needs a role and a content")
    calls = message.get("tool_calls") or ()
    content = message.get("content")
    text = "" if content is None and calls else content
    return valid(wire.ChatMessage, **{**message, "content": text, "tool_calls": tuple(map(_tool_call, calls))})


def _tool_call(call: wire.ToolCall | Mapping[str, Any]) -> wire.ToolCall:
    if isinstance(call, wire.ToolCall):
        return call
    try:
        function = call["function"]
        return valid(wire.ToolCall, id=call.get("id") or "", name=function["name"], arguments=function["arguments"])
    except (KeyError, TypeError, AttributeError):
        reason = 'each of tool_calls must be {"id": ..., "function": {"name": ..., "arguments": a JSON text}}'
        raise BadRequest(reason=reason) from None


def constraint(
    schema: Mapping[str, Any] | str | None, regex: str | None, grammar: str | None
) -> wire.AnswerConstraint | None:
    """What an answer must match; None: anything. Raises BadRequest if more than one is given, or a text is too long."""
    if schema is not None and not isinstance(schema, str):
        schema = json.dumps(schema)
    given = [
        (kind, text) for kind, text in (("schema", schema), ("regex", regex), ("grammar", grammar)) if text is not None
    ]
    if len(given) > 1:
        raise BadRequest(reason="give a schema, a regex or a grammar, and only one of them")
    return valid(wire.AnswerConstraint, kind=given[0][0], text=given[0][1]) if given else None


def called_tools(choice: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of the tools of which an answer must call one; empty: it is free to. Raises BadRequest."""
    if choice == "auto":
        return ()
    try:
        names = [str(tool.get("function", tool)["name"]) for tool in tools]
    except (KeyError, TypeError, AttributeError):
        raise BadRequest(reason='each of tools must be {"type": "function", "function": {"name": ...}}') from None
    called = tuple(names) if choice == "required" else (choice,)
    if not called or not set(called) <= set(names):
        raise BadRequest(reason=f"tool_choice is {choice!r}, but the tools are: {', '.join(names) or 'none'}")
    return called


def token_frames(token_ids: Sequence[int] | np.ndarray[Any, Any]) -> Sequence[Any]:
    """Encode token ids as payload frames. Raises BadRequest unless they are a list of 32-bit integers."""
    import numpy as np

    from hearth.wire.framing import pack_array

    try:
        array = np.asarray(token_ids)
        ids = array.astype(np.int32)
        fits = bool((array == ids).all())
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise BadRequest(reason="token_ids must be a list of 32-bit integers")
    return pack_array(ids)


def valid(model: type[_M], **fields: Any) -> _M:
    """Build a message. Raises BadRequest that names the invalid field and its limits."""
    try:
        return model(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name, *_ = (*first["loc"], "a field")
        schema = model.model_json_schema()["properties"].get(name, {})
        number = next((kind for kind in schema.get("anyOf", [schema]) if kind.get("type") in _NUMBERS), None)
        if number is None:
            raise BadRequest(reason=first_error(error)) from None
        limits = " and ".join(f"{word} {number[key]}" for key, word in _LIMITS.items() if key in number)
        reason = f"{name} must be {_NUMBERS[number['type']]} {limits}, not {str(first['input'])[:40]}"
        raise BadRequest(reason=reason) from None


_NUMBERS = {"number": "a number", "integer": "a whole number"}
_LIMITS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
