"""A clock for planners whose limits are looks instead of time, so that their runs repeat."""

from __future__ import annotations


class StepClock:
    """Each look takes `step` seconds."""

    def __init__(self, step: float = 1.0) -> None:
        self.now = 0.0
        self._step = step

    def __call__(self) -> float:
        self.now += self._step
        return self.now
