"""onnxruntime without its telemetry, which reports sessions and the computer that they run on unless it is switched off."""

import os
import sys
from contextlib import redirect_stdout
from functools import lru_cache

import onnxruntime as ort

__all__ = ["load_cuda", "ort"]

ort.disable_telemetry_events()


@lru_cache(maxsize=1)
def load_cuda() -> None:
    """Prepare this process for CUDA; call it before CUDA starts.

    NVIDIA's libraries are loaded from the packages of pip, where onnxruntime's CUDA provider does not look for them itself, and
    are set to compute float32 without TF32, for which TensorRT has no option.
    """
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    if hasattr(ort, "preload_dlls"):  # from version 1.21 on
        with redirect_stdout(sys.stderr):  # it prints what it does not find; a profiler's output is its answer
            ort.preload_dlls()
