"""Conversions for the activation codec in torch: for many values several times faster than in numpy, with the same results."""

from __future__ import annotations

import warnings

import torch

from hearth.wire.codec import Array, Casts

# Received frames are read-only, which is safe, since nothing here writes to its input.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
# Up to this many values, as in decoding, calling torch's operators takes longer than numpy's pass over the values: 3.2 and 1.2
# microseconds for 2048 values.
_FEW_VALUES = 8192


class TorchCasts(Casts):
    """The conversions of `Casts`, in torch where that is faster."""

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
        if array.size <= _FEW_VALUES:
            return super().from_bf16(array)
        full: Array = torch.from_numpy(array.view("<i2")).view(torch.bfloat16).float().numpy()
        return full
