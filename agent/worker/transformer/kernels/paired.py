"""A quantised matrix in two layouts: onnxruntime's for few rows, torch's for many. Takes the memory of both.

onnxruntime multiplies few rows fastest, but cannot expand its packed weights; where the processor multiplies bfloat16, a GEMM
on expanded tiles is several times faster for many rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import BufferedMatrix
from agent.worker.transformer.kernels.int4 import Int4Matrix
from agent.worker.transformer.kernels.int8 import Int8Matrix
from agent.worker.transformer.kernels.nbits import NBitsMatrix
from agent.worker.transformer.kernels.plain import FloatMatrix
from hearth.plan.kernels import PAIRED_LAYOUT

_MAX_FEW_ROWS = (
    16  # rows by default; with more, a GEMM on expanded tiles is faster on processors with bfloat16 products
)


class PairedMatrix(BufferedMatrix):
    """The same quantised values twice. There are no views of parts."""

    layout = PAIRED_LAYOUT

    def __init__(self, few: NBitsMatrix, many: Int4Matrix | Int8Matrix, device: torch.device) -> None:
        super().__init__(*few.shape, device)
        self.kernels = (*few.kernels, *many.kernels)  # type: ignore[misc] # of this pair
        self._few = few
        self._many = many

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._many.tensors

    @property
    def memory(self) -> tuple[tuple[int, int], ...]:
        return (*self._few.memory, *self._many.memory)

    def _store(self, weight_nk: Tensor) -> None:
        for part in (self._few, self._many):
            part.load(slice(None), slice(None), weight_nk)
        self.quantisation_error = self._many.quantisation_error

    def rows(self, part: slice) -> PairedMatrix | FloatMatrix:
        found = self._few.rows(part)
        return found if isinstance(found, FloatMatrix) else self

    def columns(self, part: slice) -> PairedMatrix | FloatMatrix:
        found = self._few.columns(part)
        return found if isinstance(found, FloatMatrix) else self

    def default_kernel(self, rows: int) -> str:
        return self._few.default_kernel(rows) if rows <= _MAX_FEW_ROWS else self._many.default_kernel(rows)

    def product(self, kernel: str, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        part = self._few if kernel in self._few.kernels else self._many
        return part.product(kernel, x_sk, bias_n, out)
