"""Counts what a server refuses, and logs it without letting an attacker fill the log."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0  # at most one line in this time: an attack leaves a trace and cannot fill a disk


class Refusals:
    """`count` refusals since the start. The first one is logged at once; later ones are summed up every 10 s."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._what = what
        self._clock = clock
        self._logged_count = 0
        self._logged_at = -math.inf

    def note(self, reason: str) -> None:
        """Count one refusal. `reason` names the cause and the fingerprint of the key, for the log."""
        self.count += 1
        now = self._clock()
        if now - self._logged_at >= _LOG_SECONDS:
            log.warning("%s refused: %d more; the last: %s", self._what, self.count - self._logged_count, reason)
            self._logged_at, self._logged_count = now, self.count
