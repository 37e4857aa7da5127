"""`POST /v1/responses`, as far as it needs no state: every request holds the whole conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from coordinator.http.call import Answer, Call, EventStream
from coordinator.http.failures import Failure, unsupported
from coordinator.http.log_probs import NumTop
from coordinator.http.openai.chat import schema_of, tool_choice
from coordinator.http.openai.response_events import ResponseEvents
from coordinator.http.openai.sampling import SIGN_OF_LIFE, Sampled, event, new_id, now
from coordinator.http.parts import parts_of, while_connected
from hearth.client.answers import AsyncGeneration

_LOG_PROBS = "message.output_text.logprobs"  # of `include`
_TEXTS = ("input_text", "output_text", "text")  # types of parts


class ResponseRequest(Sampled):
    """The body of the request."""

    ignored: ClassVar[frozenset[str]] = (Sampled.ignored - {"store"}) | {"prompt_cache_options"}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "store": (False,), "background": (False,), "previous_response_id": (), "conversation": (), "prompt": (),
        "truncation": ("disabled",), "n": (1,), "max_tool_calls": (), "context_management": ([],), "moderation": (),
    }  # fmt: skip

    input: str | Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[tuple[dict[str, Any], ...], Field(max_length=256)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: tuple[str, ...] | None = None
    top_logprobs: NumTop | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of `generate`. Raises Failure that names the field."""
        if self.reasoning and self.reasoning.get("effort") not in (None, "none"):
            raise unsupported("reasoning.effort", "the model decides how much it reasons")
        known = {_LOG_PROBS, "reasoning.encrypted_content"}
        if unknown := sorted(set(self.include or ()) - known):
            raise unsupported("include", f"'{unknown[0]}' is not supported")
        tools = [_tool(number, tool) for number, tool in enumerate(self.tools or ()) if self.tool_choice != "none"]
        return {
            "messages": self._messages(),
            "tools": tools,
            "tool_choice": tool_choice(self.tool_choice, [each["function"].get("name") for each in tools]),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "schema": schema_of((self.text or {}).get("format") or {}, "text.format"),
            "takes_parts": True,
            "logprobs": _LOG_PROBS in (self.include or ()),
            "top_logprobs": self.top_logprobs or 0,
        }

    def _messages(self) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            _append(messages, item, f"input.{number}")
        return messages

    def shown(self) -> dict[str, Any]:
        """The fields of the response that repeat the request."""
        return {
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens, "metadata": {},
            "parallel_tool_calls": self.parallel_tool_calls is not False, "previous_response_id": None, "store": False,
            "temperature": self.temperature, "top_p": self.top_p, "text": self.text or {"format": {"type": "text"}},
            "tool_choice": self.tool_choice or "auto", "tools": list(self.tools or ()), "truncation": "disabled",
        }  # fmt: skip


def _append(messages: list[dict[str, Any]], item: dict[str, Any], field: str) -> None:
    """Append an item of the conversation. Raises Failure."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise Failure(400, f"The field '{field}.role' is not valid.", param=f"{field}.role")
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": _text(item.get("content"), f"{field}.content")})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
    elif kind == "function_call_output":
        output = _text(item.get("output"), f"{field}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id") or "", "content": output})
    elif kind != "reasoning":  # of earlier answers, which chat templates leave out
        raise unsupported(f"{field}.type", f"items of the type '{kind}' are not supported")


def _text(content: object, field: str) -> str:
    """The text of all parts. Raises Failure."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise Failure(400, f"The field '{field}' must be a text or a list of parts.", param=field)
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise unsupported(f"{field}.{number}", "only parts that are texts are supported")
        texts.append(part["text"])
    return "".join(texts)


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of chats. Raises Failure."""
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise unsupported(f"tools.{number}", "only tools of the type 'function' are supported")
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


async def response(call: Call) -> Answer:
    """Answer a conversation, as a whole or as a stream of events."""
    asked = ResponseRequest.read(call.body)
    arguments = asked.arguments()
    served = await call.ready(asked.model)
    generation = asked.generate(
        served.home, 0, asked.max_output_tokens or asked.max_tokens, model=served.deployment, **arguments
    )
    head = {"id": new_id("resp"), "object": "response", "created_at": now(), "model": served.model, **asked.shown()}
    events = ResponseEvents(head)
    if asked.stream:
        return EventStream("text/event-stream", _events(events, generation), events.failed)
    return await while_connected(call.receive, _whole(events, generation))


async def _whole(events: ResponseEvents, generation: AsyncGeneration) -> dict[str, Any]:
    async for _ in _steps(events, generation):
        pass
    return events.response


async def _events(events: ResponseEvents, generation: AsyncGeneration) -> AsyncGenerator[bytes, None]:
    async for step in _steps(events, generation):
        if step is None:
            yield SIGN_OF_LIFE
        for each in step or ():
            yield b"event: " + each["type"].encode() + b"\n" + event(each)


async def _steps(
    events: ResponseEvents, generation: AsyncGeneration
) -> AsyncGenerator[list[dict[str, Any]] | None, None]:
    """The events of each part of the answer; None when nothing has arrived for a while."""
    yield events.begin()
    async for part in parts_of([generation]):
        if part is None:
            yield None
        elif part.token is not None:
            yield events.add(part.token)
        elif part.usage is not None:
            yield events.end(part.usage)
