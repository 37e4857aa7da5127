"""int8 weights with one scale per output, and their kernels in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import FILLED_WITH, QuantisedMatrix, add_bias, multiply_into
from agent.worker.transformer.kernels.processor import multiplies_bfloat16, multiplies_int8

_NATIVE_MAX_ROWS = 8  # rows by default; with more, a GEMM on converted weights is faster
_NATIVE_INPUT_GROUP = 32  # inputs; torch 2.13's int8 kernel on x86 reads them in groups of this size
# Of converted weights. On a CPU, a tile stays in a cache between its conversion and its GEMM; on a GPU, it is large enough
# for a GEMM that uses all of it.
_TILE_BYTES, _GPU_TILE_BYTES = 2 << 20, 64 << 20
_GPU_TILE_OUTPUTS = 128  # a tile is a multiple of them, for which GEMMs are fast
_MIN_SCALE = 1e-30  # minimum of a scale, so that a zero row does not divide by zero
_STEPS = 127  # of a scale: int8 without its least value, so that the range is symmetric
_INT8_OUTPUTS = 1024  # of a product in int8 at once: its sums in int32 take memory besides the result
# Largest ratio of a row's largest activation to its root mean square at which it is rounded to int8: an error of 2.7 %.
# Normally distributed ones have 4, or 0.9 %.
_MAX_INT8_PEAK = 12.0


class Int8Matrix(QuantisedMatrix):
    """Weight-only int8 with one scale per output (absolute maximum / 127)."""

    layout = "torch"
    kernels: tuple[str, ...] = ("torch", "expand-bfloat16", "expand-float32")

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        super().__init__(num_outputs, num_inputs, device)
        if device.type == "cpu" and multiplies_int8():
            self.kernels = (*self.kernels, "int8")
        self._values = torch.empty(num_outputs, num_inputs, dtype=torch.int8, device=device)
        # Zeros: a matrix without inputs is never loaded, and its products are zero times these.
        self._scales = torch.zeros(num_outputs, dtype=torch.bfloat16, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._values, self._scales)

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        values, scales = quantise_int8(weight_nk)
        self._scales.copy_(scales)
        self._values.copy_(values)
        return values * scales.float()[:, None]

    def fill(self) -> None:
        self._values.fill_(1)
        self._scales.fill_(FILLED_WITH)

    def rows(self, part: slice) -> Int8Matrix:
        return self._view(self._values[part], self._scales[part])

    def columns(self, part: slice) -> Int8Matrix:
        return self._view(self._values[:, part], self._scales)

    def _view(self, values: Tensor, scales: Tensor) -> Int8Matrix:
        view = Int8Matrix(0, 0, self._device)
        view.choice, view.shape, view._values, view._scales = self.choice, tuple(values.shape), values, scales
        return view

    def default_kernel(self, rows: int) -> str:
        if rows <= _NATIVE_MAX_ROWS and self._native_is_safe():
            return "torch"
        return "expand-bfloat16" if self._device.type != "cpu" or multiplies_bfloat16() else "expand-float32"

    def product(self, kernel: str, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if kernel == "torch" and self._native_is_safe():
            y = torch._weight_int8pack_mm(x_sk.bfloat16(), self._values, self._scales).to(x_sk.dtype)
        elif kernel == "int8" and x_sk.shape[0] and self._values.numel() and self._values.is_contiguous():
            y = self._multiply_int8(x_sk)
        else:
            y = self._multiply_expanded(x_sk, torch.float32 if kernel == "expand-float32" else torch.bfloat16)
        return add_bias(y, bias_n, out)

    def _multiply_expanded(self, x_sk: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert the weights and multiply, tile by tile, in memory that all tiles use."""
        values, x = self._values, x_sk.to(dtype)
        num_outputs, num_inputs = values.shape
        tile_bytes, multiple = (_TILE_BYTES, 1) if values.device.type == "cpu" else (_GPU_TILE_BYTES, _GPU_TILE_OUTPUTS)
        size = tile_bytes // (max(num_inputs, 1) * dtype.itemsize) // multiple * multiple
        size = min(max(size, multiple), max(num_outputs, 1))
        y_sn = x_sk.new_empty(x_sk.shape[0], num_outputs)
        floats_nk = values.new_empty(size, num_inputs, dtype=dtype)
        product = x.new_empty(0 if dtype == y_sn.dtype else x.shape[0] * size)
        for start in range(0, num_outputs, size):
            part_sn = y_sn[:, start : start + size]
            tile_nk = floats_nk[: part_sn.shape[1]].copy_(values[start : start + size])
            multiply_into(part_sn, x, tile_nk.t(), product)
        return y_sn.mul_(self._scales.to(y_sn.dtype))

    def _multiply_int8(self, x_sk: Tensor) -> Tensor:
        """Round each row of activations to int8, with a scale of its own, and sum in int32, which is exact.

        Rows with outliers, for which that is too coarse, are multiplied by expanded weights. No row depends on another.
        """
        num_rows, num_outputs = x_sk.shape[0], self.shape[0]
        peaks = x_sk.abs().amax(dim=1, keepdim=True)
        x_scales = (peaks / _STEPS).clamp_(min=_MIN_SCALE)
        x = (x_sk / x_scales).round_().to(torch.int8)
        y_sn, scales = x_sk.new_empty(num_rows, num_outputs), self._scales.to(x_sk.dtype)
        sums = torch.empty(num_rows * min(_INT8_OUTPUTS, num_outputs), dtype=torch.int32)
        for start in range(0, num_outputs, _INT8_OUTPUTS):
            some = slice(start, start + _INT8_OUTPUTS)
            part_sn = y_sn[:, some]
            exact = sums[: part_sn.numel()].view(part_sn.shape)
            torch._int_mm(x, self._values[some].t(), out=exact)
            part_sn.copy_(exact).mul_(scales[some]).mul_(x_scales)
        coarse = (peaks > _MAX_INT8_PEAK * x_sk.square().mean(dim=1, keepdim=True).sqrt_()).view(-1)
        if coarse.any():
            dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
            y_sn[coarse] = self._multiply_expanded(x_sk[coarse], dtype)
        return y_sn

    def _native_is_safe(self) -> bool:
        """Whether torch's int8 kernel is safe: for other numbers of inputs it reads past the end of the weights."""
        values = self._values
        fits: bool = values.numel() > 0 and values.shape[1] % _NATIVE_INPUT_GROUP == 0
        return fits and values.is_contiguous() and values.device.type == "cpu"


def quantise_int8(weight_nk: Tensor) -> tuple[Tensor, Tensor]:
    """The values [n,k] int8 and the scales [n] bfloat16."""
    scales = (weight_nk.abs().amax(dim=1).clamp_(min=_MIN_SCALE) / _STEPS).bfloat16()
    values = (weight_nk / scales.float()[:, None]).round_().clamp_(-_STEPS, _STEPS)
    return values.to(torch.int8), scales
