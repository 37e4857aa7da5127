"""What the paths of Ollama's API share: lines of JSON, the form of its streams, fields of its answers, and `keep_alive`."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime, timezone
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from coordinator.http.failures import Failure
from coordinator.http.homes import Asked
from hearth.client.answers import Usage
from hearth.errors import HearthError

log = logging.getLogger(__name__)

NDJSON = "application/x-ndjson"


def line(value: object) -> bytes:
    """One line of a stream."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def failed_line(failure: Failure) -> bytes:
    """The last line of a stream that broke off."""
    return line(failure.ollama())


def head(model: str) -> dict[str, Any]:
    """The fields that every line begins with."""
    created = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": created}


def end(usage: Usage) -> dict[str, Any]:
    """The fields of the last line: counts, and durations in nanoseconds."""
    prefill = max(usage.first_token_seconds - usage.queued_seconds, 0.0)
    return {
        "done": True,
        "done_reason": usage.finish_reason,
        "total_duration": _nanoseconds(usage.first_token_seconds + usage.decode_seconds),
        "load_duration": _nanoseconds(usage.queued_seconds),
        "prompt_eval_count": usage.num_prompt_tokens,
        "prompt_eval_duration": _nanoseconds(prefill),
        "eval_count": usage.num_tokens,
        "eval_duration": _nanoseconds(usage.decode_seconds),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


# ---- keep_alive: for how long a model stays loaded after the answer, if no other request comes -----------------------------

_UNIT_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}  # of Go's durations
_PART = r"(\d+\.?\d*|\.\d+)(h|ms|m|s|us|µs|ns)"
_DURATION = re.compile(rf"([+-]?)((?:{_PART})+|0)")
MOST_SECONDS = 366 * 86400.0  # longer ones mean as much


def _seconds(given: object) -> object:
    """Seconds of a number or a duration such as "5m" or "1h30m"; below 0: for ever."""
    if isinstance(given, str):
        if found := _DURATION.fullmatch(given.strip()):
            total = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in re.findall(_PART, found[2]))
            given = -total if found[1] == "-" else total
        else:
            try:
                given = float(given)
            except ValueError:
                raise ValueError("it must be seconds, or a duration such as 5m") from None
    if isinstance(given, bool) or not isinstance(given, int | float):
        return given
    return -1.0 if given < 0 else min(float(given), MOST_SECONDS)


KeepAlive = Annotated[float, BeforeValidator(_seconds), Field(ge=-1, allow_inf_nan=False, strict=True)]


async def keep_loaded(asked: Asked, seconds: float | None) -> None:
    """Ask for this time, if the request named one. An answer that was given does not fail for it."""
    if seconds is None:
        return
    try:
        await asked.home.keep_loaded(seconds, model=asked.deployment)
    except HearthError as error:
        log.warning("keep_alive of %s: %s", asked.model, error)
