"""int8 weights with one scale per output, and their kernels in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import (
    FILLED_WITH,
    QuantisedMatrix,
    add_bias,
    multiplies_bfloat16,
    multiply_into,
)

_NATIVE_MAX_ROWS = 8  # rows by default; with more, a GEMM on converted weights is faster
_NATIVE_INPUT_GROUP = 32  # inputs; torch 2.13's int8 kernel on x86 reads them in groups of this size
# Of converted weights. On a CPU, a tile stays in a cache between its conversion and its GEMM; on a GPU, it is large enough
# for a GEMM that uses all of it.
_TILE_BYTES, _GPU_TILE_BYTES = 2 << 20, 64 << 20
_GPU_TILE_OUTPUTS = 128  # a tile is a multiple of them, for which GEMMs are fast
_MIN_SCALE = 1e-30  # minimum of a scale, so that a zero row does not divide by zero


class Int8Matrix(QuantisedMatrix):
    """Weight-only int8 with one scale per output (absolute maximum / 127)."""

    layout = "torch"
    kernels = ("torch", "expand-bfloat16", "expand-float32")

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        super().__init__(num_outputs, num_inputs, device)
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

    def _native_is_safe(self) -> bool:
        """Whether torch's int8 kernel is safe: for other numbers of inputs it reads past the end of the weights."""
        values = self._values
        fits: bool = values.numel() > 0 and values.shape[1] % _NATIVE_INPUT_GROUP == 0
        return fits and values.is_contiguous() and values.device.type == "cpu"


def quantise_int8(weight_nk: Tensor) -> tuple[Tensor, Tensor]:
    """The values [n,k] int8 and the scales [n] bfloat16."""
    scales = (weight_nk.abs().amax(dim=1).clamp_(min=_MIN_SCALE) / 127).bfloat16()
    values = (weight_nk / scales.float()[:, None]).round_().clamp_(-127, 127)
    return values.to(torch.int8), scales
