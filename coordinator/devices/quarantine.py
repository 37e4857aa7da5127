"""Quarantine: which faults leave a device out of plans, and for how long. Pure; times are seconds of a monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass

from hearth.errors import ChunkCorrupt, HearthError, StepFailed, StoreFailed, StoreFull, WorkerDied

# A worker may have died only once, and a disk is emptied within minutes. Doubled at each repetition within
# `_RECENT_SECONDS`, up to the maximum.
_FIRST_SECONDS = 60.0
_MAX_SECONDS = 960.0  # four doublings: a device that fails every time costs a change of plan four times an hour
_RECENT_SECONDS = 3600.0  # an unstable device fails several times an hour
# A worker that dies three times is still preferred to a store that failed once, and one that dies four times is not.
_DEGREES_OF_A_REPETITION = 2
# A worker that served and died starts again on its device, unless one died there within this time: a plan without the device
# and one with it again cost more than a new process, but not one every few seconds.
_RESTART_SECONDS = 60.0


@dataclass(frozen=True)
class Quarantine:
    """Plans avoid a device until the time `until`, because of `reason`.

    Without other devices, those of the lowest `degree` are used.
    """

    reason: str
    severity: int
    until: float
    since: float
    times: int = 1  # faults of this severity, one after the other; a worker that may start again counts as none

    def is_active(self, now: float) -> bool:
        return now < self.until

    @property
    def degree(self) -> tuple[int, int]:
        """How little is to be expected of the device: a mild fault that comes again and again is worse than a severe one."""
        return self.severity + _DEGREES_OF_A_REPETITION * (self.times - 1), self.severity

    def describe(self, now: float) -> str:
        return f"left out of plans for {self.until - now:.0f} s: {self.reason}"


def after_fault(
    previous: Quarantine | None, error: HearthError, now: float, may_restart: bool = False
) -> Quarantine | None:
    """The quarantine after a fault of the device; `previous` if this error is none.

    `may_restart`: the worker that died had served, so it may start again on the device. The quarantine has ended then.
    """
    severity = _severity(error)
    if severity == 0:
        return previous
    recent = previous is not None and now - previous.since < _RECENT_SECONDS and previous.severity == severity
    times = previous.times + 1 if previous is not None and recent else 1
    is_free = previous is None or (not previous.is_active(now) and now - previous.since >= _RESTART_SECONDS)
    if may_restart and is_free and isinstance(error, WorkerDied):
        return Quarantine(_reason(error), severity, now, now, times - 1)
    # A damaged chunk is replaced by the next deployment; only a disk that damages more is a reason.
    num_faults = times - 1 if isinstance(error, ChunkCorrupt) else times
    seconds = min(_FIRST_SECONDS * 2.0 ** min(num_faults - 1, 10), _MAX_SECONDS) if num_faults else 0.0
    return Quarantine(_reason(error), severity, now + seconds, now, times)


def _severity(error: HearthError) -> int:
    """How little is to be expected of a device with this fault; 0 if it is no fault of a device."""
    match error:
        case WorkerDied():
            return 1
        case StepFailed(reason=reason) if reason.startswith("out of memory"):
            return 2
        case StoreFull():
            return 3
        case ChunkCorrupt():
            return 4
        case StoreFailed():
            return 5
    return 0


def _reason(error: HearthError) -> str:
    match error:
        case WorkerDied(reason=reason):
            return f"its worker died: {reason}"
        case StoreFull(needed_bytes=needed, free_bytes=free):
            return f"its store has no room for {needed} more bytes: {free} are free"
        case ChunkCorrupt():
            return "its store damages chunks"
        case StoreFailed(reason=reason):
            return f"its store fails: {reason}"
    return getattr(error, "reason", error.explanation())
