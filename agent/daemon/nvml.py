"""The free memory of an NVIDIA GPU, from the driver's management library. Takes microseconds and no memory of the GPU."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import lru_cache

_LIBRARY = "libnvidia-ml.so.1"  # part of the driver; Tegra boards have none
_SUCCESS = 0


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_memory_bytes(uuid: str) -> int | None:
    """Free memory of the GPU with this id, as torch reports it. None if the driver does not say."""
    library, memory, handle = _library(), _Memory(), ctypes.c_void_p()
    if library is None or not uuid:
        return None
    name = (uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}").encode()
    if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) != _SUCCESS:
        return None
    found = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == _SUCCESS
    return int(memory.free) if found else None


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """The library, ready for use; None if there is none."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(_LIBRARY)
        if library.nvmlInit_v2() == _SUCCESS:
            return library
    return None
