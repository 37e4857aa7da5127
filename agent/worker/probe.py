"""Print the CUDA device on which torch computes, as JSON: {"gpu": its properties, or null, "problem": why there is none}.

A short-lived child process of the daemon.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch


def probe() -> tuple[dict[str, Any] | None, str]:
    """The device's properties, after it has computed something; None, and the reason, if it does not."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")  # torch warns of a driver that is too old, for instance
        available = torch.cuda.is_available()
    if not available:
        if torch.version.cuda is None and torch.version.hip is None:
            return None, f"torch {torch.__version__} is a build for the CPU only"
        return None, str(warned[-1].message) if warned else f"torch {torch.__version__} finds no usable GPU"
    try:
        torch.ones(1, device="cuda").add_(1).item()  # a build without kernels for this GPU fails here
        free, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(0)
    except (RuntimeError, AssertionError) as error:
        return None, str(error)
    found = {
        "name": properties.name,
        "memory_total_bytes": total,
        "memory_free_bytes": free,
        "compute_capability": (properties.major, properties.minor),
        "uuid": str(getattr(properties, "uuid", "")),  # torch 2.5 and later
    }
    return found, ""


if __name__ == "__main__":
    gpu, problem = probe()
    print(json.dumps({"gpu": gpu, "problem": problem}))
