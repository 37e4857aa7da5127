"""The machine and this process's share of it: identity, caches of the processor, limit of open files, allocator.

By default, glibc maps every buffer above 128 KiB from the kernel and unmaps it when freed. The kernel then clears the pages of
every activation of every layer, which costs several per cent of a step on small devices. A worker's buffers have the same few
sizes in every layer, so it keeps freed ones. Programs that must stay small do the opposite.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import resource
from contextlib import suppress
from pathlib import Path

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}  # of sizes in sysfs
# As in the systemd units: far more than a home needs, so that idle connections do not shut others out.
_MAX_FILES = 65_536

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # parameters of mallopt, from <malloc.h>
# Freed memory at the top of the heap that is not returned to the kernel: more than the buffers of a layer take.
_KEEP_BYTES = 256 << 20
_MMAP_ABOVE_BYTES = 32 << 20  # glibc's maximum; larger buffers are weights, which are long-lived
_UNMAP_ABOVE_BYTES = 128 << 10  # glibc's default; set explicitly, it stays the same


def host_id(root: Path = Path("/")) -> str:
    """An id that is the same for all agents on one machine: a hash of the machine-id, which is confidential itself."""
    try:
        machine = (root / "etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    if machine in ("", "uninitialized"):  # an image before its first boot; see machine-id(5)
        machine = platform.node()
    return hashlib.sha256(f"hearth host {machine}".encode()).hexdigest()[:16]


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Size of the largest cache of the first core, shared or not; 0 where the system does not say."""
    sizes = [0]
    for path in root.glob("sys/devices/system/cpu/cpu0/cache/index*/size"):
        try:
            found = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        except OSError:
            continue
        if found is not None:
            sizes.append(int(found[1]) * _UNITS[found[2]])
    return max(sizes)


def raise_file_limit() -> None:
    """Raise this process's limit of open files, which also counts connections, as far as its user may.

    systemd's default of 1024 is little for a server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_freed_buffers() -> None:
    """Make the allocator keep freed buffers. Call it at the start of a worker process; no effect without glibc."""
    with suppress(AttributeError, TypeError):  # no such function: musl, macOS, Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def unmap_freed_buffers() -> None:
    """Make the allocator return large buffers when they are freed. Call it at the start of a process; no effect without glibc.

    By default, glibc keeps buffers of a size in its heap once one of that size was freed. asyncio receives into 256 KiB and
    cuts that down to what has arrived. What stays of it, and what is then put behind it, leaves gaps that the next such
    buffer does not fit in: 20,000 requests to the HTTP gateway left 1.4 MB of them.
    """
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _UNMAP_ABOVE_BYTES)


def share_one_arena() -> None:
    """Make all threads allocate from one area of memory. Call it at the start of a process; no effect without glibc.

    By default, glibc makes one for each of several threads, and freed memory stays resident in each. Python's threads run in
    turn anyway.
    """
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back_freed_buffers() -> None:
    """Return the freed memory to the kernel, once; for use when it is not needed again soon."""
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
