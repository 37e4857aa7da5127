"""Float matrices in the blocked layout of oneDNN."""

from __future__ import annotations

import platform
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import BufferedMatrix, Partition
from hearth.errors import StepFailed

_MIN_PACKED_ELEMENTS = 1 << 14  # elements; a smaller matrix fits into the CPU's caches in any layout
_PACKED_ROWS_HINT = 64  # rows of activations: a hint to oneDNN; the layout works for any number
# Row counts for which kernels are created: few, because a kernel takes up to half a MiB, and dense where padding costs most.
_PACKED_ROW_COUNTS = (0, 1, 2, 4, *range(8, 97, 8), 144, 192, 256)
_BLOCK_OVERHEAD_ROWS = 6  # rows; reading the weights again for another block costs as much as computing this many rows


class PackedMatrix(BufferedMatrix):
    """A float32 matrix on x86 processors, in the blocked layout of oneDNN's kernels.

    A GEMM reads the weights sequentially without packing them first, and takes 5 to 35 % less time than with plain rows.
    Views of whole blocks of the partition only.
    """

    layout = "onednn"
    kernels = ("onednn",)

    def __init__(self, num_outputs: int, num_inputs: int, partition: Partition) -> None:
        super().__init__(num_outputs, num_inputs, torch.device("cpu"))
        self._partition = partition
        self._packed: list[Tensor] = []  # one tensor per block of the partition
        self._unpacked: Tensor | None = None  # from the first `read` on

    @staticmethod
    def supports(num_outputs: int, num_inputs: int, device: torch.device) -> bool:
        available = (
            device.type == "cpu" and platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
        )
        return available and num_outputs * num_inputs >= _MIN_PACKED_ELEMENTS

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._packed)

    def _store(self, weight_nk: Tensor) -> None:
        axis, borders = self._partition
        for start, stop in pairwise(borders):
            block = weight_nk.narrow(axis, start, stop - start).contiguous()
            self._packed.append(torch.ops.mkldnn._reorder_linear_weight(block, _PACKED_ROWS_HINT))

    def read(self, rows: slice, columns: slice) -> Tensor | None:
        """As `FloatMatrix.read`. Keeps a copy with plain rows: a matrix is read when it is no longer multiplied."""
        if not self._packed:
            return None
        if self._unpacked is None:
            self._unpacked = torch.cat([packed.to_dense() for packed in self._packed], dim=self._partition.axis)
        return self._unpacked[rows, columns]

    def rows(self, part: slice) -> PackedMatrix:
        return self._view(0, part)

    def columns(self, part: slice) -> PackedMatrix:
        return self._view(1, part)

    def _view(self, axis: int, part: slice) -> PackedMatrix:
        size, borders = self.shape[axis], self._partition.borders
        start, stop, _ = part.indices(size)
        stop = max(start, stop)
        if stop - start == size:
            return self
        if start < stop and (axis != self._partition.axis or not {start, stop} <= set(borders)):
            reason = "a packed matrix can be used only in the blocks in which it was packed"
            raise StepFailed(device="this device", reason=reason)
        inside = [index for index, (a, b) in enumerate(pairwise(borders)) if start <= a and b <= stop and a < stop]
        shape = list(self.shape)
        shape[axis] = stop - start
        borders_inside = (
            tuple(border - start for border in borders if start <= border <= stop) if start < stop else (0,)
        )
        view = PackedMatrix(shape[0], shape[1], Partition(axis, borders_inside))
        view._packed = [self._packed[index] for index in inside]
        return view

    def product(self, kernel: str, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        axis, borders = self._partition
        if len(self._packed) == 1:
            y = _matmul_packed(x_sk, self._packed[0], bias_n)
            return y if out is None else out.copy_(y)
        parts = list(zip(pairwise(borders), self._packed, strict=True))
        y_sn = x_sk.new_empty(x_sk.shape[0], self.shape[0]) if out is None else out
        if axis == 0:
            for (start, stop), packed in parts:
                y_sn[:, start:stop] = _matmul_packed(x_sk, packed, None if bias_n is None else bias_n[start:stop])
            return y_sn
        y_sn.zero_() if bias_n is None else y_sn.copy_(bias_n.expand_as(y_sn))
        for (start, stop), packed in parts:
            y_sn += _matmul_packed(x_sk[:, start:stop], packed, None)
        return y_sn


def _matmul_packed(x_sk: Tensor, packed: Tensor, bias_n: Tensor | None) -> Tensor:
    """Multiply in blocks of rows: [s,n], a view if there is one block.

    oneDNN creates a kernel for every number of rows, which takes milliseconds and keeps up to half a MiB each. So only a few
    block heights are used, and the last block is padded.
    """
    rows = x_sk.shape[0]
    num_blocks, height = row_blocks(rows)
    if num_blocks == 1:
        return _matmul_packed_block(x_sk, height, packed, bias_n)
    y_sn = x_sk.new_empty(rows, packed.shape[0])
    size = -(-rows // num_blocks)
    for start in range(0, rows, size):
        block = slice(start, start + size)
        y_sn[block] = _matmul_packed_block(x_sk[block], height, packed, bias_n)
    return y_sn


@lru_cache(maxsize=1024)
def row_blocks(rows: int) -> tuple[int, int]:
    """The number and the height of the blocks that compute `rows` fastest."""
    fewest = max(-(-rows // _PACKED_ROW_COUNTS[-1]), 1)
    choices = [
        (num_blocks, next(height for height in _PACKED_ROW_COUNTS if num_blocks * height >= rows))
        for num_blocks in range(fewest, 3 * fewest + 1)
    ]
    return min(choices, key=lambda choice: choice[0] * (choice[1] + _BLOCK_OVERHEAD_ROWS))


def _matmul_packed_block(x_sk: Tensor, height: int, packed: Tensor, bias_n: Tensor | None) -> Tensor:
    rows = x_sk.shape[0]
    y_hn: Tensor = torch.ops.mkldnn._linear_pointwise(pad_rows(x_sk, height, 0.0), packed, bias_n, "none", [], "")
    return y_hn[:rows]


def pad_rows(x_sk: Tensor, height: int, value: float) -> Tensor:
    """Append rows of `value`, so that there are `height`."""
    rows = x_sk.shape[0]
    if rows == height:
        return x_sk
    x_hk = x_sk.new_empty(height, x_sk.shape[1])
    x_hk[:rows], x_hk[rows:] = x_sk, value
    return x_hk
