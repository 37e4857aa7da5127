"""Print what the worker's libraries are and whether they work together, as JSON: `Libraries` of `hearth doctor` reads it.

A short-lived child process. An import may fail in any way: a wheel for another NumPy, a library of CUDA that is missing.
"""

from __future__ import annotations

import importlib
import json
from importlib.metadata import distributions
from typing import Any


def version(name: str) -> tuple[str | None, str]:
    """A library's version, and why it cannot be imported. None and no reason: it is not installed."""
    try:
        found = importlib.import_module(name)
        return str(found.__version__), ""
    except ModuleNotFoundError as error:
        return None, "" if error.name == name else str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def arrays_problem() -> str:
    """Why torch cannot exchange arrays with NumPy; empty if it can. Torch for NumPy 1 imports with NumPy 2, and fails here."""
    import numpy
    import torch

    try:
        torch.from_numpy(numpy.zeros(1, numpy.float32)).numpy()
    except Exception as error:
        return str(error)
    return ""


def libraries() -> dict[str, Any]:
    """Versions, problems, onnxruntime's providers, and the GPU on which torch computes, as this process sees it."""
    found: dict[str, Any] = {}
    for name in ("numpy", "torch", "onnxruntime"):
        found[name], found[f"{name}_problem"] = version(name)
    found["arrays_problem"] = arrays_problem() if found["torch"] and found["numpy"] else ""
    found["providers"] = []
    if found["onnxruntime"]:
        import onnxruntime

        found["providers"] = list(onnxruntime.get_available_providers())
    names = {(each.name or "").lower() for each in distributions()}
    found["onnxruntime_distributions"] = sorted(each for each in names if each.startswith("onnxruntime"))
    found["gpu"], found["gpu_problem"] = None, ""
    if found["torch"]:
        from agent.worker.probe import probe

        gpu, found["gpu_problem"] = probe()
        found["gpu"] = gpu["name"] if gpu is not None else None
    return found


if __name__ == "__main__":
    print(json.dumps(libraries()))
