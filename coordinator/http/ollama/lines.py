"""Lines of JSON, the form of Ollama's streams, and the fields that its answers share."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from coordinator.http.failures import Failure
from hearth.client.answers import Usage

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
