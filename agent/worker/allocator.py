"""How the C library's allocator treats a worker's large buffers.

By default glibc takes every buffer over 128 KiB fresh from the kernel and gives it back at once: each activation of each
layer is then paged in and cleared anew, some percent of a step on small devices. A worker's buffers have the same few
sizes in every layer, so it keeps them.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 256 << 20
_MMAP_ABOVE_BYTES = 32 << 20  # glibc's own maximum; weights are larger or live long anyway


def keep_freed_buffers() -> None:
    """Call first thing in a worker's process. Elsewhere than on glibc it does nothing."""
    with suppress(AttributeError, TypeError):  # no such function: musl, macOS, Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def give_back_freed_buffers() -> None:
    """To the kernel, once: what was kept is of no more use, and memory may be short."""
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
