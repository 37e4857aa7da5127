"""Matrices in float32, bfloat16 or float16 with plain rows, and the base of quantised layouts of which there are no views."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own custom)
from torch import Tensor

from agent.worker.transformer.kernels.base import (
    FILLED_WITH,
    KernelMatrix,
    QuantisationError,
    QuantisedMatrix,
    add_bias,
)
from hearth.errors import StepFailed

# Largest activation for which sums of float16 products stay far below float16's limit of 65504.
_FLOAT16_MAX_ACTIVATION = 1000.0
# Norm of a row of activations that a GPU multiplies in float16. By Cauchy and Schwarz, no product then exceeds float16's limit
# unless the weights of an output have a norm above 1023: 8 on average for each of 16384 inputs.
_FLOAT16_NORM = 64.0
_MIN_NORM = 1e-30  # so that a row of zeros is not divided by zero


class FloatMatrix(KernelMatrix):
    """A matrix in float32, bfloat16 or float16.

    For bfloat16, activations are rounded to bfloat16, as `transformers` does. float16 has too small a range for that. A CPU
    multiplies in float16 only single rows, for which that is faster, and otherwise converts the weights. A GPU scales each row
    to a norm at which no product leaves the range, and multiplies in float16: the error is that of rounding the activations and
    the products to 11 bits, and no row depends on another.
    """

    layout = "plain"
    kernels = ("plain",)

    def __init__(self, weight_nk: Tensor) -> None:
        self.weight = weight_nk
        self.shape = (weight_nk.shape[0], weight_nk.shape[1])
        self.quantisation_error = QuantisationError()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def load(self, rows: slice, columns: slice, values: Tensor) -> None:
        """Set a part of the matrix. Every element must be set exactly once before the first use."""
        stored = self.weight[rows, columns].copy_(values)
        if stored.dtype not in (values.dtype, torch.float32):
            self.quantisation_error = self.quantisation_error.add(stored, values.to(stored.device))

    def fill(self) -> None:
        self.weight.fill_(FILLED_WITH)

    def read(self, rows: slice, columns: slice) -> Tensor | None:
        """A part of the matrix as it was loaded; None if the weight format has changed its values."""
        return self.weight[rows, columns] if self.quantisation_error == QuantisationError() else None

    def rows(self, part: slice) -> FloatMatrix:
        """A view of a range of outputs."""
        return FloatMatrix(self.weight[part])

    def columns(self, part: slice) -> FloatMatrix:
        """A view of a range of inputs."""
        return FloatMatrix(self.weight[:, part])

    def product(self, kernel: str, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        weight = self.weight
        if weight.dtype == torch.float16 and weight.device.type != "cpu":
            return add_bias(_multiply_scaled(x_sk, weight), bias_n, out)
        if weight.dtype == torch.float16 and not (x_sk.shape[0] == 1 and x_sk.abs().max() < _FLOAT16_MAX_ACTIVATION):
            weight = weight.to(x_sk.dtype)
        if weight.dtype != x_sk.dtype:
            return add_bias(F.linear(x_sk.to(weight.dtype), weight).to(x_sk.dtype), bias_n, out)
        if out is None:
            return F.linear(x_sk, weight, bias_n)
        if bias_n is None:
            return torch.mm(x_sk, weight.t(), out=out)
        return torch.addmm(bias_n, x_sk, weight.t(), out=out)


def _multiply_scaled(x_sk: Tensor, weight_nk: Tensor) -> Tensor:
    """Return x W^T [s,n] in the activations' type, multiplied in the weights' with rows of the norm `_FLOAT16_NORM`."""
    scales_s1 = torch.linalg.vector_norm(x_sk, dim=1, keepdim=True).clamp_(min=_MIN_NORM).div_(_FLOAT16_NORM)
    return F.linear((x_sk / scales_s1).to(weight_nk.dtype), weight_nk).to(x_sk.dtype).mul_(scales_s1)


class WholeMatrix(QuantisedMatrix):
    """A matrix that is used whole, or not at all: a rank may hold weights of which it uses none for decoding."""

    def rows(self, part: slice) -> WholeMatrix | FloatMatrix:
        return self._view(0, part)

    def columns(self, part: slice) -> WholeMatrix | FloatMatrix:
        return self._view(1, part)

    def _view(self, axis: int, part: slice) -> WholeMatrix | FloatMatrix:
        size = len(range(self.shape[axis])[part])
        if size == self.shape[axis]:
            return self
        if size:
            reason = f"a quantised matrix in {self.layout}'s layout cannot be divided"
            raise StepFailed(device="this device", reason=reason)
        shape = [0 if axis == each else self.shape[each] for each in (0, 1)]
        return FloatMatrix(torch.empty(shape, device=self._device))
