"""Confines a process that reads what anybody may have made, and limits its memory and processor time. Linux enforces this."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

from hearth.platform.confine import confine
from hearth.platform.system_calls import refuse_system_calls

_MAX_WRITTEN_BYTES = 16 << 20  # of a file: plans go to pipes, and learnt policies have less than 1 MB
_NO_PORTS = ((1, 0),)  # an empty range


def confine_reader(readable: Iterable[Path], writable: Iterable[Path], more_bytes: int) -> None:
    """Leave this process these files, its libraries and no network, and `more_bytes` of private memory more than it has now.

    Beyond that, allocations fail (MemoryError). Mapped files do not count, so that files larger than memory can be read. What
    it writes to files, its output for instance, is limited too.
    """
    _limit(resource.RLIMIT_FSIZE, _MAX_WRITTEN_BYTES)
    if sys.platform == "linux":
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        _limit(resource.RLIMIT_DATA, int(fields["VmData"].split()[0]) * 1024 + more_bytes)
        confine(readable, writable, _NO_PORTS, _NO_PORTS)
        refuse_system_calls(unix_sockets=False)


def limit_processor_time(more_seconds: float) -> None:
    """End this process by SIGXCPU after so much more processor time of all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + more_seconds))


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    if hard == resource.RLIM_INFINITY or value < hard:
        resource.setrlimit(what, (value, value + 1))  # for processor time, the soft limit has a signal of its own
