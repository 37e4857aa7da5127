"""How much slower than expected something is: the average ratio of measured to expected seconds. Pure."""

from __future__ import annotations

import math

from pydantic import BaseModel, Field

# Observations that an average remembers: it follows a device that becomes slower within some tens of requests.
WINDOW = 20.0
# By which one observation may differ from an average of at least so many: a single outlier changes little.
_MAX_LOG_STEP, _STEADY_COUNT = math.log(2.0), 3


class SpeedRatio(BaseModel):
    """Average of log(measured / expected): over all observations at first, then over the latest `window` of them.

    In logarithms a doubling and a halving weigh the same.
    """

    value: float = Field(default=0.0, allow_inf_nan=False)
    weight: float = Field(default=0.0, ge=0, le=WINDOW)
    count: int = Field(default=0, ge=0)  # of observations, whatever they weigh

    @classmethod
    def steady(cls, window: float) -> SpeedRatio:
        """An average that begins at a baseline, as if that had been observed for a whole window."""
        return cls(weight=window, count=_STEADY_COUNT)

    def add(self, ratio: float, weight: float = 1.0, window: float = WINDOW) -> None:
        """Add an observation of this weight, at most 1. Ignores ratios that no time can have."""
        if not (0 < ratio < math.inf and weight > 0):
            return
        change = math.log(ratio) - self.value
        if self.count >= _STEADY_COUNT:
            change = max(-_MAX_LOG_STEP, min(change, _MAX_LOG_STEP))
        self.count += 1
        self.weight = min(self.weight + weight, window)
        self.value += change * weight / self.weight
