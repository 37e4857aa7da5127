"""`POST /v1/responses`, as far as it needs no state: every request holds the whole conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coordinator.http.answer_stream import entries, of_token, parts_of, while_connected
from coordinator.http.failures import Failure, unsupported
from coordinator.http.openai.chat import schema_of, tool_choice
from coordinator.http.openai.common import SIGN_OF_LIFE, TextRequest, event, new_id, now
from coordinator.http.request import Answer, Call, EventStream, Many, NumTop
from hearth.client.answers import AsyncGeneration, Token, Usage
from hearth.wire.messages import ToolCall

_LOG_PROBS = "message.output_text.logprobs"  # of `include`
_Kind = Literal["message", "reasoning"]
_Event = dict[str, Any]
_TEXTS = ("input_text", "output_text", "text")  # types of parts


class ResponseRequest(TextRequest):
    """The body of the request."""

    ignored: ClassVar[frozenset[str]] = (TextRequest.ignored - {"store"}) | {"prompt_cache_options"}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "store": (False,), "background": (False,), "previous_response_id": (), "conversation": (), "prompt": (),
        "truncation": ("disabled",), "n": (1,), "max_tool_calls": (), "context_management": ([],), "moderation": (),
    }  # fmt: skip

    input: str | Annotated[Many[dict[str, Any]], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[Many[dict[str, Any]], Field(max_length=256)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: Many[str] | None = None
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
        served.home, asked.max_output_tokens or asked.max_tokens, model=served.deployment, **arguments
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


class ResponseEvents:
    """The events of a response's stream, and the response that they add up to.

    Call `begin`, `add` for each token, and `end`; each returns the next events. `response` is the whole once it has ended.
    """

    def __init__(self, head: dict[str, Any]) -> None:
        """`head`: the fields of the response that do not depend on the answer."""
        self._items: list[dict[str, Any]] = []
        self._open: _Kind | None = None  # the newest item, while it grows
        self._number = 0
        self.response: dict[str, Any] = {
            **head, "status": "in_progress", "output": self._items, "usage": None, "error": None, "incomplete_details": None,
        }  # fmt: skip

    def begin(self) -> list[_Event]:
        """The events before the first token."""
        return [self._event(f"response.{kind}", response={**self.response}) for kind in ("created", "in_progress")]

    def add(self, token: Token) -> list[_Event]:
        """The events of a token."""
        events: list[_Event] = []
        if token.reasoning:
            events += self._grow("reasoning", token.reasoning, [])
        if token.text or (token.log_probs is not None and not token.reasoning):
            events += self._grow("message", token.text, entries(of_token(token)))
        for call in token.tool_calls:
            events += [*self._close(), *self._call(call)]
        return events

    def end(self, usage: Usage) -> list[_Event]:
        """The last events."""
        events = self._close()
        if not self._items:
            events += [*self._grow("message", "", []), *self._close()]
        cut = usage.finish_reason == "length"
        if cut:
            self._items[-1]["status"] = "incomplete"
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["status"] = "incomplete" if cut else "completed"
        self.response["usage"] = {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_prompt_tokens + usage.num_tokens,
        }
        return [*events, self._event(f"response.{self.response['status']}", response=self.response)]

    def failed(self, failure: Failure) -> bytes:
        """The last event of a stream that broke off. Clients raise what `error` holds."""
        error = failure.openai()["error"]
        return event(self._event("error", code=failure.code, message=failure.message, param=failure.param, error=error))

    # ---- items ----------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _grow(self, kind: _Kind, text: str, log_probs: list[dict[str, Any]]) -> list[_Event]:
        """Append a text to the newest item, or to a new one if that is of another kind."""
        events: list[_Event] = []
        if self._open != kind:
            events += self._close()
            self._open = kind
            if kind == "message":
                item: dict[str, Any] = {"id": new_id("msg"), "type": "message", "role": "assistant"}
            else:
                item = {"id": new_id("rs"), "type": "reasoning", "summary": []}
            item |= {"status": "in_progress", "content": []}
            self._items.append(item)
            events.append(
                self._event("response.output_item.added", output_index=len(self._items) - 1, item=_copy(item))
            )
            part = _part(kind)
            item["content"].append(part)
            events.append(self._event("response.content_part.added", **self._place, content_index=0, part={**part}))
        part = self._items[-1]["content"][0]
        part["text"] += text
        name = "output_text" if kind == "message" else "reasoning_text"
        extra = {}
        if kind == "message":
            part["logprobs"] += log_probs
            extra = {"logprobs": log_probs}
        delta = self._event(f"response.{name}.delta", **self._place, content_index=0, delta=text, **extra)
        return [*events, delta]

    def _close(self) -> list[_Event]:
        """End the newest item, if it grows."""
        if self._open is None:
            return []
        kind, item, place = self._open, self._items[-1], {**self._place, "content_index": 0}
        self._open, item["status"] = None, "completed"
        part = item["content"][0]
        name = "output_text" if kind == "message" else "reasoning_text"
        extra = {"logprobs": part["logprobs"]} if kind == "message" else {}
        return [
            self._event(f"response.{name}.done", **place, text=part["text"], **extra),
            self._event("response.content_part.done", **place, part={**part}),
            self._event("response.output_item.done", output_index=place["output_index"], item=_copy(item)),
        ]

    def _call(self, call: ToolCall) -> list[_Event]:
        item = {
            "id": new_id("fc"), "type": "function_call", "status": "completed", "call_id": call.id, "name": call.name,
            "arguments": call.arguments,
        }  # fmt: skip
        self._items.append(item)
        place, index = self._place, len(self._items) - 1
        begun = {**item, "status": "in_progress", "arguments": ""}
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item={**item}),
        ]

    def _event(self, kind: str, **fields: Any) -> _Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _part(kind: _Kind) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": ""}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is now."""
    return {**item, "content": [{**part} for part in item["content"]]}
