"""int8 weights in oneDNN's blocked layout, multiplied with activations of 8 bits; sums are exact in int32.

Each row of activations has a scale of its own, so that no row depends on another. The error is that of rounding activations.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import FILLED_WITH
from agent.worker.transformer.kernels.int8 import quantise_int8
from agent.worker.transformer.kernels.onednn import pad_rows, row_blocks
from agent.worker.transformer.kernels.plain import WholeMatrix

_STEPS, _ZERO = 127, 128  # of activations: steps of a scale on both sides, and the byte of 0
# Arguments of torch's product: no bias, the scale and zero point of the output, its data type, no operation after it.
_FLOAT32_OUTPUT: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
_MIN_SCALE = 1e-30  # minimum of a scale, so that a row of zeros is not divided by zero
# Largest ratio of a row's largest activation to its root mean square at which it is rounded once: an error of 2.7 %. Normally
# distributed activations have 4, or 0.9 %.
_MAX_PEAK = 12.0


class _Rounded(NamedTuple):
    """Rows of activations: (`values` [s,k] uint8 - `_ZERO`) * `scales` [s,1]."""

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, x_sk: Tensor, peaks_s1: Tensor) -> _Rounded:
        scales = (peaks_s1 / _STEPS).clamp_(min=_MIN_SCALE)
        return cls((x_sk / scales).add_(_ZERO + 0.5).to(torch.uint8), scales)  # rounds down

    def rest(self, x_sk: Tensor, some: Tensor) -> Tensor:
        """What rounding has left of some of the activations [s,k]: of the rows with these indices."""
        return x_sk[some] - self.values[some].to(x_sk.dtype).sub_(_ZERO).mul_(self.scales[some])


class PackedInt8Matrix(WholeMatrix):
    """int8 with one scale per output, the same values as `Int8Matrix`, on x86 processors with VNNI or AMX."""

    layout = "onednn"
    kernels = ("onednn",)

    def __init__(self, num_outputs: int, num_inputs: int) -> None:
        super().__init__(num_outputs, num_inputs, torch.device("cpu"))
        self._packed: Tensor | None = None
        self._scales = torch.empty(num_outputs)
        self._zero_points = torch.zeros(num_outputs, dtype=torch.int32)

    @staticmethod
    def supports(num_outputs: int, num_inputs: int, device: torch.device) -> bool:
        return device.type == "cpu" and num_outputs * num_inputs > 0 and _is_available()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return () if self._packed is None else (self._packed, self._scales, self._zero_points)

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        values, scales = quantise_int8(weight_nk)
        self._pack(values, scales.float())
        return values * self._scales[:, None]

    def fill(self) -> None:
        self._pack(torch.ones(self.shape, dtype=torch.int8), torch.full_like(self._scales, FILLED_WITH))

    def _pack(self, values_nk: Tensor, scales_n: Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(values_nk, None)
        self._scales.copy_(scales_n)

    def product(self, kernel: str, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y_sn = x_sk.new_empty(x_sk.shape[0], self.shape[0]) if out is None else out
        if x_sk.shape[0] == 1:
            self._write_product_of_one_row(x_sk, y_sn)
        elif x_sk.shape[0]:
            num_blocks, height = row_blocks(x_sk.shape[0])  # few heights, since oneDNN creates a kernel for each
            for x, y in zip(x_sk.chunk(num_blocks), y_sn.chunk(num_blocks), strict=True):
                self._write_product(x, y, height)
        return y_sn if bias_n is None else y_sn.add_(bias_n)

    def _write_product(self, x_sk: Tensor, y_sn: Tensor, height: int) -> None:
        """Rows with outliers, for which 8 bits are too coarse, are multiplied twice: also what rounding has left of them."""
        peaks = _peaks(x_sk)
        x = _Rounded.of(x_sk, peaks)
        torch.mul(self._multiply(x.values, height), x.scales, out=y_sn)
        coarse = peaks > torch.linalg.vector_norm(x_sk, dim=1, keepdim=True).mul_(_MAX_PEAK * x_sk.shape[1] ** -0.5)
        if coarse.any():
            some = coarse.view(-1).nonzero().view(-1)
            rest_sk = x.rest(x_sk, some)
            rest = _Rounded.of(rest_sk, _peaks(rest_sk))
            y_sn[some] += self._multiply(rest.values, height).mul_(rest.scales)

    def _write_product_of_one_row(self, x_1k: Tensor, y_1n: Tensor) -> None:
        """As `_write_product`, with fewer calls of torch: when a token is decoded, each finds the caches full of weights."""
        row = x_1k.reshape(-1)
        peak = row.abs().max().item()
        if peak > _MAX_PEAK * math.sqrt(row.dot(row).item() / len(row)):
            self._write_product(x_1k, y_1n, 1)
            return
        scale = max(peak / _STEPS, _MIN_SCALE)
        torch.mul(self._multiply((x_1k / scale).add_(_ZERO + 0.5).to(torch.uint8), 1), scale, out=y_1n)

    def _multiply(self, values_sk: Tensor, height: int) -> Tensor:
        """The product of rounded activations, without their scales [s,n] float32, computed with `height` rows."""
        padded = pad_rows(values_sk, height, _ZERO)
        y_hn: Tensor = torch.ops.onednn.qlinear_pointwise(
            padded, 1.0, _ZERO, self._packed, self._scales, self._zero_points, *_FLOAT32_OUTPUT
        )
        return y_hn[: values_sk.shape[0]]


def _peaks(x_sk: Tensor) -> Tensor:
    """The largest magnitude of each row [s,1]."""
    return x_sk.abs().amax(dim=1, keepdim=True)


@lru_cache(maxsize=1)
def _is_available() -> bool:
    """Whether oneDNN has such kernels for this processor, and they are exact.

    On x86 without VNNI, it adds two products in 16 bits, which saturate. Elsewhere they were not tried.
    """
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    matrix = PackedInt8Matrix(16, 64)
    extremes = torch.tensor([_ZERO - _STEPS, _ZERO + _STEPS], dtype=torch.uint8)[:, None].repeat(1, 64)
    try:
        matrix._pack(torch.full((16, 64), _STEPS, dtype=torch.int8), torch.ones(16))
        y_sn = matrix._multiply(extremes, 2)
    except (AttributeError, RuntimeError):
        return False
    return bool((y_sn.abs() == 64 * _STEPS**2).all())
