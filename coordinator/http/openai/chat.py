"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from coordinator.http.call import Answer, Call, EventStream
from coordinator.http.failures import Failure, unsupported
from coordinator.http.fields import Body, TextPart
from coordinator.http.openai.sampling import (
    DONE,
    SIGN_OF_LIFE,
    Sampled,
    event,
    failed_event,
    new_id,
    now,
    usage_fields,
)
from coordinator.http.parts import parts_of, while_connected, whole
from hearth.client.answers import AsyncGeneration


class Message(Body):
    """One message of a chat."""

    ignored: ClassVar[frozenset[str]] = frozenset({"name"})
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tool_calls": ([],), "refusal": ("",), "audio": (), "function_call": (), "reasoning_content": ("",),
        "annotations": ([],),
    }  # fmt: skip

    role: str
    content: str | tuple[TextPart, ...] | None = None

    def text(self, field: str) -> str:
        """The text of all parts. Raises Failure for a part of another type."""
        if not isinstance(self.content, tuple):
            return self.content or ""
        for number, part in enumerate(self.content):
            if part.type != "text":
                raise unsupported(
                    f"{field}.content.{number}", f"parts of the type '{part.type}' are not supported, only text"
                )
        return "".join(part.text for part in self.content)


class ChatCompletion(Sampled):
    """The body of the request."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},),
        "presence_penalty": (0,), "frequency_penalty": (0,), "modalities": (["text"],), "audio": (), "prediction": (),
        "reasoning_effort": ("none",), "verbosity": (), "web_search_options": (), "chat_template_kwargs": ({},),
    }  # fmt: skip

    messages: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    def chat(self) -> list[dict[str, str]]:
        """The messages for the chat template. Raises Failure that names the field."""
        chat = []
        for number, given in enumerate(self.messages):
            field = f"messages.{number}"
            try:
                message = Message.read(given)
            except Failure as failure:
                raise _within(field, failure) from None
            if message.role not in ("system", "developer", "user", "assistant"):
                raise unsupported(f"{field}.role", f"the role '{message.role}' is not supported")
            role = "system" if message.role == "developer" else message.role
            chat.append({"role": role, "content": message.text(field)})
        return chat


def _within(field: str, failure: Failure) -> Failure:
    """The failure of a field of a message, with the field's whole path."""
    inner = failure.param or ""
    message = failure.message.replace(f"'{inner}'", f"'{field}.{inner}'", 1)
    return Failure(failure.status, message, failure.kind, f"{field}.{inner}", failure.code)


async def chat_completion(call: Call) -> Answer:
    """Answer a chat, as a whole or as a stream of chunks."""
    asked = ChatCompletion.read(call.body)
    chat, shows_usage = asked.chat(), asked.shows_usage
    served = await call.ready(asked.model)
    most = asked.max_completion_tokens or asked.max_tokens
    generations = [asked.generate(served.home, number, most, messages=chat) for number in range(asked.n or 1)]
    head = {"id": new_id("chatcmpl"), "created": now(), "model": served.model}
    if asked.stream:
        return EventStream("text/event-stream", _chunks(head, generations, shows_usage), failed_event)
    return await while_connected(call.receive, _whole(head, generations))


async def _whole(head: dict[str, Any], generations: Sequence[AsyncGeneration]) -> dict[str, Any]:
    texts, usages = await whole(generations)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": usage.finish_reason,
        }
        for index, (text, usage) in enumerate(zip(texts, usages, strict=True))
    ]
    return {**head, "object": "chat.completion", "choices": choices, "usage": usage_fields(usages)}


async def _chunks(
    head: dict[str, Any], generations: Sequence[AsyncGeneration], shows_usage: bool
) -> AsyncGenerator[bytes, None]:
    head = {**head, "object": "chat.completion.chunk"}
    started: set[int] = set()
    usages = []

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event({**head, "choices": [choice], **({"usage": None} if shows_usage else {})})

    async for part in parts_of(generations):
        if part is None:
            yield SIGN_OF_LIFE
            continue
        if part.number not in started:
            started.add(part.number)
            yield chunk(part.number, {"role": "assistant", "content": ""})
        if part.token is not None and part.token.text:
            yield chunk(part.number, {"content": part.token.text})
        if part.usage is not None:
            usages.append(part.usage)
            yield chunk(part.number, {}, part.usage.finish_reason)
    if shows_usage:
        yield event({**head, "choices": [], "usage": usage_fields(usages)})
    yield DONE
