"""Settings of glibc's allocator: for a worker's large buffers, and for programs that must stay small.

By default, glibc maps every buffer above 128 KiB from the kernel and unmaps it when freed. The kernel then clears the pages of
every activation of every layer, which costs several per cent of a step on small devices. A worker's buffers have the same few
sizes in every layer, so it keeps freed ones.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # parameters of mallopt, from <malloc.h>
# Freed memory at the top of the heap that is not returned to the kernel: more than the buffers of a layer take.
_KEEP_BYTES = 256 << 20
_MMAP_ABOVE_BYTES = 32 << 20  # glibc's maximum; larger buffers are weights, which are long-lived
_UNMAP_ABOVE_BYTES = 128 << 10  # glibc's default; set explicitly, it stays the same


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
