"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coordinator.http.answer_stream import entries, of_token, parts_of, while_connected, whole
from coordinator.http.failures import unsupported
from coordinator.http.homes import Asked
from coordinator.http.ollama.common import NDJSON, KeepAlive, end, failed_line, head, keep_loaded, line
from coordinator.http.request import Answer, Body, Call, EventStream, Many, NumTop, Sampled
from hearth.client.answers import AsyncGeneration
from hearth.wire import messages as wire
from hearth.wire.messages import TokenLogProbs, ToolCall

_Fields = Callable[..., dict[str, Any]]  # from a text, reasoning and calls of tools to the fields that hold them


class Options(Sampled):
    """Settings of sampling and the length of the answer."""

    # Memory and speed are the planner's business.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "low_vram", "use_mmap", "use_mlock",
            "f16_kv", "numa", "vocab_only", "logits_all", "penalize_newline", "repeat_last_n", "mirostat_tau", "mirostat_eta",
        }
    )  # fmt: skip
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mirostat": (0,), "tfs_z": (1,), "typical_p": (1,),
    }  # fmt: skip

    repetition_penalty: wire.RepetitionPenalty | None = Field(default=None, alias="repeat_penalty")
    num_predict: Annotated[int, Field(ge=-2)] | None = None  # -1 and -2: without a limit

    @property
    def max_tokens(self) -> int | None:
        most = self.num_predict
        if most is None or most > 0:
            return most
        return _NO_LIMIT if most < 0 else 1


_NO_LIMIT = 1 << 24  # tokens: the coordinator ends an answer where the context ends


class _Asked(Body):
    """Fields of both requests."""

    model: str
    keep_alive: KeepAlive | None = None
    stream: bool | None = None  # None: a stream
    options: dict[str, Any] | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None  # of the answer: any JSON object, or a JSON schema

    logprobs: bool | None = None
    top_logprobs: NumTop | None = None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: any text."""
        return {"type": "object"} if self.format == "json" else self.format or None

    def settings(self) -> Options:
        """The settings of sampling. Raises Failure."""
        return Options.read(self.options or {})


class ChatLine(Body):
    """One message of a chat. A call's arguments are an object."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"images": ([],)}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Many[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def message(self) -> dict[str, Any]:
        """The message for the chat template. Raises Failure."""
        try:
            functions = [call["function"] for call in self.tool_calls or ()]
            calls = [{"function": {**each, "arguments": json.dumps(each["arguments"])}} for each in functions]
        except (KeyError, TypeError):
            raise unsupported(
                "messages.tool_calls", 'each must be {"function": {"name": ..., "arguments": {...}}}'
            ) from None
        return {
            "role": self.role, "content": self.content or "", "reasoning": self.thinking or "", "tool_calls": calls,
            "tool_call_id": self.tool_call_id or "", "name": self.tool_name or "",
        }  # fmt: skip


class Chat(_Asked):
    """The body of `/api/chat`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "truncate": (), "shift": (),
    }  # fmt: skip

    messages: Many[dict[str, Any]] = Field(default=(), max_length=4096)
    tools: Annotated[Many[dict[str, Any]], Field(max_length=256)] | None = None
    think: bool | None = None

    def prompt(self) -> dict[str, Any] | None:
        """The arguments of `generate` for this chat; None if it is empty. Raises Failure."""
        if not self.messages:
            return None
        return {
            "messages": [ChatLine.read(each).message() for each in self.messages],
            "tools": self.tools or (),
            "template_options": {} if self.think is None else {"enable_thinking": self.think},
            "takes_parts": True,
            "schema": self.schema_of_answer,
        }


class Prompt(_Asked):
    """The body of `/api/generate`. A prompt that is not `raw` is the message of a user."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "suffix": ("",), "images": ([],), "template": ("",), "context": ([],), "think": (False,),
        "truncate": (), "shift": (),
    }  # fmt: skip

    prompt: str = ""
    system: str = ""
    raw: bool = False


async def chat(call: Call) -> Answer:
    """Answer a chat. Without a message, as clients ask to have a model loaded, the answer is empty."""
    asked = Chat.read(call.body)
    return await _answer(call, asked, _message, asked.prompt())


def _message(text: str, reasoning: str = "", tool_calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["thinking"] = reasoning
    if tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in tool_calls
        ]
    return {"message": message}


def _response(text: str, reasoning: str = "", tool_calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    return {"response": text, **({"thinking": reasoning} if reasoning else {})}


async def generate(call: Call) -> Answer:
    """Continue a prompt. Without one, the answer is empty, as in `chat`."""
    asked = Prompt.read(call.body)
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    if asked.raw and system:
        raise unsupported("system", "a raw prompt is used as it is")
    prompt: dict[str, Any] = (
        {"prompt": asked.prompt} if asked.raw else {"messages": [*system, {"role": "user", "content": asked.prompt}]}
    )
    prompt["schema"] = asked.schema_of_answer
    return await _answer(call, asked, _response, prompt if asked.prompt else None)


async def _answer(call: Call, asked: _Asked, fields: _Fields, prompt: dict[str, Any] | None) -> Answer:
    settings = asked.settings()
    served = await call.ready(asked.model)
    if prompt is None:
        await keep_loaded(served, asked.keep_alive)
        reason = "unload" if asked.keep_alive == 0 else "load"
        return {**head(asked.model), **fields(""), "done": True, "done_reason": reason}
    prompt |= {"logprobs": bool(asked.logprobs), "top_logprobs": asked.top_logprobs or 0}
    generation = settings.generate(served.home, settings.max_tokens, model=served.deployment, **prompt)
    if asked.stream is False:
        answer = await while_connected(call.receive, _whole(asked.model, generation, fields))
        await keep_loaded(served, asked.keep_alive)
        return answer
    return EventStream(NDJSON, _kept(served, asked, _lines(asked.model, generation, fields)), failed_line)


async def _kept(served: Asked, asked: _Asked, lines: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(lines):
        async for each in lines:
            yield each
    await keep_loaded(served, asked.keep_alive)


async def _whole(model: str, generation: AsyncGeneration, fields: _Fields) -> dict[str, Any]:
    (text,), (usage,) = await whole([generation])
    shown = fields(text, generation.reasoning, generation.tool_calls)
    return {**head(model), **shown, **end(usage), **_log_probs(generation.log_probs)}


def _log_probs(log_probs: Sequence[TokenLogProbs]) -> dict[str, Any]:
    return {"logprobs": entries(log_probs)} if log_probs else {}


async def _lines(model: str, generation: AsyncGeneration, fields: _Fields) -> AsyncGenerator[bytes, None]:
    async for part in parts_of([generation]):
        if part is None:  # the form has no sign of life but a line with an empty text
            yield line({**head(model), **fields(""), "done": False})
        elif part.token is not None and (
            part.token.text or part.token.reasoning or part.token.tool_calls or part.token.log_probs
        ):
            token = part.token
            log_probs = _log_probs(of_token(token))
            shown = fields(token.text, token.reasoning, token.tool_calls)
            yield line({**head(model), **shown, "done": False, **log_probs})
        elif part.usage is not None:
            yield line({**head(model), **fields(""), **end(part.usage)})
