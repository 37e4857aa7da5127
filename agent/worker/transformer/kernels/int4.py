"""int4 weights in groups of 32 inputs, and their kernels in torch.

With many rows, a tile is expanded to floats and then multiplied by a GEMM. torch packs outputs in blocks [k, block / 2] of
bytes, two outputs in a byte: outputs j and j + block / 2 of the block (vectorised builds), or two neighbours (other builds, and
a last, smaller block). The layout is internal to torch, so `can_expand` compares it with a matrix that torch has packed.

Outputs are packed in an order (`packed_order`) in which the low halves of the bytes hold the first half of a section's outputs
and the high halves the second. So each half of a tile expands to consecutive outputs, a whole row of bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import FILLED_WITH, add_bias, multiplies_bfloat16, multiply_into
from agent.worker.transformer.kernels.plain import WholeMatrix

INT4_GROUP_SIZE = 32  # inputs that share a scale; grain borders of shards are multiples of it
_OUTPUT_GROUP = 16  # outputs; torch's int4 layout groups them so
_SCALE_STEPS = 32  # of a scale's mantissa below 1: five bits
_MIN_SCALE = 1e-30  # minimum of a scale, so that a zero group does not divide by zero
_NATIVE_MAX_ROWS = 32  # rows by default; with more, a GEMM on expanded tiles is faster
_BLOCKS = ((64, False), (32, False), (32, True), (16, True))  # outputs, and whether neighbours share a byte
_TILE_OUTPUTS = 512  # expanded at once, in two halves
_LOW_HALVES = 0x0F0F0F0F  # of four bytes
_UPPER_WORD = -(1 << 16)  # mask of the upper 16 bits


class Section(NamedTuple):
    """Outputs that are packed in blocks of one size."""

    start: int
    num_outputs: int
    block: int
    neighbours: bool  # two neighbours share a byte

    @property
    def stop(self) -> int:
        return self.start + self.num_outputs

    def halves(self, packed: Tensor) -> Tensor:
        """A view [..., 2, blocks, block / 2] of values [..., num_outputs] in packed order; in the order of the outputs."""
        lanes = self.block // 2
        if self.neighbours:
            return packed.unflatten(-1, (-1, lanes, 2)).movedim(-1, -3)
        return packed.unflatten(-1, (-1, 2, lanes)).transpose(-3, -2)


@lru_cache(maxsize=1)
def can_expand() -> bool:
    """Whether this build of torch packs int4 weights in a layout that is known here."""
    return _blocks_of_torch() is not None


@lru_cache(maxsize=1)
def _blocks_of_torch() -> tuple[int, bool] | None:
    """The entry of `_BLOCKS` that this build of torch uses; None if the layout is not known."""
    steps = torch.randint(0, 16, (80, 32), generator=torch.Generator().manual_seed(0))
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps.to(torch.int32), 1).view(80, 16)
    except (AttributeError, RuntimeError):
        return None
    for blocks in _BLOCKS:
        found = torch.empty(80, 32, dtype=torch.int64)
        for section in _sections(80, *blocks):
            of_blocks = packed[section.start : section.stop].view(-1, 32, section.block // 2)
            low, high = section.halves(torch.arange(80)[_span(section)])
            found[low] = (of_blocks & 15).transpose(1, 2).long()
            found[high] = (of_blocks >> 4).transpose(1, 2).long()
        if torch.equal(found, steps):
            return blocks
    return None


def _span(section: Section) -> slice:
    return slice(section.start, section.stop)


def _sections(num_outputs: int, block: int, neighbours: bool) -> list[Section]:
    whole = num_outputs // block * block
    sections = (Section(0, whole, block, neighbours), Section(whole, num_outputs - whole, num_outputs - whole, True))
    return [section for section in sections if section.num_outputs]


@lru_cache(maxsize=64)
def sections(num_outputs: int) -> list[Section]:
    """How the outputs are packed. Empty if the layout of this build of torch is not known."""
    blocks = _blocks_of_torch()
    return [] if blocks is None else _sections(num_outputs, *blocks)


def packed_order(num_outputs: int) -> Tensor:
    """The outputs in the order in which they are packed [num_outputs] int64."""
    order = torch.arange(num_outputs)
    for section in sections(num_outputs):
        outputs = torch.arange(section.start, section.stop).view(section.halves(order[_span(section)]).shape)
        section.halves(order[_span(section)]).copy_(outputs)
    return order


def in_order_of_outputs(y_sn: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a product [s,n] in packed order to `dtype` and the order of the outputs."""
    ordered = torch.empty(y_sn.shape, dtype=dtype)
    known = sections(y_sn.shape[1])
    for section in known:
        packed = section.halves(y_sn[:, _span(section)])
        ordered[:, _span(section)].unflatten(1, packed.shape[1:]).copy_(packed)
    return ordered if known else ordered.copy_(y_sn)


def multiply_expanded(x_sk: Tensor, packed: Tensor, scales_and_zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x W^T [s,n], computed in `dtype`. `packed` [n, k / 2] uint8, `scales_and_zeros` [k / 32, n, 2] bfloat16."""
    num_rows, num_outputs = x_sk.shape[0], packed.shape[0]
    x, y_sn = x_sk.to(dtype), x_sk.new_empty(num_rows, num_outputs)
    product = x.new_empty(0 if dtype == x_sk.dtype else num_rows * _TILE_OUTPUTS // 2)
    for start, tile_km in _tiles(packed, scales_and_zeros, dtype):
        part = y_sn[:, start : start + tile_km.shape[1]]
        multiply_into(part, x, tile_km, product)
    return y_sn


def _tiles(packed: Tensor, scales_and_zeros: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """The weights as tiles [k,m] of consecutive outputs, each with its first output. A tile is valid until the next one.

    A weight is (step - zero point) * scale. Few passes, over memory that is reused, so that it stays in a cache: the bytes
    are put side by side, halves are taken from four bytes at once, zero points subtracted from bytes, and only the conversion
    and the scales need a pass over floats.
    """
    num_inputs, most = packed.shape[1] * 2, _TILE_OUTPUTS // 2
    pairs_of_bytes = torch.empty(num_inputs * most, dtype=torch.uint8)
    steps_of_tile = torch.empty(num_inputs * most, dtype=torch.int8)
    floats_of_tile = torch.empty(num_inputs * most, dtype=dtype)
    for section in sections(packed.shape[0]):
        lanes = section.block // 2
        unit = torch.complex128 if lanes % 16 == 0 else torch.int64  # the largest elements that a copy can move
        blocks = packed[_span(section)].view(-1, num_inputs, lanes).view(unit)
        at_once = max(most // lanes, 1)
        for first in range(0, len(blocks), at_once):
            some = blocks[first : first + at_once]
            width, begin = len(some) * lanes, section.start + first * section.block
            size = num_inputs * width
            pairs = pairs_of_bytes[:size].view(num_inputs, width)
            pairs.view(unit).view(num_inputs, len(some), -1).copy_(some.transpose(0, 1))
            words, steps = pairs.view(torch.int32), steps_of_tile[:size].view(-1, INT4_GROUP_SIZE, width)
            tile = floats_of_tile[:size].view(num_inputs, width)
            scales, zero_points = _scales(scales_and_zeros[:, begin : begin + len(some) * section.block], section)
            for half in (0, 1):
                if half:
                    torch.bitwise_right_shift(words, 4, out=words)
                torch.bitwise_and(words, _LOW_HALVES, out=steps.view(num_inputs, width).view(torch.int32))
                steps.sub_(zero_points[half, :, None])
                tile.copy_(steps.view(num_inputs, width)).view(steps.shape).mul_(scales[half, :, None].to(dtype))
                yield section.start + (half * section.num_outputs // 2) + first * lanes, tile


def _scales(scales_and_zeros: Tensor, section: Section) -> tuple[Tensor, Tensor]:
    """Scales float32 and zero points int8 [2, k / 32, m] of a tile's halves; a zero is (8 - zero point) * scale."""
    pairs = section.halves(scales_and_zeros.view(torch.int32).squeeze(-1)).movedim(-3, 0).flatten(2)
    scales = (pairs << 16).view(torch.float32)
    zeros = (pairs & _UPPER_WORD).view(torch.float32)
    return scales, zeros.div_(scales).neg_().add_(8).to(torch.int8)


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
