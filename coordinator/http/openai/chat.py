"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from coordinator.http.answer_stream import entries, of_token, parts_of, while_connected, whole
from coordinator.http.failures import Failure, unsupported
from coordinator.http.openai import common
from coordinator.http.request import Answer, Body, Call, EventStream, Many, NumTop, TextPart
from hearth.client.answers import AsyncGeneration, Token
from hearth.wire.messages import MAX_TEMPLATE_OPTIONS, TokenLogProbs, ToolCall


def _few(options: object) -> object:
    """Refuse too many options before they are validated: each wrong one would be an error that takes memory."""
    if isinstance(options, dict) and len(options) > MAX_TEMPLATE_OPTIONS:
        raise ValueError(f"at most {MAX_TEMPLATE_OPTIONS} options")
    return options


class Message(Body):
    """One message of a chat."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "refusal": ("",), "audio": (), "function_call": (), "annotations": ([],),
    }  # fmt: skip

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Many[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def text(self, field: str) -> str:
        """The text of all parts. Raises Failure for a part of another type."""
        if not isinstance(self.content, tuple):
            return self.content or ""
        for number, part in enumerate(self.content):
            if part.type != "text":
                reason = f"parts of the type '{part.type}' are not supported, only text"
                raise unsupported(f"{field}.content.{number}", reason)
        return "".join(part.text for part in self.content)


class ChatCompletion(common.TextRequest):
    """The body of the request."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **common.TextRequest.neutral, "functions": ([],), "function_call": ("none", "auto"),
        "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": ("none",), "verbosity": (),
        "web_search_options": (),
    }  # fmt: skip

    messages: Annotated[Many[dict[str, Any]], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[Many[dict[str, Any]], Field(max_length=256)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    chat_template_kwargs: Annotated[dict[str, bool | int | float | str], BeforeValidator(_few)] | None = None

    def prompt(self) -> dict[str, Any]:
        """The arguments of `generate` for this chat. Raises Failure that names the field."""
        for number, tool in enumerate(self.tools or ()):
            if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
                raise unsupported(f"tools.{number}", "only tools of the type 'function' are supported")
        tools = self.tools if self.tools and self.tool_choice != "none" else ()
        return {
            "messages": [self._message(number, given) for number, given in enumerate(self.messages)],
            "tools": tools,
            "tool_choice": tool_choice(self.tool_choice, [each["function"].get("name") for each in tools]),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "schema": self._schema(),
            **self._log_probs(),
            "template_options": self.chat_template_kwargs,
            "takes_parts": True,
        }

    def _log_probs(self) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise Failure(400, "The field 'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        return {"logprobs": bool(self.logprobs), "top_logprobs": self.top_logprobs or 0}

    def _schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer. Raises Failure."""
        form = self.response_format or {"type": "text"}
        if form.get("type") != "json_schema":
            return schema_of(form, "response_format")
        return schema_of({**_object(form.get("json_schema")), "type": "json_schema"}, "response_format.json_schema")

    def _message(self, number: int, given: dict[str, Any]) -> dict[str, Any]:
        """A message for the chat template. Raises Failure."""
        field = f"messages.{number}"
        try:
            message = Message.read(given)
        except Failure as failure:
            raise _within(field, failure) from None
        fields: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text(field),
            "reasoning": message.reasoning_content or "",
            "tool_calls": message.tool_calls or (),
        }
        if message.role == "tool":
            fields |= {"tool_call_id": message.tool_call_id or "", "name": message.name or ""}
        return fields


def schema_of(form: dict[str, Any], field: str) -> dict[str, Any] | None:
    """The JSON schema that the form of an answer asks for; None: any text. Raises Failure that names the field."""
    kind = form.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise unsupported(f"{field}.type", "it is none of 'text', 'json_object' and 'json_schema'")
    schema = form.get("schema")
    if not isinstance(schema, dict):
        raise Failure(400, f"The field '{field}.schema' must be a JSON schema.", param=f"{field}.schema")
    return schema


def tool_choice(choice: str | dict[str, Any] | None, names: Sequence[Any]) -> str:
    """The tool choice of `generate`: auto, required, or the name of a tool. Raises Failure."""
    if choice in (None, "none", "auto"):
        return "auto"
    name: Any = choice
    if isinstance(choice, dict):
        name = _object(choice.get("function")).get("name") or choice.get("name")
        if choice.get("type") != "function" or name not in names:
            raise Failure(400, "The field 'tool_choice' names none of the tools.", param="tool_choice")
    elif choice != "required" or not names:
        message = "The field 'tool_choice' must be 'auto', 'none', 'required' or a tool of 'tools'."
        raise Failure(400, message, param="tool_choice")
    return str(name)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _within(field: str, failure: Failure) -> Failure:
    """The failure of a field of a message, with the field's whole path."""
    inner = failure.param or ""
    message = failure.message.replace(f"'{inner}'", f"'{field}.{inner}'", 1)
    return Failure(failure.status, message, failure.kind, f"{field}.{inner}", failure.code)


async def chat_completion(call: Call) -> Answer:
    """Answer a chat, as a whole or as a stream of chunks."""
    asked = ChatCompletion.read(call.body)
    prompt, shows_usage = asked.prompt(), asked.shows_usage
    served = await call.ready(asked.model)
    most = asked.max_completion_tokens or asked.max_tokens
    generations = [
        asked.generate(served.home, most, number, model=served.deployment, **prompt) for number in range(asked.n or 1)
    ]
    head = {"id": common.new_id("chatcmpl"), "created": common.now(), "model": served.model}
    if asked.stream:
        return EventStream("text/event-stream", _chunks(head, generations, shows_usage), common.failed_event)
    return await while_connected(call.receive, _whole(head, generations))


async def _whole(head: dict[str, Any], generations: Sequence[AsyncGeneration]) -> dict[str, Any]:
    texts, usages = await whole(generations)
    choices = []
    for index, (text, usage, generation) in enumerate(zip(texts, usages, generations, strict=True)):
        calls = [_call(call) for call in generation.tool_calls]
        content = None if calls and not text else text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if generation.reasoning:
            message["reasoning_content"] = generation.reasoning
        if calls:
            message["tool_calls"] = calls
        reason = "tool_calls" if calls else usage.finish_reason
        shown = {"logprobs": _shown(generation.log_probs), "finish_reason": reason}
        choices.append({"index": index, "message": message, **shown})
    return {**head, "object": "chat.completion", "choices": choices, "usage": common.usage_fields(usages)}


def _shown(log_probs: Sequence[TokenLogProbs]) -> dict[str, Any] | None:
    return {"content": entries(log_probs), "refusal": None} if log_probs else None


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _chunks(
    head: dict[str, Any], generations: Sequence[AsyncGeneration], shows_usage: bool
) -> AsyncGenerator[bytes, None]:
    head = {**head, "object": "chat.completion.chunk"}
    started: set[int] = set()
    usages = []
    num_calls = [0 for _ in generations]

    def chunk(
        index: int, delta: dict[str, Any], reason: str | None = None, log_probs: Sequence[TokenLogProbs] = ()
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": _shown(log_probs), "finish_reason": reason}
        return common.event({**head, "choices": [choice], **({"usage": None} if shows_usage else {})})

    async for part in parts_of(generations):
        if part is None:
            yield common.SIGN_OF_LIFE
            continue
        if part.number not in started:
            started.add(part.number)
            yield chunk(part.number, {"role": "assistant", "content": ""})
        if part.token is not None:
            log_probs = of_token(part.token)
            deltas = list(_deltas(part.token, num_calls[part.number])) or [{"content": ""} for _ in log_probs]
            for number, delta in enumerate(deltas):
                yield chunk(part.number, delta, log_probs=log_probs if number == 0 else ())
            num_calls[part.number] += len(part.token.tool_calls)
        if part.usage is not None:
            usages.append(part.usage)
            yield chunk(part.number, {}, "tool_calls" if num_calls[part.number] else part.usage.finish_reason)
    if shows_usage:
        yield common.event({**head, "choices": [], "usage": common.usage_fields(usages)})
    yield common.DONE


def _deltas(token: Token, num_calls: int) -> Iterator[dict[str, Any]]:
    """What a token adds to its choice, which has this many calls already. A call comes as its name, then its arguments."""
    if token.reasoning:
        yield {"reasoning_content": token.reasoning}
    if token.text:
        yield {"content": token.text}
    for index, call in enumerate(token.tool_calls, start=num_calls):
        shown = _call(call)
        yield {"tool_calls": [{"index": index, **shown, "function": {"name": call.name, "arguments": ""}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]}
