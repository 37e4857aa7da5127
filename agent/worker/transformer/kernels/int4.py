"""int4 weights in groups of 32 inputs, and their kernels in torch."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import FILLED_WITH, add_bias, multiplies_bfloat16
from agent.worker.transformer.kernels.int4_tiles import can_expand, in_order_of_outputs, multiply_expanded, packed_order
from agent.worker.transformer.kernels.plain import WholeMatrix

INT4_GROUP_SIZE = 32  # inputs that share a scale; grain borders of shards are multiples of it
_OUTPUT_GROUP = 16  # outputs; torch's int4 layout groups them so
_SCALE_STEPS = 32  # of a scale's mantissa below 1: five bits
_MIN_SCALE = 1e-30  # minimum of a scale, so that a zero group does not divide by zero
_NATIVE_MAX_ROWS = 32  # rows by default; with more, a GEMM on expanded tiles is faster


class Int4Matrix(WholeMatrix):
    """Weight-only int4 with a scale and a zero point for every 32 inputs of an output.

    Stored in torch's packed layout for CPUs, of which there are no views, with the outputs in `packed_order`.
    """

    layout = "torch"
    kernels: ClassVar[tuple[str, ...]] = ("torch", "expand-bfloat16", "expand-float32") if can_expand() else ("torch",)

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        super().__init__(num_outputs, num_inputs, device)
        self._packed = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8, device=device)
        self._scales_and_zeros = torch.empty(
            num_inputs // INT4_GROUP_SIZE, num_outputs, 2, dtype=torch.bfloat16, device=device
        )

    @staticmethod
    def supports(num_outputs: int, num_inputs: int) -> bool:
        fits = num_outputs % _OUTPUT_GROUP == 0 and num_inputs % INT4_GROUP_SIZE == 0
        return fits and num_outputs * num_inputs > 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._packed, self._scales_and_zeros)

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        steps, scales, zero_points = quantise_int4(weight_nk)
        zeros = (8 - zero_points) * scales  # exact in bfloat16; torch adds it to (step - 8) * scale
        self._pack(steps.flatten(1), torch.stack([scales, zeros], dim=2).transpose(0, 1))
        return dequantise_int4(steps, scales, zero_points)

    def fill(self) -> None:
        self._packed.view(torch.uint8).fill_(0x88)  # steps of 8, in any order, to which the zeros are added
        self._scales_and_zeros.fill_(FILLED_WITH)

    def _pack(self, steps_nk: Tensor, scales_and_zeros: Tensor) -> None:
        """Store the steps, and the scales and zeros [k / 32, n, 2]."""
        order = packed_order(self.shape[0])
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps_nk[order].to(torch.int32), 1)
        self._packed.copy_(packed.view(self._packed.shape))
        self._scales_and_zeros.copy_(scales_and_zeros[:, order])

    def default_kernel(self, rows: int) -> str:
        expand = rows > _NATIVE_MAX_ROWS and can_expand()
        return "torch" if not expand else "expand-bfloat16" if multiplies_bfloat16() else "expand-float32"

    def product(self, kernel: str, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if not x_sk.shape[0]:
            y = x_sk.new_empty(0, self.shape[0])
        elif kernel == "torch":
            packed = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x_sk.bfloat16(), self._packed, INT4_GROUP_SIZE, self._scales_and_zeros
            )
            y = in_order_of_outputs(packed, x_sk.dtype)
        else:
            dtype = torch.float32 if kernel == "expand-float32" else torch.bfloat16
            y = multiply_expanded(x_sk, self._packed, self._scales_and_zeros, dtype)
        return add_bias(y, bias_n, out)


def quantise_int4(weight_nk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The steps [n, k / 32, 32] and zero points [n, k / 32] from 0 to 15, in float32, and the scales [n, k / 32] bfloat16.

    Scales have five significant bits, so that all layouts hold the same values: a multiple by up to 8 is exact in bfloat16.
    """
    groups = weight_nk.unflatten(1, (-1, INT4_GROUP_SIZE))
    minimum, maximum = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
    mantissa, exponent = ((maximum - minimum) / 15).clamp_(min=_MIN_SCALE).frexp()
    scales = torch.ldexp((mantissa * _SCALE_STEPS).floor_() / _SCALE_STEPS, exponent)
    zero_points = (-minimum / scales).round_().clamp_(0, 15)
    steps = (groups / scales[..., None]).round_().add_(zero_points[..., None]).clamp_(0, 15)
    return steps, scales.bfloat16(), zero_points


def dequantise_int4(steps: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
    """The weights [n,k] float32 that `quantise_int4` has stored."""
    return ((steps - zero_points[..., None]) * scales.float()[..., None]).flatten(1)
