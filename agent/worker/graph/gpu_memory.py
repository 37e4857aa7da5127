"""The memory of the first CUDA device, from the driver, which also knows what onnxruntime takes of it.

Not from NVML, as the agent reads it: Tegra boards have none, and beside a context of its own the difference is the graph's.
"""

from __future__ import annotations

import ctypes
import logging

import psutil

from hearth.errors import BadPlan

log = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"  # the driver's; there wherever a CUDA provider can run
_SUCCESS = 0
_IS_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED


class GpuMemory:
    """Reads the free memory of the GPU. Starts CUDA in this process; `context_bytes` of the system's memory went to that.

    Raises OSError if there is no driver or no device.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        device, self._context, integrated = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        available_bytes = psutil.virtual_memory().available
        _check(self._library.cuInit(0))
        _check(self._library.cuDeviceGet(ctypes.byref(device), 0))
        _check(self._library.cuDeviceGetAttribute(ctypes.byref(integrated), _IS_INTEGRATED, device))
        _check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device))
        self.is_integrated = bool(integrated.value)  # the GPU uses the system's memory, as a Jetson's does
        self.context_bytes = max(available_bytes - psutil.virtual_memory().available, 0)

    def free_bytes(self) -> int:
        """Free memory, of all processes. Raises BadPlan if the driver no longer answers."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        try:
            _check(self._library.cuCtxSetCurrent(self._context))
            _check(self._library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        except OSError as error:
            raise BadPlan(reason=f"the GPU's memory cannot be read: {error}") from None
        return free.value


def gpu_memory() -> GpuMemory | None:
    """The memory of the GPU; None, with a warning, if it cannot be read."""
    try:
        return GpuMemory()
    except (OSError, AttributeError) as error:  # AttributeError: an old driver that lacks a function
        log.warning("the GPU's memory cannot be read, so that plans of graphs count main memory: %s", error)
        return None


def _check(status: int) -> None:
    if status != _SUCCESS:
        raise OSError(f"the CUDA driver answers with error {status}")
