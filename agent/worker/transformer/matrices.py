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

_FEW_ROWS = 8  # up to this many rows, the int8 kernel is faster than a GEMM on converted weights
_INT8_KERNEL_INPUTS = 32  # torch 2.13's int8 kernel on x86 reads its inputs in groups of this size
_FLOAT16_SAFE = 1000.0  # largest activation for which sums of float16 products stay far below float16's limit of 65504
_GROUP = 32  # inputs that share a scale in int4; grain borders of shards are multiples of it
_PACKED_OUTPUTS = 16  # the int4 layout groups this many outputs
_SMALLEST = 1e-30  # minimum of a scale, so that a zero row or group does not divide by zero
_PACKED_FROM = 1 << 14  # elements; a smaller matrix fits into the CPU's caches in any layout
_PACKED_FOR_ROWS = 64  # rows of activations: a hint to oneDNN; the layout works for any number
_PACKED_ROWS = (0, 1, 2, 4, *range(8, 97, 8), 144, 192, 256)  # row counts for which kernels are created
_ROWS_PER_BLOCK = 6  # reading the weights again for another block costs as much as computing this many rows


class Loss(NamedTuple):
    """Quantisation error of a matrix: sums of squares of the differences and of the weights."""

    squared_error: float = 0.0
    squared_norm: float = 0.0

    def plus(self, kept: Tensor, given: Tensor) -> Loss:
        """Add the error of storing the weights `given` as `kept`."""
        given = given.float()
        error = float((kept.float() - given).square().sum())
        return Loss(self.squared_error + error, self.squared_norm + float(given.square().sum()))


class Pieces(NamedTuple):
    """The parts in which a matrix is used: ranges of outputs (axis 0) or inputs (axis 1) between these borders."""

    axis: int
    borders: tuple[int, ...]  # from 0 to the matrix's size


class Floats:
    """A matrix in float32, bfloat16 or float16.

    For bfloat16, activations are rounded to bfloat16, as `transformers` does. float16 has too small a range for that: it is
    multiplied in float16 only with single rows, for which that is faster, and otherwise converted.
    """

    def __init__(self, weight_nk: Tensor) -> None:
        self.weight = weight_nk
        self.loss = Loss()

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs [n,k]."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the matrix in memory."""
        return (self.weight,)

    def fill(self, rows: slice, columns: slice, values: Tensor) -> None:
        """Set a part of the matrix. Every element must be set exactly once before the first use."""
        kept = self.weight[rows, columns].copy_(values)
        if kept.dtype not in (values.dtype, torch.float32):
            self.loss = self.loss.plus(kept, values.to(kept.device))

    def rows(self, part: slice) -> Floats:
        """A view of a range of outputs."""
        return Floats(self.weight[part])

    def columns(self, part: slice) -> Floats:
        """A view of a range of inputs."""
        return Floats(self.weight[:, part])

    def times(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return x W^T + bias [s,n]; written to `out` if given."""
        weight = self.weight
        if weight.dtype == torch.float16 and not (x_sk.shape[0] == 1 and x_sk.abs().max() < _FLOAT16_SAFE):
            weight = weight.to(x_sk.dtype)
        if weight.dtype != x_sk.dtype:
            return _finished(F.linear(x_sk.to(weight.dtype), weight).to(x_sk.dtype), bias_n, out)
        if out is None:
            return F.linear(x_sk, weight, bias_n)
        if bias_n is None:
            return torch.mm(x_sk, weight.t(), out=out)
        return torch.addmm(bias_n, x_sk, weight.t(), out=out)


class _Collected:
    """Base of formats that are converted in one go: collects float32 values until the whole matrix is filled."""

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        self.loss = Loss()
        self.shape = (num_outputs, num_inputs)
        self._device = device
        self._filling: Tensor | None = None
        self._num_missing = num_outputs * num_inputs

    def fill(self, rows: slice, columns: slice, values: Tensor) -> None:
        if self._filling is None:
            self._filling = torch.empty(self.shape, dtype=torch.float32, device=self._device)
        self._filling[rows, columns].copy_(values)
        self._num_missing -= values.numel()
        if self._num_missing == 0:
            self._keep(self._filling)
            self._filling = None

    def _keep(self, weight_nk: Tensor) -> None:
        raise NotImplementedError


class Packed(_Collected):
    """A float32 matrix on x86 processors, in the blocked layout of oneDNN's kernels.

    A GEMM reads the weights sequentially without packing them first, and takes 5 to 35 % less time than with plain rows.
    Views of whole pieces only.
    """

    def __init__(self, num_outputs: int, num_inputs: int, used: Pieces) -> None:
        super().__init__(num_outputs, num_inputs, torch.device("cpu"))
        self._used = used
        self._packed: list[Tensor] = []  # one tensor per piece

    @staticmethod
    def takes(num_outputs: int, num_inputs: int, device: torch.device) -> bool:
        here = (
            device.type == "cpu" and platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
        )
        return here and num_outputs * num_inputs >= _PACKED_FROM

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._packed)

    def _keep(self, weight_nk: Tensor) -> None:
        axis, borders = self._used
        for start, stop in pairwise(borders):
            piece = weight_nk.narrow(axis, start, stop - start).contiguous()
            self._packed.append(torch.ops.mkldnn._reorder_linear_weight(piece, _PACKED_FOR_ROWS))

    def rows(self, part: slice) -> Packed:
        return self._view(0, part)

    def columns(self, part: slice) -> Packed:
        return self._view(1, part)

    def _view(self, axis: int, part: slice) -> Packed:
        size, borders = self.shape[axis], self._used.borders
        start, stop, _ = part.indices(size)
        stop = max(start, stop)
        if stop - start == size:
            return self
        if start < stop and (axis != self._used.axis or not {start, stop} <= set(borders)):
            raise StepFailed(device="this device", reason="a packed matrix cannot be used in other pieces than its own")
        inside = [index for index, (a, b) in enumerate(pairwise(borders)) if start <= a and b <= stop and a < stop]
        shape = list(self.shape)
        shape[axis] = stop - start
        kept = tuple(border - start for border in borders if start <= border <= stop) if start < stop else (0,)
        view = Packed(shape[0], shape[1], Pieces(axis, kept))
        view._packed = [self._packed[index] for index in inside]
        return view

    def times(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        axis, borders = self._used
        if len(self._packed) == 1:
            y = _times_packed(x_sk, self._packed[0], bias_n)
            return y if out is None else out.copy_(y)
        parts = list(zip(pairwise(borders), self._packed, strict=True))
        y_sn = x_sk.new_empty(x_sk.shape[0], self.shape[0]) if out is None else out
        if axis == 0:
            for (start, stop), packed in parts:
                y_sn[:, start:stop] = _times_packed(x_sk, packed, None if bias_n is None else bias_n[start:stop])
            return y_sn
        y_sn.zero_() if bias_n is None else y_sn.copy_(bias_n.expand_as(y_sn))
        for (start, stop), packed in parts:
            y_sn += _times_packed(x_sk[:, start:stop], packed, None)
        return y_sn


def _times_packed(x_sk: Tensor, packed: Tensor, bias_n: Tensor | None) -> Tensor:
    """Multiply in blocks of rows: [s,n], a view if there is one block.

    oneDNN creates a kernel for every number of rows, which takes milliseconds and keeps up to half a MiB each. So only a few
    block heights are used, and the last block is padded.
    """
    rows = x_sk.shape[0]
    num_blocks, height = _packed_blocks(rows)
    if num_blocks == 1:
        return _block_times_packed(x_sk, height, packed, bias_n)
    y_sn = x_sk.new_empty(rows, packed.shape[0])
    size = -(-rows // num_blocks)
    for start in range(0, rows, size):
        block = slice(start, start + size)
        y_sn[block] = _block_times_packed(x_sk[block], height, packed, bias_n)
    return y_sn


@lru_cache(maxsize=1024)
def _packed_blocks(rows: int) -> tuple[int, int]:
    """The number and the height of the blocks that compute `rows` fastest."""
    fewest = max(-(-rows // _PACKED_ROWS[-1]), 1)
    choices = [
        (num_blocks, next(height for height in _PACKED_ROWS if num_blocks * height >= rows))
        for num_blocks in range(fewest, 3 * fewest + 1)
    ]
    return min(choices, key=lambda choice: choice[0] * (choice[1] + _ROWS_PER_BLOCK))


def _block_times_packed(x_sk: Tensor, height: int, packed: Tensor, bias_n: Tensor | None) -> Tensor:
    rows = x_sk.shape[0]
    if rows < height:
        x_hk = x_sk.new_empty(height, x_sk.shape[1])
        x_hk[:rows], x_hk[rows:] = x_sk, 0.0
    else:
        x_hk = x_sk
    y_hn: Tensor = torch.ops.mkldnn._linear_pointwise(x_hk, packed, bias_n, "none", [], "")
    return y_hn[:rows]


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Address and size in bytes of a tensor's memory, also for a tensor in oneDNN's layout."""
    if tensor.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    return tensor.data_ptr(), tensor.nbytes


class _Quantised(_Collected):
    """Base of the quantised formats."""

    def _keep(self, weight_nk: Tensor) -> None:
        self.loss = self.loss.plus(self._quantise(weight_nk), weight_nk)

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        """Quantise and store the matrix; returns the dequantised values in float32."""
        raise NotImplementedError


class Int8(_Quantised):
    """Weight-only int8 with one scale per output (absolute maximum / 127)."""

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        super().__init__(num_outputs, num_inputs, device)
        self._values = torch.empty(num_outputs, num_inputs, dtype=torch.int8, device=device)
        self._scales = torch.empty(num_outputs, dtype=torch.bfloat16, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._values, self._scales)

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        self._scales.copy_(weight_nk.abs().amax(dim=1).clamp_(min=_SMALLEST) / 127)
        scales = self._scales.float()[:, None]
        self._values.copy_((weight_nk / scales).round_().clamp_(-127, 127))
        return self._values * scales

    def rows(self, part: slice) -> Int8:
        return self._view(self._values[part], self._scales[part])

    def columns(self, part: slice) -> Int8:
        return self._view(self._values[:, part], self._scales)

    def _view(self, values: Tensor, scales: Tensor) -> Int8:
        view = Int8(0, 0, self._device)
        view.shape, view._values, view._scales = (values.shape[0], values.shape[1]), values, scales
        return view

    def times(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        x = x_sk.to(self._scales.dtype)
        values = self._values
        if x.shape[0] <= _FEW_ROWS and self._suits_kernel():
            y = torch._weight_int8pack_mm(x, values, self._scales)
        else:
            y = F.linear(x, values.to(x.dtype)) * self._scales
        return _finished(y.to(x_sk.dtype), bias_n, out)

    def _suits_kernel(self) -> bool:
        """Whether torch's int8 kernel is safe: for other numbers of inputs it reads past the end of the weights."""
        values = self._values
        whole: bool = values.numel() > 0 and values.shape[1] % _INT8_KERNEL_INPUTS == 0
        return whole and values.is_contiguous() and values.device.type == "cpu"


class Int4(_Quantised):
    """Weight-only int4 with a scale and a zero point for every 32 inputs of an output.

    Stored in torch's packed layout for CPUs, of which there are no views.
    """

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        super().__init__(num_outputs, num_inputs, device)
        self._packed = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8, device=device)
        self._scales_and_zeros = torch.empty(num_inputs // _GROUP, num_outputs, 2, dtype=torch.bfloat16, device=device)

    @staticmethod
    def takes(num_outputs: int, num_inputs: int) -> bool:
        whole = num_outputs % _PACKED_OUTPUTS == 0 and num_inputs % _GROUP == 0
        return whole and num_outputs * num_inputs > 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._packed, self._scales_and_zeros)

    def _quantise(self, weight_nk: Tensor) -> Tensor:
        groups = weight_nk.unflatten(1, (-1, _GROUP))  # [n, k / 32, 32]
        least, most = groups.amin(dim=2), groups.amax(dim=2)
        scales = ((most - least) / 15).clamp_(min=_SMALLEST).bfloat16()
        zeros = (least + 8 * scales.float()).bfloat16()
        scale, zero = scales.float()[..., None], zeros.float()[..., None]
        steps = ((groups - zero) / scale).round_().add_(8).clamp_(0, 15)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps.flatten(1).to(torch.int32), 1)
        self._packed.copy_(packed.view(self._packed.shape))
        self._scales_and_zeros.copy_(torch.stack([scales, zeros], dim=2).transpose(0, 1))
        return ((steps - 8) * scale + zero).flatten(1)

    def rows(self, part: slice) -> Int4:
        return self._whole(part, self.shape[0])

    def columns(self, part: slice) -> Int4:
        return self._whole(part, self.shape[1])

    def _whole(self, part: slice, size: int) -> Int4:
        if len(range(size)[part]) != size:
            raise StepFailed(device="this device", reason="an int4 matrix cannot be used in part")
        return self

    def times(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if not x_sk.shape[0]:
            return _finished(x_sk.new_empty(0, self.shape[0]), bias_n, out)
        x = x_sk.to(self._scales_and_zeros.dtype)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, _GROUP, self._scales_and_zeros)
        return _finished(y.to(x_sk.dtype), bias_n, out)


# A matrix is set in parts by `fill`, then used by `times`. `loss` is its quantisation error.
Matrix: TypeAlias = Floats | Packed | Int8 | Int4


def _finished(y_sn: Tensor, bias_n: Tensor | None, out: Tensor | None) -> Tensor:
    if bias_n is not None:
        y_sn += bias_n
    return y_sn if out is None else out.copy_(y_sn)


def empty_matrix(
    num_outputs: int, num_inputs: int, weights: WeightFormat, device: torch.device, used: Pieces | None = None
) -> Matrix:
    """Allocate an uninitialised matrix. `used`: the only parts that will be used (None: any).

    With int4, a matrix whose shape does not fit the int4 layout is stored as int8. Raises UnsupportedWeights if the device
    has no int4 kernel.
    """
    if weights == "int4" and device.type not in INT4_DEVICES:
        raise UnsupportedWeights(device="this device", weights=weights, compute_device=device.type)
    if weights == "int4" and Int4.takes(num_outputs, num_inputs):
        return Int4(num_outputs, num_inputs, device)
    if weights in ("int8", "int4"):
        return Int8(num_outputs, num_inputs, device)
    if weights == "float32" and used is not None and Packed.takes(num_outputs, num_inputs, device):
        return Packed(num_outputs, num_inputs, used)
    return Floats(torch.empty(num_outputs, num_inputs, dtype=getattr(torch, weights), device=device))
