"""Timing of calls on this device, for both profilers."""

from __future__ import annotations

import time
from collections.abc import Callable


class Meter:
    """Times samples of at least `sample_seconds`, and measures the CPU time that this process gets per second.

    Under a CPU quota, a sample should span several quota periods (the kernel's default is 100 ms, the testbed's 4 ms),
    because shorter work could run on quota saved while idle. `synchronise` waits for the device to finish queued work.
    """

    def __init__(self, sample_seconds: float, synchronise: Callable[[], None] = lambda: None) -> None:
        self._sample_seconds = sample_seconds
        self._synchronise = synchronise
        self._cpu_seconds = self._wall_seconds = 0.0

    @property
    def cpu_per_second(self) -> float:
        """CPU seconds per second of wall time: the number of threads, or less under a quota or background load."""
        return max(self._cpu_seconds / self._wall_seconds, 0.01) if self._wall_seconds else 1.0

    def sample(self, run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
        """Mean seconds per run in one sample, by `clock`."""
        self._synchronise()
        start, cpu, runs, elapsed = time.perf_counter(), time.process_time(), 0, 0.0
        began = clock()
        while elapsed < self._sample_seconds:
            run()
            runs += 1
            self._synchronise()
            elapsed = time.perf_counter() - start
        passed = clock() - began
        self._cpu_seconds += time.process_time() - cpu
        self._wall_seconds += elapsed
        return passed / runs
