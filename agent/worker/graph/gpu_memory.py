"""The memory of the first CUDA device, from the driver, which also knows what onnxruntime takes of it."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_LIBRARY = "libcuda.so.1"  # the driver's; there wherever a CUDA provider can run
_SUCCESS = 0
_IS_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED


class GpuMemory:
    """Reads the free memory of the GPU. Starts CUDA in this process, whose context takes some hundred megabytes.

    Raises OSError if there is no driver or no device.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        device, self._context, integrated = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        self._check(self._library.cuInit(0))
        self._check(self._library.cuDeviceGet(ctypes.byref(device), 0))
        self._check(self._library.cuDeviceGetAttribute(ctypes.byref(integrated), _IS_INTEGRATED, device))
        self._check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device))
        self.is_integrated = bool(integrated.value)  # the GPU uses the system's memory, as a Jetson's does

    def free_bytes(self) -> int:
        """Free memory, of all processes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self._library.cuCtxSetCurrent(self._context))
        self._check(self._library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        return free.value

    def _check(self, status: int) -> None:
        if status != _SUCCESS:
            raise OSError(f"the CUDA driver answers with error {status}")


def gpu_memory() -> GpuMemory | None:
    """The memory of the GPU; None if this process has none."""
    with suppress(OSError, AttributeError):  # AttributeError: an old driver that lacks a function
        return GpuMemory()
    return None
