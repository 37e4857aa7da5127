"""The check of `hearth doctor` on the worker's libraries: torch, NumPy and onnxruntime, and the GPU as the service sees it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from hearth.wire.messages import Telemetry

_SECONDS = 120.0  # importing torch and starting CUDA take up to a minute from the SD card of a small board
_TO_REINSTALL = "Run install.sh or hearth-setup again."
_TO_NUMPY_1 = "In Hearth's environment: pip install 'numpy<2'"


class CheckResult(NamedTuple):
    """One line of the report. `do` is the advice, empty if nothing needs to be done."""

    check: str
    status: Literal["ok", "warning", "problem"]
    what: str
    do: str = ""


class Libraries(BaseModel):
    """What `agent.worker.libraries` found. A version is None if the library is absent or has a problem."""

    model_config = ConfigDict(frozen=True)

    numpy: str | None = None
    numpy_problem: str = ""
    torch: str | None = None
    torch_problem: str = ""
    onnxruntime: str | None = None
    onnxruntime_problem: str = ""
    arrays_problem: str = ""  # why torch and NumPy cannot exchange arrays
    providers: tuple[str, ...] = ()  # of onnxruntime
    onnxruntime_distributions: tuple[str, ...] = ()
    gpu: str | None = None  # on which torch computes, as this user
    gpu_problem: str = ""


def read_libraries() -> Libraries | str:
    """Import them in a child process, since the command itself needs none of them. A text: why that failed."""
    command = [sys.executable, "-m", "agent.worker.libraries"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode == 0:
            return Libraries.model_validate_json(done.stdout)
    except subprocess.TimeoutExpired:
        return f"importing them took longer than {_SECONDS:g} s"
    except (OSError, ValidationError) as error:
        return f"they could not be looked at: {error}"
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return f"importing them ended with {how}: {last[0]}"


def check_libraries(found: Libraries | str) -> list[CheckResult]:
    """Check that torch, NumPy and onnxruntime are there and agree, and name what onnxruntime computes with."""
    if isinstance(found, str):
        return [CheckResult("libraries", "problem", f"torch, NumPy and onnxruntime: {found}", _TO_REINSTALL)]
    findings = _broken(found)
    if not findings and found.torch is None and found.onnxruntime is None:
        return [CheckResult("libraries", "ok", "torch and onnxruntime are not installed: this device runs no agent")]
    if len(found.onnxruntime_distributions) > 1:
        what = f"{' and '.join(found.onnxruntime_distributions)} are both installed, and overwrite each other's files"
        do = "Uninstall all of them, and install the one for this device: onnxruntime-gpu where there is an NVIDIA GPU."
        findings.append(CheckResult("libraries", "warning", what, do))
    elif found.gpu is not None and found.onnxruntime and "CUDAExecutionProvider" not in found.providers:
        what = f"torch computes on {found.gpu}, but onnxruntime {found.onnxruntime} only on the CPU"
        do = "For ONNX models on the GPU, replace onnxruntime by a build for it: onnxruntime-gpu, on a Jetson NVIDIA's."
        findings.append(CheckResult("libraries", "warning", what, do))
    if findings:
        return findings
    absent = [name for name in ("torch", "onnxruntime") if getattr(found, name) is None]
    if absent:
        what, do = f"{' and '.join(absent)} is not installed", f"An agent needs it. {_TO_REINSTALL}"
        return [CheckResult("libraries", "warning", what, do)]
    providers = ", ".join(each.removesuffix("ExecutionProvider") for each in found.providers)
    what = f"torch {found.torch}, NumPy {found.numpy}, onnxruntime {found.onnxruntime} ({providers})"
    return [CheckResult("libraries", "ok", what)]


def _broken(found: Libraries) -> list[CheckResult]:
    findings = []
    numpy_2 = (found.numpy or "").partition(".")[0] == "2"
    for name in ("numpy", "torch", "onnxruntime"):
        problem = str(getattr(found, f"{name}_problem"))
        if problem:
            of_numpy = numpy_2 and name != "numpy" and "numpy" in problem.lower()
            do = _TO_NUMPY_1 if of_numpy else _TO_REINSTALL
            shown = "NumPy" if name == "numpy" else name
            why = f"was built for NumPy 1, and NumPy {found.numpy} is installed ({problem})" if of_numpy else problem
            verb = why if of_numpy else f"cannot be imported: {why}"
            findings.append(CheckResult("libraries", "problem", f"{shown} {verb}", do))
    if found.arrays_problem:
        why, do = f"and NumPy {found.numpy} do not work together", "Install a torch that is newer than its NumPy."
        if numpy_2:
            why, do = f"was built for NumPy 1, and NumPy {found.numpy} is installed", _TO_NUMPY_1
        findings.append(CheckResult("libraries", "problem", f"torch {found.torch} {why} ({found.arrays_problem})", do))
    return findings


def check_gpu_in_service(found: Libraries | str, local_agents: Mapping[str, Telemetry]) -> list[CheckResult]:
    """Compare the GPU that this user sees with the one that the agents of this device see inside their service."""
    if isinstance(found, str) or found.gpu is None:
        return []
    do = (
        "Compare `ls -l /dev/nv* /dev/host1x* /dev/dri` with the service's DeviceAllow= and groups, and add what is missing: "
        "systemctl edit hearth-agent. If the agent is not to use it: HEARTH_AGENT_COMPUTE_DEVICE=cpu."
    )
    return [
        CheckResult(
            "GPU",
            "warning",
            f"{found.gpu} computes for this user, but not inside {name}'s service: {telemetry.gpu_problem}",
            do,
        )
        for name, telemetry in sorted(local_agents.items())
        if telemetry.gpu_problem
    ]
