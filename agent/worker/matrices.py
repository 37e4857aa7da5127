"""Weight matrices in the format that a plan keeps them in: what is multiplied is always activations in float32.

[n,k]: n outputs, k inputs, as checkpoints store them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own custom)
from torch import Tensor

from hearth.model.spec import WeightFormat

_FEW_ROWS = 8  # up to this many the int8 kernel is faster than a GEMM on converted weights


class Loss(NamedTuple):
    """What a format lost of a matrix: sums of squares of the differences, and of the weights."""

    squared_error: float = 0.0
    squared_norm: float = 0.0

    def plus(self, kept: Tensor, given: Tensor) -> Loss:
        """`kept` is what stands for `given`."""
        given = given.float()
        error = float((kept.float() - given).square().sum())
        return Loss(self.squared_error + error, self.squared_norm + float(given.square().sum()))


class Matrix(Protocol):
    """Filled part by part, then multiplied with. `loss` is what its format cost."""

    loss: Loss

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it consists of in memory."""

    def fill(self, rows: slice, columns: slice, values: Tensor) -> None:
        """Every element must be filled once before the first use."""

    def rows(self, part: slice) -> Matrix:
        """A view of some outputs."""

    def columns(self, part: slice) -> Matrix:
        """A view of some inputs."""

    def times(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias: [s,n], written to `out` where it is given."""


class Floats:
    """float32, or bfloat16 with activations rounded to it, as `transformers` computes in that type."""

    def __init__(self, weight_nk: Tensor) -> None:
        self.weight = weight_nk
        self.loss = Loss()

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def fill(self, rows: slice, columns: slice, values: Tensor) -> None:
        kept = self.weight[rows, columns].copy_(values)
        if kept.dtype not in (values.dtype, torch.float32):
            self.loss = self.loss.plus(kept, values.to(kept.device))

    def rows(self, part: slice) -> Floats:
        return Floats(self.weight[part])

    def columns(self, part: slice) -> Floats:
        return Floats(self.weight[:, part])

    def times(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if self.weight.dtype != x_sk.dtype:
            return _finished(F.linear(x_sk.to(self.weight.dtype), self.weight).to(x_sk.dtype), bias_n, out)
        if out is None:
            return F.linear(x_sk, self.weight, bias_n)
        if bias_n is None:
            return torch.mm(x_sk, self.weight.t(), out=out)
        return torch.addmm(bias_n, x_sk, self.weight.t(), out=out)


class Int8:
    """Weight-only int8 with one scale for each output (absolute maximum / 127)."""

    def __init__(self, quantised_nk: Tensor, scales_n: Tensor) -> None:
        self.loss = Loss()
        self._quantised = quantised_nk
        self._scales = scales_n
        self._filling: Tensor | None = None  # in float32, until all of it is there
        self._num_filled = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self._quantised.shape[0], self._quantised.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._quantised, self._scales)

    def fill(self, rows: slice, columns: slice, values: Tensor) -> None:
        if self._filling is None:
            self._filling = torch.empty(self.shape, dtype=torch.float32, device=self._quantised.device)
        self._filling[rows, columns].copy_(values)
        self._num_filled += values.numel()
        if self._num_filled == self._quantised.numel():
            largest = self._filling.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny)
            scales = (largest / 127).to(self._scales.dtype)
            self._scales.copy_(scales)
            self._quantised.copy_((self._filling / scales.float()[:, None]).round_().clamp_(-127, 127))
            self.loss = self.loss.plus(self._quantised * scales.float()[:, None], self._filling)
            self._filling = None

    def rows(self, part: slice) -> Int8:
        return Int8(self._quantised[part], self._scales[part])

    def columns(self, part: slice) -> Int8:
        return Int8(self._quantised[:, part], self._scales)

    def times(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        x = x_sk.to(self._scales.dtype)
        if x.shape[0] <= _FEW_ROWS and self._quantised.is_contiguous() and self._quantised.numel():
            y = torch._weight_int8pack_mm(x, self._quantised, self._scales)
        else:
            y = F.linear(x, self._quantised.to(x.dtype)) * self._scales
        return _finished(y.to(x_sk.dtype), bias_n, out)


def _finished(y_sn: Tensor, bias_n: Tensor | None, out: Tensor | None) -> Tensor:
    if bias_n is not None:
        y_sn += bias_n
    return y_sn if out is None else out.copy_(y_sn)


def empty_matrix(num_outputs: int, num_inputs: int, weights: WeightFormat, device: torch.device) -> Matrix:
    """Memory for a matrix, uninitialised."""
    if weights == "int8":
        quantised = torch.empty(num_outputs, num_inputs, dtype=torch.int8, device=device)
        return Int8(quantised, torch.empty(num_outputs, dtype=torch.bfloat16, device=device))
    return Floats(torch.empty(num_outputs, num_inputs, dtype=getattr(torch, weights), device=device))
