"""Conversions for the activation codec in torch: several times faster than in numpy, with the same results."""

from __future__ import annotations

import warnings

import torch

from hearth.wire.codec import Array, Casts

# Received frames are read-only, which is safe, since nothing here writes to its input.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class TorchCasts(Casts):
    """The conversions of `Casts` in torch."""

    def to_fp16(self, array: Array) -> Array:
        half: Array = torch.from_numpy(array).half().numpy()
        return half

    def from_fp16(self, array: Array) -> Array:
        full: Array = torch.from_numpy(array).float().numpy()
        return full

    def to_bf16(self, array: Array) -> Array:
        bits: Array = torch.from_numpy(array).bfloat16().view(torch.int16).numpy()
        return bits.view("<u2")

    def from_bf16(self, array: Array) -> Array:
        full: Array = torch.from_numpy(array.view("<i2")).view(torch.bfloat16).float().numpy()
        return full
