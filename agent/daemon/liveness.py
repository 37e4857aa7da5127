"""Decides whether a worker process hangs or runs wild, from its signs of life and what the kernel says about it. Pure.

Silence alone proves nothing: on a machine under load, or while a library is imported, the worker's control thread may not run
for seconds. The second witness is the kernel: a process that uses the processor, or waits for it, is alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hearth.wire.messages import WorkerProgress

TICK_SECONDS = 0.25  # interval of the checks: adds at most this to the time until a hung worker is noticed
# Three signs of life are missing, and the process neither uses a processor nor waits for one: it is stuck in the kernel. With
# six other busy processes for each core, the longest gap between two signs was 0.84 s.
SILENT_SECONDS = 1.5
# The same for a process that the kernel reports as stopped by a signal, which no load explains: two signs are missing.
STOPPED_SECONDS = 1.0
INACTIVE_SECONDS = 1.0  # of the silence: without processor time, of which the kernel counts hundredths of a second
# The same while the worker starts and loads, unless it is stopped by a signal: a worker that waits for its disk may hold the
# lock of the interpreter, and an SD card may stall for seconds.
LOADING_SILENT_SECONDS = 30.0
# No sign although the process uses the processor: a loop that holds Python's interpreter lock. Not applied while it loads: with
# the load above, the import of torch held the lock for 8.3 s; a Raspberry Pi needs 20 s for it.
BUSY_SILENT_SECONDS = 15.0
# Each session of onnxruntime has a thread for each core. The agent's own threads need room below `TasksMax` of its unit.
MAX_THREADS = 4096


@dataclass(frozen=True)
class ProcessSample:
    """What the kernel says about a process at one moment."""

    cpu_seconds: float  # processor time of all threads since its start
    waits_for_processor: bool  # a thread runs, or waits for a processor
    stopped: bool  # by a signal such as SIGSTOP, or by a debugger
    num_threads: int = 1


@dataclass(frozen=True)
class Liveness:
    """What is known about the life of one worker process. Durations leave out times in which the agent itself stood still."""

    silent_seconds: float = 0.0  # since the last sign of life
    inactive_seconds: float = 0.0  # since the last sign, or since the process last used or waited for a processor
    progress: WorkerProgress = field(default_factory=WorkerProgress)  # the last sign
    sample: ProcessSample | None = None  # None: not known, as on systems without /proc

    def after_sign(self, progress: WorkerProgress) -> Liveness:
        """The worker has sent a sign of life."""
        return Liveness(progress=progress, sample=self.sample)

    def after_tick(self, elapsed_seconds: float, sample: ProcessSample | None) -> Liveness:
        """`elapsed_seconds` have passed since the last tick; `sample` is the process now.

        A tick that comes late means that the agent was stalled; signs of that time may still wait to be read. It therefore
        counts as two ticks at most.
        """
        elapsed = min(elapsed_seconds, 2 * TICK_SECONDS)
        active = (
            sample is None
            or sample.waits_for_processor
            or (self.sample is not None and sample.cpu_seconds > self.sample.cpu_seconds)
        )
        return replace(
            self,
            silent_seconds=self.silent_seconds + elapsed,
            inactive_seconds=0.0 if active else self.inactive_seconds + elapsed,
            sample=sample,
        )

    def hang(self, loading: bool) -> str | None:
        """Why the worker counts as hung or wild, as a phrase for an error message, or None if it does not."""
        if self.sample is not None and self.sample.num_threads > MAX_THREADS:
            return f"it has started more than {MAX_THREADS} threads"
        stopped = self.sample is not None and self.sample.stopped
        inactive = self.inactive_seconds >= (LOADING_SILENT_SECONDS if loading else INACTIVE_SECONDS)
        if (stopped and self.silent_seconds >= STOPPED_SECONDS) or (inactive and self.silent_seconds >= SILENT_SECONDS):
            cause = "stopped by a signal" if stopped else "stuck in the kernel, or in a deadlock"
            return f"it gave no sign of life for {self.silent_seconds:.1f} s: {cause}"
        if loading:
            return None
        if self.silent_seconds >= BUSY_SILENT_SECONDS:
            return f"it gave no sign of life for {self.silent_seconds:.0f} s, although it uses the processor"
        progress = self.progress
        if progress.step is not None and progress.busy_seconds >= progress.limit_seconds:
            return (
                f"it has computed step {progress.step} for {progress.busy_seconds:.0f} s, "
                f"longer than its limit of {progress.limit_seconds:.0f} s"
            )
        return None


def parse_process(stat: str, threads: list[str], ticks_per_second: int) -> ProcessSample:
    """Read a process's `/proc/PID/stat` and the same file of its threads; see proc(5). Raises ValueError, IndexError."""
    fields = _fields(stat)
    states = [fields[0], *(_fields(thread)[0] for thread in threads)]
    return ProcessSample(
        cpu_seconds=(int(fields[11]) + int(fields[12])) / ticks_per_second,
        waits_for_processor="R" in states,
        stopped=fields[0] in "Tt",
        num_threads=int(fields[17]),
    )


def _fields(stat: str) -> list[str]:
    """The fields after the command's name, which may hold spaces and parentheses."""
    return stat.rpartition(")")[2].split()
