"""Weight matrices in the plan's weight format, multiplied with float32 activations.

Shapes: [n,k] for n outputs and k inputs, as in checkpoints; s rows of activations.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own custom)
from torch import Tensor

from hearth.errors import StepFailed, UnsupportedWeights
from hearth.plan.model_spec import INT4_DEVICES, WeightFormat

_INT8_KERNEL_MAX_ROWS = 8  # rows; with more, a GEMM on converted weights is faster than the int8 kernel
_INT8_KERNEL_INPUT_GROUP = 32  # inputs; torch 2.13's int8 kernel on x86 reads them in groups of this size
# Largest activation for which sums of float16 products stay far below float16's limit of 65504.
_FLOAT16_MAX_ACTIVATION = 1000.0
_INT4_GROUP_SIZE = 32  # inputs that share a scale; grain borders of shards are multiples of it
_INT4_OUTPUT_GROUP = 16  # outputs; torch's int4 layout groups them so
_MIN_SCALE = 1e-30  # minimum of a scale, so that a zero row or group does not divide by zero
_MIN_PACKED_ELEMENTS = 1 << 14  # elements; a smaller matrix fits into the CPU's caches in any layout
_PACKED_ROWS_HINT = 64  # rows of activations: a hint to oneDNN; the layout works for any number
# Row counts for which kernels are created: few, because a kernel takes up to half a MiB, and dense where padding costs most.
_PACKED_ROW_COUNTS = (0, 1, 2, 4, *range(8, 97, 8), 144, 192, 256)
_BLOCK_OVERHEAD_ROWS = 6  # rows; reading the weights again for another block costs as much as computing this many rows


class QuantisationError(NamedTuple):
    """Quantisation error of a matrix: sums of squares of the differences and of the weights."""

    squared_error: float = 0.0
    squared_norm: float = 0.0

    def add(self, stored: Tensor, original: Tensor) -> QuantisationError:
        """Add the error of storing the weights `original` as `stored`."""
        original = original.float()
        error = float((stored.float() - original).square().sum())
        return QuantisationError(self.squared_error + error, self.squared_norm + float(original.square().sum()))


class Partition(NamedTuple):
    """The blocks in which a matrix is used: ranges of outputs (axis 0) or inputs (axis 1) between these borders."""

    axis: int
    borders: tuple[int, ...]  # from 0 to the matrix's size


class FloatMatrix:
    """A matrix in float32, bfloat16 or float16.

    For bfloat16, activations are rounded to bfloat16, as `transformers` does. float16 has too small a range for that: it is
    multiplied in float16 only with single rows, for which that is faster, and otherwise converted.
    """

    def __init__(self, weight_nk: Tensor) -> None:
        self.weight = weight_nk
        self.quantisation_error = QuantisationError()

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs [n,k]."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the matrix in memory."""
        return (self.weight,)

    def load(self, rows: slice, columns: slice, values: Tensor) -> None:
        """Set a part of the matrix. Every element must be set exactly once before the first use."""
        stored = self.weight[rows, columns].copy_(values)
        if stored.dtype not in (values.dtype, torch.float32):
            self.quantisation_error = self.quantisation_error.add(stored, values.to(stored.device))

    def read(self, rows: slice, columns: slice) -> Tensor | None:
        """A part of the matrix as it was loaded; None if the weight format has changed its values."""
        return self.weight[rows, columns] if self.quantisation_error == QuantisationError() else None

    def rows(self, part: slice) -> FloatMatrix:
        """A view of a range of outputs."""
        return FloatMatrix(self.weight[part])

    def columns(self, part: slice) -> FloatMatrix:
        """A view of a range of inputs."""
        return FloatMatrix(self.weight[:, part])

    def matmul(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return x W^T + bias [s,n]; written to `out` if given."""
        weight = self.weight
        if weight.dtype == torch.float16 and not (x_sk.shape[0] == 1 and x_sk.abs().max() < _FLOAT16_MAX_ACTIVATION):
            weight = weight.to(x_sk.dtype)
        if weight.dtype != x_sk.dtype:
            return _add_bias(F.linear(x_sk.to(weight.dtype), weight).to(x_sk.dtype), bias_n, out)
        if out is None:
            return F.linear(x_sk, weight, bias_n)
        if bias_n is None:
            return torch.mm(x_sk, weight.t(), out=out)
        return torch.addmm(bias_n, x_sk, weight.t(), out=out)


class _BufferedMatrix:
    """Base of formats that are converted in one go: buffers float32 values until the whole matrix is loaded."""

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        self.quantisation_error = QuantisationError()
        self.shape = (num_outputs, num_inputs)
        self._device = device
        self._buffer: Tensor | None = None
        self._num_missing = num_outputs * num_inputs

    def load(self, rows: slice, columns: slice, values: Tensor) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(self.shape, dtype=torch.float32, device=self._device)
        self._buffer[rows, columns].copy_(values)
        self._num_missing -= values.numel()
        if self._num_missing == 0:
            self._store(self._buffer)
            self._buffer = None

    def read(self, rows: slice, columns: slice) -> Tensor | None:
        """A part of the matrix as it was loaded; None if the weight format has changed its values."""
        return None

    def _store(self, weight_nk: Tensor) -> None:
        raise NotImplementedError


class PackedMatrix(_BufferedMatrix):
    """A float32 matrix on x86 processors, in the blocked layout of oneDNN's kernels.

    A GEMM reads the weights sequentially without packing them first, and takes 5 to 35 % less time than with plain rows.
    Views of whole blocks of the partition only.
    """

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
            raise StepFailed(
                device="this device", reason="a packed matrix can be used only in the blocks in which it was packed"
            )
        inside = [index for index, (a, b) in enumerate(pairwise(borders)) if start <= a and b <= stop and a < stop]
        shape = list(self.shape)
        shape[axis] = stop - start
        borders_inside = (
            tuple(border - start for border in borders if start <= border <= stop) if start < stop else (0,)
        )
        view = PackedMatrix(shape[0], shape[1], Partition(axis, borders_inside))
        view._packed = [self._packed[index] for index in inside]
        return view

    def matmul(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
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
    num_blocks, height = _row_blocks(rows)
    if num_blocks == 1:
        return _matmul_packed_block(x_sk, height, packed, bias_n)
    y_sn = x_sk.new_empty(rows, packed.shape[0])
    size = -(-rows // num_blocks)
    for start in range(0, rows, size):
        block = slice(start, start + size)
        y_sn[block] = _matmul_packed_block(x_sk[block], height, packed, bias_n)
    return y_sn


@lru_cache(maxsize=1024)
def _row_blocks(rows: int) -> tuple[int, int]:
    """The number and the height of the blocks that compute `rows` fastest."""
    fewest = max(-(-rows // _PACKED_ROW_COUNTS[-1]), 1)
    choices = [
        (num_blocks, next(height for height in _PACKED_ROW_COUNTS if num_blocks * height >= rows))
        for num_blocks in range(fewest, 3 * fewest + 1)
    ]
    return min(choices, key=lambda choice: choice[0] * (choice[1] + _BLOCK_OVERHEAD_ROWS))


def _matmul_packed_block(x_sk: Tensor, height: int, packed: Tensor, bias_n: Tensor | None) -> Tensor:
    rows = x_sk.shape[0]
    if rows < height:
        x_hk = x_sk.new_empty(height, x_sk.shape[1])
        x_hk[:rows], x_hk[rows:] = x_sk, 0.0
    else:
        x_hk = x_sk
    y_hn: Tensor = torch.ops.mkldnn._linear_pointwise(x_hk, packed, bias_n, "none", [], "")
    return y_hn[:rows]


def memory_range(tensor: Tensor) -> tuple[int, int]:
    """Address and size in bytes of a tensor's memory, also for a tensor in oneDNN's layout."""
    if tensor.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    return tensor.data_ptr(), tensor.nbytes


class _QuantisedMatrix(_BufferedMatrix):
    """Base of the quantised formats."""

    def _store(self, weight_nk: Tensor) -> None:
        self.quantisation_error = self.quantisation_error.add(self._quantise(weight_nk), weight_nk)

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        """Quantise and store the matrix; returns the dequantised values in float32."""
        raise NotImplementedError


class Int8Matrix(_QuantisedMatrix):
    """Weight-only int8 with one scale per output (absolute maximum / 127)."""

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        super().__init__(num_outputs, num_inputs, device)
        self._values = torch.empty(num_outputs, num_inputs, dtype=torch.int8, device=device)
        self._scales = torch.empty(num_outputs, dtype=torch.bfloat16, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._values, self._scales)

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        self._scales.copy_(weight_nk.abs().amax(dim=1).clamp_(min=_MIN_SCALE) / 127)
        scales = self._scales.float()[:, None]
        self._values.copy_((weight_nk / scales).round_().clamp_(-127, 127))
        return self._values * scales

    def rows(self, part: slice) -> Int8Matrix:
        return self._view(self._values[part], self._scales[part])

    def columns(self, part: slice) -> Int8Matrix:
        return self._view(self._values[:, part], self._scales)

    def _view(self, values: Tensor, scales: Tensor) -> Int8Matrix:
        view = Int8Matrix(0, 0, self._device)
        view.shape, view._values, view._scales = (values.shape[0], values.shape[1]), values, scales
        return view

    def matmul(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        x = x_sk.to(self._scales.dtype)
        values = self._values
        if x.shape[0] <= _INT8_KERNEL_MAX_ROWS and self._kernel_is_safe():
            y = torch._weight_int8pack_mm(x, values, self._scales)
        else:
            y = F.linear(x, values.to(x.dtype)) * self._scales
        return _add_bias(y.to(x_sk.dtype), bias_n, out)

    def _kernel_is_safe(self) -> bool:
        """Whether torch's int8 kernel is safe: for other numbers of inputs it reads past the end of the weights."""
        values = self._values
        fits: bool = values.numel() > 0 and values.shape[1] % _INT8_KERNEL_INPUT_GROUP == 0
        return fits and values.is_contiguous() and values.device.type == "cpu"


class Int4Matrix(_QuantisedMatrix):
    """Weight-only int4 with a scale and a zero point for every 32 inputs of an output.

    Stored in torch's packed layout for CPUs, of which there are no views.
    """

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        super().__init__(num_outputs, num_inputs, device)
        self._packed = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8, device=device)
        self._scales_and_zeros = torch.empty(
            num_inputs // _INT4_GROUP_SIZE, num_outputs, 2, dtype=torch.bfloat16, device=device
        )

    @staticmethod
    def supports(num_outputs: int, num_inputs: int) -> bool:
        fits = num_outputs % _INT4_OUTPUT_GROUP == 0 and num_inputs % _INT4_GROUP_SIZE == 0
        return fits and num_outputs * num_inputs > 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._packed, self._scales_and_zeros)

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        groups = weight_nk.unflatten(1, (-1, _INT4_GROUP_SIZE))  # [n, k / 32, 32]
        minimum, maximum = groups.amin(dim=2), groups.amax(dim=2)
        scales = ((maximum - minimum) / 15).clamp_(min=_MIN_SCALE).bfloat16()
        zeros = (minimum + 8 * scales.float()).bfloat16()
        scale, zero = scales.float()[..., None], zeros.float()[..., None]
        steps = ((groups - zero) / scale).round_().add_(8).clamp_(0, 15)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps.flatten(1).to(torch.int32), 1)
        self._packed.copy_(packed.view(self._packed.shape))
        self._scales_and_zeros.copy_(torch.stack([scales, zeros], dim=2).transpose(0, 1))
        return ((steps - 8) * scale + zero).flatten(1)

    def rows(self, part: slice) -> Int4Matrix:
        return self._require_whole(part, self.shape[0])

    def columns(self, part: slice) -> Int4Matrix:
        return self._require_whole(part, self.shape[1])

    def _require_whole(self, part: slice, size: int) -> Int4Matrix:
        if len(range(size)[part]) != size:
            raise StepFailed(device="this device", reason="an int4 matrix cannot be divided")
        return self

    def matmul(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if not x_sk.shape[0]:
            return _add_bias(x_sk.new_empty(0, self.shape[0]), bias_n, out)
        x = x_sk.to(self._scales_and_zeros.dtype)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, _INT4_GROUP_SIZE, self._scales_and_zeros)
        return _add_bias(y.to(x_sk.dtype), bias_n, out)


# A matrix is loaded in parts by `load`, then multiplied by `matmul`; `quantisation_error` is the loss of its weight format.
Matrix: TypeAlias = FloatMatrix | PackedMatrix | Int8Matrix | Int4Matrix


def _add_bias(y_sn: Tensor, bias_n: Tensor | None, out: Tensor | None) -> Tensor:
    if bias_n is not None:
        y_sn += bias_n
    return y_sn if out is None else out.copy_(y_sn)


def empty_matrix(
    num_outputs: int, num_inputs: int, weights: WeightFormat, device: torch.device, partition: Partition | None = None
) -> Matrix:
    """Allocate an uninitialised matrix. `partition`: the only parts that will be used (None: any).

    With int4, a matrix whose shape does not fit the int4 layout is stored as int8. Raises UnsupportedWeights if the device
    has no int4 kernel.
    """
    if weights == "int4" and device.type not in INT4_DEVICES:
        raise UnsupportedWeights(device="this device", weights=weights, compute_device=device.type)
    if weights == "int4" and Int4Matrix.supports(num_outputs, num_inputs):
        return Int4Matrix(num_outputs, num_inputs, device)
    if weights in ("int8", "int4"):
        return Int8Matrix(num_outputs, num_inputs, device)
    if weights == "float32" and partition is not None and PackedMatrix.supports(num_outputs, num_inputs, device):
        return PackedMatrix(num_outputs, num_inputs, partition)
    return FloatMatrix(torch.empty(num_outputs, num_inputs, dtype=getattr(torch, weights), device=device))
