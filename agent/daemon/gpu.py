"""Detection of the GPU.

CUDA is probed in a short-lived child process, since the daemon does not import torch. Free memory is read with the driver's
management library (NVML), which takes microseconds and no memory of the GPU. Tegra boards are read through sysfs,
since they have no NVML.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from hearth.errors import BadSetting
from hearth.platform.child import run_module
from hearth.wire.messages import Gpu

log = logging.getLogger(__name__)

_MAX_PROBLEM_CHARACTERS = 256  # one line of a table
_PROBE_SECONDS = 60.0  # timeout; importing torch takes 20 s from a Raspberry Pi's SD card
# The GPU's address and name differ between boards and JetPack releases: 57000000.gpu, 17000000.gv11b, 17000000.ga10b.
# Some boards list the device only in devfreq, others have a link gpu.0. devfreq also lists other engines, so names are matched.
_TEGRA_LOAD_FILES = (
    "sys/devices/gpu.0/load",
    "sys/devices/platform/gpu.0/load",
    *(f"sys/class/devfreq/*{name}/device/load" for name in (".gpu", ".gp10b", ".gv11b", ".ga10b")),
)
_NVML = "libnvidia-ml.so.1"  # NVML: part of the driver; Tegra boards have none
_NVML_SUCCESS = 0


class Probed(NamedTuple):
    """What torch finds: a CUDA device on which it computes, or the problem that it has with it."""

    gpu: Gpu | None
    problem: str = ""
    uuid: str = ""  # of the GPU, as the driver knows it
    context_bytes: int = 0  # what CUDA itself takes of the GPU's memory in a process; not part of the free memory


class GpuReader:
    """The GPU that was found at the start, its current load and free memory."""

    def __init__(self, wanted: Literal["auto", "cpu", "cuda"], root: Path = Path("/")) -> None:
        self._wanted = wanted
        self._root = root
        self._probed = Probed(None)

    @property
    def compute_device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self._probed.gpu is not None else "cpu"

    @property
    def problem(self) -> str:
        """Why this device computes on the CPU although it has a GPU; empty if it does not, or if the user chose the CPU."""
        return self._probed.problem

    async def probe(self) -> None:
        """Probe for CUDA once, unless the user chose the CPU. Raises BadSetting if the user chose CUDA and there is none."""
        if self._wanted == "cpu":
            return
        if self._wanted == "auto" and not self._may_have_cuda():
            return  # no driver, so the slow probe would find nothing
        self._probed = with_context(await probe_cuda())
        if self._wanted == "cuda" and self._probed.gpu is None:
            reason = f"torch computes on no CUDA device here: {self._probed.problem}"
            raise BadSetting(setting="--compute-device", reason=reason)
        if self._probed.gpu is None:
            log.warning("this device computes on the CPU, although it has a GPU: %s", self._probed.problem)

    def read(self, idle: bool = False) -> Gpu | None:
        """The GPU with its current load and memory, or None.

        `idle`: no worker of this device holds memory of it. Otherwise, free memory is that before the workers, since a worker
        gives up its own for the next one.
        """
        gpu = self._probed.gpu
        model = tegra_model(self._root)
        if model is None:
            if gpu is not None and idle and (free := free_memory_bytes(self._probed.uuid)) is not None:
                free_bytes = max(free - self._probed.context_bytes, 0)
                gpu = gpu.model_copy(update={"memory_free_bytes": free_bytes})
                self._probed = self._probed._replace(gpu=gpu)
            return gpu
        memory = psutil.virtual_memory()  # a Jetson's GPU shares the system's memory
        return Gpu(
            name=model,
            kind="tegra",
            memory_total_bytes=memory.total,
            memory_free_bytes=memory.available,
            load_fraction=_tegra_load(self._root),
            compute_capability=gpu.compute_capability if gpu is not None else None,
        )

    def _may_have_cuda(self) -> bool:
        device_files = ("dev/nvidiactl", "dev/nvhost-gpu", "dev/nvgpu", "proc/driver/nvidia/version")
        return any((self._root / path).exists() for path in device_files)


async def probe_cuda() -> Probed:
    """Ask torch in a child process."""
    try:
        ended = await run_module("agent.worker.probe", b"", _PROBE_SECONDS, on_stderr_line=lambda line: None)
    except asyncio.TimeoutError:
        return Probed(None, f"torch did not answer within {_PROBE_SECONDS:g} s")
    if ended.code != 0:
        return Probed(None, _short(ended.stderr_tail[-1] if ended.stderr_tail else f"the probe {ended.cause}"))
    return parse_probe(ended.output)


def with_context(probed: Probed) -> Probed:
    """With the difference between the free memory that the probe saw, with its context, and that after its end."""
    free = free_memory_bytes(probed.uuid)
    if probed.gpu is None or free is None:
        return probed
    return probed._replace(context_bytes=max(free - probed.gpu.memory_free_bytes, 0))


def parse_probe(output: bytes) -> Probed:
    """The probe's output."""
    try:
        answer = json.loads(output)
        found = answer["gpu"]
        if found is None:
            return Probed(None, _short(answer["problem"]))
        uuid = found.pop("uuid")
        return Probed(Gpu(kind="cuda", **found), uuid=uuid)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Probed(None, _short(f"the probe's answer cannot be read: {error}"))


def _short(problem: str) -> str:
    """The first line, as far as a message takes it."""
    return problem.strip().partition("\n")[0][:_MAX_PROBLEM_CHARACTERS]


def tegra_model(root: Path = Path("/")) -> str | None:
    """The model name of a Jetson board, or None on other machines."""
    try:
        compatible = (root / "proc/device-tree/compatible").read_text(errors="replace")
        model = (root / "proc/device-tree/model").read_text(errors="replace")
    except OSError:
        return None
    return model.strip("\0\n ") if "tegra" in compatible else None


def _tegra_load(root: Path) -> float | None:
    for pattern in _TEGRA_LOAD_FILES:
        for path in root.glob(pattern):
            try:
                return int(path.read_text()) / 1000  # per mille
            except (OSError, ValueError):
                continue
    return None


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_memory_bytes(uuid: str) -> int | None:
    """Free memory of the GPU with this id, as torch reports it. None if the driver does not say."""
    library, memory, handle = _nvml(), _Memory(), ctypes.c_void_p()
    if library is None or not uuid:
        return None
    name = (uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}").encode()
    if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) != _NVML_SUCCESS:
        return None
    found = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == _NVML_SUCCESS
    return int(memory.free) if found else None


@lru_cache(maxsize=1)
def _nvml() -> ctypes.CDLL | None:
    """NVML, ready for use; None if there is none."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(_NVML)
        if library.nvmlInit_v2() == _NVML_SUCCESS:
            return library
    return None
