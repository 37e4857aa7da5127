"""Ollama's `keep_alive`: for how long a model stays loaded after the answer, if no other request comes."""

from __future__ import annotations

import logging
import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from coordinator.http.homes import Asked
from hearth.errors import HearthError

log = logging.getLogger(__name__)

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
