"""The fields that chat completions and completions share."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from coordinator.http.failures import Failure
from coordinator.http.fields import Body, Seed, Temperature, Texts, seed_of
from hearth.client.answers import AsyncGeneration, Usage
from hearth.client.home import AsyncHome

DONE = b"data: [DONE]\n\n"
SIGN_OF_LIFE = b": the prompt is being processed\n\n"
MAX_CHOICES = 16
_ANSWER_SECONDS = 3600.0  # longest answer; a client that goes away ends it


class StreamOptions(Body):
    """What a stream tells besides the answer."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})
    include_usage: bool | None = None


class Sampled(Body):
    """Fields of sampling and of the form of the answer."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "cache_prompt", "timings_per_token", "keep_alive",
        }
    )  # fmt: skip

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[Texts, Field(max_length=16)] = ()
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def shows_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts. Raises Failure."""
        return bool(self.stream_options and StreamOptions.read(self.stream_options).include_usage)

    def generate(self, home: AsyncHome, number: int, max_tokens: int | None, **prompt: Any) -> AsyncGeneration:
        """Begin the answer with this number."""
        return home.generate(
            **prompt, max_tokens=max_tokens, stop=self.stop, timeout_seconds=_ANSWER_SECONDS,
            temperature=self.temperature, top_k=max(self.top_k, 0) if self.top_k is not None else None, top_p=self.top_p,
            min_p=self.min_p, repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty, seed=seed_of(self.seed, number),
        )  # fmt: skip


def new_id(prefix: str) -> str:
    """A fresh id for an answer."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def usage_fields(usages: Sequence[Usage], num_choices: int | None = None) -> dict[str, Any]:
    """Token counts of answers. `num_choices` in a row share one prompt, which counts once; None: all do."""
    prompts = usages[:: num_choices or max(len(usages), 1)]
    prompt = sum(each.num_prompt_tokens for each in prompts)
    generated = sum(each.num_tokens for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(each.num_cached_tokens for each in prompts)},
    }


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def failed_event(failure: Failure) -> bytes:
    """The last event of a stream that broke off."""
    return event(failure.openai())
