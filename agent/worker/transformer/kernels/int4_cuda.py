"""int4 weights on a CUDA device: torch's kernel for few rows, and an expansion of the same memory for many.

torch packs blocks of 8 outputs and 32 inputs, as the registers of tensor cores hold them: 16 bytes for each output, two inputs
in a byte. The order of the inputs is internal to torch; it is found by packing a block whose weights are their numbers.

The expansion looks up the two steps of each byte in a table, and scales them. It leaves the inputs in the order of the bytes;
the activations' columns, which are fewer, are brought into it instead.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import add_bias, multiply_into
from agent.worker.transformer.kernels.int4 import INT4_GROUP_SIZE, Int4Matrix
from hearth.plan.model_spec import INT4_MIN_CAPABILITY

_BLOCK_OUTPUTS = 8
_INNER_TILES = 2  # groups of 16 inputs in a block: the least that torch packs, so that any multiple of 32 inputs fits
_NATIVE_MAX_ROWS = 128  # rows by default; with more, torch's kernel takes longer than an expansion and a GEMM
_TILE_WEIGHTS = 16 << 20  # expanded at once, in 6 bytes each with what the expansion needs
_TILE_BLOCKS = 16  # a tile is a multiple of 128 outputs, for which GEMMs are fast


class _Packing(NamedTuple):
    """How this build of torch packs."""

    takes_bytes: bool  # it takes two steps in a byte (torch 2.5 and later), otherwise one in an int32
    table: Tensor  # of each byte, its low and its high step, each less 8, in bfloat16 [256] int32
    order: Tensor | None  # the inputs of a group as they are expanded [32]; None: not known, so that none are


class Int4CudaMatrix(Int4Matrix):
    """As `Int4Matrix`, in torch's packed layout for CUDA [n / 8, k / 32, 32] int32. Requires `has_int4_kernel`."""

    kernels = ("torch", "expand-bfloat16")

    def __init__(self, num_outputs: int, num_inputs: int, device: torch.device) -> None:
        super().__init__(num_outputs, num_inputs, device)
        self._packed = self._packed.view(torch.int32).view(-1, num_inputs // INT4_GROUP_SIZE, 32)

    @staticmethod
    def supports(num_outputs: int, num_inputs: int) -> bool:
        fits = num_outputs % _BLOCK_OUTPUTS == 0 and num_inputs % INT4_GROUP_SIZE == 0
        return fits and num_outputs * num_inputs > 0

    def _pack(self, steps_nk: Tensor, scales_and_zeros: Tensor) -> None:
        self._packed.copy_(_packed(steps_nk, _known_packing(self._device).takes_bytes).view(self._packed.shape))
        self._scales_and_zeros.copy_(scales_and_zeros)

    def default_kernel(self, rows: int) -> str:
        can_expand = _known_packing(self._device).order is not None
        return "expand-bfloat16" if rows > _NATIVE_MAX_ROWS and can_expand else "torch"

    def product(self, kernel: str, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        packing = _known_packing(self._device)
        if not x_sk.shape[0]:
            y = x_sk.new_empty(0, self.shape[0])
        elif kernel == "expand-bfloat16" and packing.order is not None:
            y = self._multiply_expanded(x_sk, packing.table, packing.order)
        else:
            y = torch.ops.aten._weight_int4pack_mm(
                x_sk.bfloat16(), self._packed[..., None], INT4_GROUP_SIZE, self._scales_and_zeros
            ).to(x_sk.dtype)
        return add_bias(y, bias_n, out)

    def _multiply_expanded(self, x_sk: Tensor, table: Tensor, order: Tensor) -> Tensor:
        num_outputs, num_inputs = self.shape
        num_groups = num_inputs // INT4_GROUP_SIZE
        x = x_sk.bfloat16().unflatten(1, (num_groups, -1)).index_select(2, order).flatten(1)
        y_sn = x_sk.new_empty(x_sk.shape[0], num_outputs)
        num_blocks = _TILE_WEIGHTS // (num_inputs * _BLOCK_OUTPUTS) // _TILE_BLOCKS * _TILE_BLOCKS
        num_blocks = min(max(num_blocks, _TILE_BLOCKS), len(self._packed))
        product = x.new_empty(0 if x.dtype == y_sn.dtype else x.shape[0] * num_blocks * _BLOCK_OUTPUTS)
        for start in range(0, len(self._packed), num_blocks):
            outputs = slice(start * _BLOCK_OUTPUTS, (start + num_blocks) * _BLOCK_OUTPUTS)
            tile_mk = _expanded(self._packed[start : start + num_blocks], self._scales_and_zeros[:, outputs], table)
            multiply_into(y_sn[:, outputs], x, tile_mk.t(), product)
        return y_sn


@lru_cache(maxsize=8)
def has_int4_kernel(device: torch.device) -> bool:
    """Whether torch has a kernel for int4 weights on this device, which is not a CPU."""
    return _packing(device) is not None


def _expanded(words: Tensor, scales_and_zeros: Tensor, table: Tensor) -> Tensor:
    """The weights [m,k] bfloat16 of blocks of words, the inputs of a group in their order: (step - 8) * scale + zero."""
    num_blocks, num_groups, _ = words.shape
    scales, zeros = scales_and_zeros.unflatten(1, (num_blocks, -1)).permute(3, 1, 2, 0)[
        ..., None
    ]  # [blocks, 8, groups, 1]
    tile = torch.empty(
        num_blocks, _BLOCK_OUTPUTS, num_groups, INT4_GROUP_SIZE, dtype=torch.bfloat16, device=words.device
    )
    torch.addcmul(zeros, _steps(words, table).transpose(1, 2), scales, out=tile)  # rounded once, as by torch's kernel
    return tile.view(num_blocks * _BLOCK_OUTPUTS, -1)


def _steps(words: Tensor, table: Tensor) -> Tensor:
    """The steps less 8, in bfloat16 [blocks, groups, 8 outputs, 32 inputs], of words [blocks, groups, 32] int32."""
    pairs = table.index_select(0, words.view(torch.uint8).flatten().to(torch.int32))
    return pairs.view(torch.bfloat16).view(*words.shape[:2], _BLOCK_OUTPUTS, INT4_GROUP_SIZE)


def _packed(steps_nk: Tensor, as_bytes: bool) -> Tensor:
    """Steps from 0 to 15 in torch's layout; `as_bytes` as in `_Packing`."""
    whole = steps_nk.to(torch.int32)
    taken = (whole[:, ::2] << 4 | whole[:, 1::2]).to(torch.uint8) if as_bytes else whole
    return torch.ops.aten._convert_weight_to_int4pack(taken, _INNER_TILES)


def _known_packing(device: torch.device) -> _Packing:
    packing = _packing(device)
    assert packing is not None  # otherwise there is no matrix
    return packing


@lru_cache(maxsize=8)
def _packing(device: torch.device) -> _Packing | None:
    """How torch packs on this device; None if it has no kernel for it."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) < INT4_MIN_CAPABILITY:
        return None
    both = torch.arange(256, device=device)
    table = torch.stack([both % 16, both // 16], dim=1).sub_(8).bfloat16().view(torch.int32).squeeze(1)
    for takes_bytes in (True, False):
        try:
            return _Packing(takes_bytes, table, _order_of_inputs(device, takes_bytes, table))
        except (
            AttributeError,
            NotImplementedError,
            RuntimeError,
        ):  # no kernel in this build, or one of another interface
            continue
    return None


def _order_of_inputs(device: torch.device, takes_bytes: bool, table: Tensor) -> Tensor | None:
    """See `_Packing.order`. None if outputs and inputs of a block are not where they are expected."""
    inputs = torch.arange(INT4_GROUP_SIZE, device=device).expand(_BLOCK_OUTPUTS, -1)
    outputs = torch.arange(_BLOCK_OUTPUTS, device=device)[:, None].expand(-1, INT4_GROUP_SIZE)
    low, high, found_outputs = (
        _steps(_packed(steps, takes_bytes).view(1, 1, -1), table)[0, 0].long() + 8
        for steps in (inputs % 16, inputs // 16, outputs)
    )
    order = low + 16 * high
    known = torch.equal(found_outputs, outputs) and torch.equal(order, order[:1].expand_as(order))
    return order[0] if known and torch.equal(order[0].sort().values, inputs[0]) else None
