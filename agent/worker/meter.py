"""Times calls on this device, for both profilers."""

from __future__ import annotations

import time
from collections.abc import Callable


class Meter:
    """Takes samples of at least `sample_seconds`, and learns meanwhile how much of a core this process gets.

    A sample spans several periods of a CPU quota (the kernel's default is 100 ms, the testbed's 4): shorter work would run
    on what was saved up while idle. `synchronise` waits until the device has done what it was given.
    """

    def __init__(self, sample_seconds: float, synchronise: Callable[[], None] = lambda: None) -> None:
        self._sample_seconds = sample_seconds
        self._synchronise = synchronise
        self._cpu_seconds = self._wall_seconds = 0.0

    @property
    def cpu_per_second(self) -> float:
        """CPU seconds that the device does in one: its threads, or less under a quota or beside other load."""
        return max(self._cpu_seconds / self._wall_seconds, 0.01) if self._wall_seconds else 1.0

    def sample(self, run: Callable[[], object]) -> float:
        """Mean seconds of a run, over one sample."""
        self._synchronise()
        start, cpu, runs, elapsed = time.perf_counter(), time.process_time(), 0, 0.0
        while elapsed < self._sample_seconds:
            run()
            runs += 1
            self._synchronise()
            elapsed = time.perf_counter() - start
        self._cpu_seconds += time.process_time() - cpu
        self._wall_seconds += elapsed
        return elapsed / runs
