"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from coordinator.http.call import Answer, Call, EventStream
from coordinator.http.failures import unsupported
from coordinator.http.fields import Body, Seed, Temperature, Texts, seed_of
from coordinator.http.ollama.lines import NDJSON, end, failed_line, head, line
from coordinator.http.parts import parts_of, while_connected, whole
from hearth.client.answers import AsyncGeneration
from hearth.client.home import AsyncHome

_ANSWER_SECONDS = 3600.0  # longest answer; a client that goes away ends it
_Fields = Callable[[str], dict[str, Any]]  # from a text to the fields that hold it


class Options(Body):
    """Settings of sampling."""

    # Memory and speed are the planner's business.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "low_vram", "use_mmap", "use_mlock",
            "f16_kv", "numa", "vocab_only", "logits_all", "penalize_newline", "repeat_last_n", "mirostat_tau", "mirostat_eta",
        }
    )  # fmt: skip
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "presence_penalty": (0,), "frequency_penalty": (0,), "mirostat": (0,), "tfs_z": (1,), "typical_p": (1,),
    }  # fmt: skip

    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, Field(ge=-2)] | None = None  # -1 and -2: without a limit
    stop: Annotated[Texts, Field(max_length=16)] = ()

    def generate(self, home: AsyncHome, **prompt: Any) -> AsyncGeneration:
        """Begin an answer."""
        most = self.num_predict
        if most is not None and most <= 0:
            most = _NO_LIMIT if most < 0 else 1
        return home.generate(
            **prompt, max_tokens=most, stop=self.stop, timeout_seconds=_ANSWER_SECONDS, temperature=self.temperature,
            top_k=max(self.top_k, 0) if self.top_k is not None else None, top_p=self.top_p, min_p=self.min_p,
            repetition_penalty=self.repeat_penalty, seed=seed_of(self.seed),
        )  # fmt: skip


_NO_LIMIT = 1 << 24  # tokens: the coordinator ends an answer where the context ends


class _Asked(Body):
    """Fields of both requests."""

    ignored: ClassVar[frozenset[str]] = frozenset({"keep_alive"})

    model: str
    stream: bool | None = None  # None: a stream
    options: dict[str, Any] | None = None

    def settings(self) -> Options:
        """The settings of sampling. Raises Failure."""
        return Options.read(self.options or {})


class ChatLine(Body):
    """One message of a chat."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "images": ([],), "tool_calls": ([],), "thinking": ("",), "tool_name": ("",),
    }  # fmt: skip

    role: str
    content: str = ""


class Chat(_Asked):
    """The body of `/api/chat`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tools": ([],), "format": ("",), "think": (False,), "logprobs": (False,), "top_logprobs": (0,), "truncate": (),
        "shift": (),
    }  # fmt: skip

    messages: tuple[dict[str, Any], ...] = Field(default=(), max_length=4096)

    def chat(self) -> list[dict[str, str]]:
        """The messages for the chat template. Raises Failure."""
        lines = [ChatLine.read(each) for each in self.messages]
        for each in lines:
            if each.role not in ("system", "user", "assistant"):
                raise unsupported("messages.role", f"the role '{each.role}' is not supported")
        return [{"role": each.role, "content": each.content} for each in lines]


class Prompt(_Asked):
    """The body of `/api/generate`. A prompt that is not `raw` is the message of a user."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "suffix": ("",), "images": ([],), "format": ("",), "template": ("",), "context": ([],), "think": (False,),
        "logprobs": (False,), "top_logprobs": (0,), "truncate": (), "shift": (),
    }  # fmt: skip

    prompt: str = ""
    system: str = ""
    raw: bool = False


async def chat(call: Call) -> Answer:
    """Answer a chat. Without a message, as clients ask to have a model loaded, the answer is empty."""
    asked = Chat.read(call.body)
    messages = asked.chat()

    def fields(text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    return await _answer(call, asked, fields, {"messages": messages} if messages else None)


async def generate(call: Call) -> Answer:
    """Continue a prompt. Without one, the answer is empty, as in `chat`."""
    asked = Prompt.read(call.body)
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    if asked.raw and system:
        raise unsupported("system", "a raw prompt is used as it is")
    prompt = (
        {"prompt": asked.prompt} if asked.raw else {"messages": [*system, {"role": "user", "content": asked.prompt}]}
    )
    return await _answer(call, asked, lambda text: {"response": text}, prompt if asked.prompt else None)


async def _answer(call: Call, asked: _Asked, fields: _Fields, prompt: dict[str, Any] | None) -> Answer:
    settings = asked.settings()
    served = await call.ready(asked.model)
    if prompt is None:
        return {**head(asked.model), **fields(""), "done": True, "done_reason": "load"}
    generation = settings.generate(served.home, **prompt)
    if asked.stream is False:
        return await while_connected(call.receive, _whole(asked.model, generation, fields))
    return EventStream(NDJSON, _lines(asked.model, generation, fields), failed_line)


async def _whole(model: str, generation: AsyncGeneration, fields: _Fields) -> dict[str, Any]:
    (text,), (usage,) = await whole([generation])
    return {**head(model), **fields(text), **end(usage)}


async def _lines(model: str, generation: AsyncGeneration, fields: _Fields) -> AsyncGenerator[bytes, None]:
    async for part in parts_of([generation]):
        if part is None:  # the form has no sign of life but a line with an empty text
            yield line({**head(model), **fields(""), "done": False})
        elif part.token is not None and part.token.text:
            yield line({**head(model), **fields(part.token.text), "done": False})
        elif part.usage is not None:
            yield line({**head(model), **fields(""), **end(part.usage)})
