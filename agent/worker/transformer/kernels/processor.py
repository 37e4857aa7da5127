"""Instructions of the processor that decide which kernels are fast."""

from __future__ import annotations

import platform
from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 products (x86: AMX or AVX512-BF16), and torch may use them.

    `ATEN_CPU_CAPABILITY` keeps torch from newer instructions than it names; without them a bfloat16 GEMM is some hundred
    times slower than one in float32.
    """
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX", "AVX2"):
        return False
    probes = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return any(probe is not None and bool(probe()) for probe in probes)


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether this device has no instructions for bfloat16 products, so that one takes seconds and need not be measured."""
    return device.type == "cpu" and platform.machine() == "x86_64" and not multiplies_bfloat16()
