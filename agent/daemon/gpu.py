"""Detection of the GPU.

CUDA is probed in a short-lived child process, since the daemon does not import torch. Tegra boards are read through sysfs,
since they have no NVML.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Literal

import psutil

from hearth.errors import BadSetting
from hearth.platform.child import run_module
from hearth.wire.messages import Gpu

log = logging.getLogger(__name__)

_PROBE_SECONDS = 60.0  # timeout; importing torch takes 20 s from a Raspberry Pi's SD card
# The GPU's address and name differ between boards and JetPack releases: 57000000.gpu, 17000000.gv11b, 17000000.ga10b.
# Some boards list the device only in devfreq, others have a link gpu.0. devfreq also lists other engines, so names are matched.
_TEGRA_LOAD_FILES = (
    "sys/devices/gpu.0/load",
    "sys/devices/platform/gpu.0/load",
    *(f"sys/class/devfreq/*{name}/device/load" for name in (".gpu", ".gp10b", ".gv11b", ".ga10b")),
)


class GpuReader:
    """The GPU that was found at the start, and its current load."""

    def __init__(self, wanted: Literal["auto", "cpu", "cuda"], root: Path = Path("/")) -> None:
        self._wanted = wanted
        self._root = root
        self._cuda: Gpu | None = None

    @property
    def compute_device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self._cuda is not None else "cpu"

    async def probe(self) -> None:
        """Probe for CUDA once, unless the user chose the CPU. Raises BadSetting if the user chose CUDA and there is none."""
        if self._wanted == "cpu":
            return
        if self._wanted == "auto" and not self._may_have_cuda():
            return  # no driver, so the slow probe would find nothing
        self._cuda = await probe_cuda()
        if self._wanted == "cuda" and self._cuda is None:
            raise BadSetting(setting="--compute-device", reason="torch finds no CUDA device here")

    def read(self) -> Gpu | None:
        """The GPU with its current memory and load, or None."""
        model = tegra_model(self._root)
        if model is None:
            return self._cuda
        memory = psutil.virtual_memory()  # a Jetson's GPU shares the system's memory
        return Gpu(
            name=model,
            kind="tegra",
            memory_total_bytes=memory.total,
            memory_free_bytes=memory.available,
            load_fraction=_tegra_load(self._root),
        )

    def _may_have_cuda(self) -> bool:
        device_files = ("dev/nvidiactl", "dev/nvhost-gpu", "dev/nvgpu", "proc/driver/nvidia/version")
        return any((self._root / path).exists() for path in device_files)


async def probe_cuda() -> Gpu | None:
    """Ask torch in a child process. None if torch is missing, has no CUDA device, or does not answer in time."""
    try:
        ended = await run_module("agent.worker.probe", b"", _PROBE_SECONDS, on_stderr_line=lambda line: None)
    except asyncio.TimeoutError:
        log.warning("the GPU did not answer within %g s; computing on the CPU", _PROBE_SECONDS)
        return None
    if ended.code != 0:
        log.info("no GPU: %s", ended.stderr_tail[-1] if ended.stderr_tail else f"the probe {ended.cause}")
        return None
    try:
        answer = json.loads(ended.output)
        return Gpu(kind="cuda", **answer) if answer else None
    except (ValueError, TypeError) as error:
        log.warning("the GPU probe's answer cannot be read: %s", error)
        return None


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
