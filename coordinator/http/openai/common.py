"""What the paths of OpenAI's API share: fields of requests for texts, server-sent events, ids and token counts."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from coordinator.http.failures import Failure
from coordinator.http.request import Body, Sampled
from hearth.client.answers import Usage

DONE = b"data: [DONE]\n\n"
SIGN_OF_LIFE = b": the prompt is being processed\n\n"
MAX_CHOICES = 16


class StreamOptions(Body):
    """What a stream reports in addition to the answer."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})
    include_usage: bool | None = None


class TextRequest(Sampled):
    """Fields of a request for texts: sampling, and the form of the answer."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "cache_prompt", "timings_per_token", "keep_alive",
        }
    )  # fmt: skip

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"logit_bias": ({},)}

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def shows_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts. Raises Failure."""
        return bool(self.stream_options and StreamOptions.read(self.stream_options).include_usage)


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
