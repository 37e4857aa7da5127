"""Products of many rows with int4 weights in torch's packed layout: expand a tile to floats, then multiply by a GEMM.

torch packs outputs in blocks [k, block / 2] of bytes. A byte of a whole block holds output j in its low half and output
j + block / 2 in its high half (vectorised builds); a byte of the last, smaller block holds two neighbours. The layout is
internal to torch, so `can_expand` compares it with a matrix that torch has packed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_GROUP = 32  # inputs that share a scale
_BLOCKS = (64, 32)  # outputs in a block: AVX512, AVX2
_TILE_OUTPUTS = 512  # expanded at once: 2 MiB in bfloat16 for 2048 inputs, about an L2 cache


@lru_cache(maxsize=1)
def can_expand() -> bool:
    """Whether this build of torch packs int4 weights in a layout that is known here."""
    return _block_size() > 0


@lru_cache(maxsize=1)
def _block_size() -> int:
    """Outputs in a whole block; 0 if the layout is not known."""
    steps = torch.randint(0, 16, (80, 32), generator=torch.Generator().manual_seed(0))
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps.to(torch.int32), 1).view(80, 16)
    except (AttributeError, RuntimeError):
        return 0
    for block in _BLOCKS:
        whole = 80 // block * block
        parts = [
            _steps_of_blocks(packed[:whole], whole // block, block, torch.int8),
            _steps_of_rest(packed[whole:], 80 - whole, torch.int8),
        ]
        if torch.equal(torch.cat(parts, dim=1).t() + 8, steps.to(torch.int8)):
            return block
    return 0


def _steps_of_blocks(packed: Tensor, num_blocks: int, block: int, dtype: torch.dtype) -> Tensor:
    """The steps less 8 of whole blocks [k, num_blocks * block]."""
    signed = packed.view(num_blocks, -1, block // 2).transpose(0, 1).contiguous() ^ 0x88  # [k, blocks, block / 2]
    steps = torch.empty(*signed.shape[:2], 2, block // 2, dtype=dtype)
    steps[:, :, 0], steps[:, :, 1] = _signed_halves(signed)
    return steps.view(signed.shape[0], -1)


def _steps_of_rest(packed: Tensor, num_outputs: int, dtype: torch.dtype) -> Tensor:
    """The same for a last block of fewer outputs [k, num_outputs]."""
    return torch.stack(_signed_halves(packed.reshape(-1, num_outputs // 2) ^ 0x88), dim=2).flatten(1).to(dtype)


def _signed_halves(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper four bits of each byte as int8 in two's complement."""
    return (pairs << 4).view(torch.int8) >> 4, pairs.view(torch.int8) >> 4


def multiply_expanded(x_sk: Tensor, packed: Tensor, scales_and_zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x W^T [s,n], computed in `dtype`.

    `packed` [n, k / 2] uint8, `scales_and_zeros` [k / 32, n, 2]. A weight is (step - 8) * scale + zero; the zeros multiply
    sums of 32 activations, so that they cost a GEMM of a 32nd of the size instead of a pass over the tile.
    """
    num_outputs, num_inputs = packed.shape[0], packed.shape[1] * 2
    block, x = _block_size(), x_sk.to(dtype)
    sums = x_sk.unflatten(1, (-1, _GROUP)).sum(dim=2)
    y_sn = x_sk.new_empty(x_sk.shape[0], num_outputs)
    whole = num_outputs // block * block
    borders = [*range(0, whole, _TILE_OUTPUTS), whole]
    if whole < num_outputs:
        borders.append(num_outputs)
    for start, stop in zip(borders, borders[1:], strict=False):
        if start == whole:
            steps = _steps_of_rest(packed[start:stop], stop - start, dtype)
        else:
            steps = _steps_of_blocks(packed[start:stop], (stop - start) // block, block, dtype)
        scales, zeros = (
            scales_and_zeros[:, start:stop].permute(2, 0, 1).contiguous()
        )  # strided, `mul_` takes 5 x as long
        tile = steps.view(-1, _GROUP, stop - start).mul_(scales.to(dtype)[:, None])
        torch.mm(sums, zeros.to(sums.dtype), out=y_sn[:, start:stop]).add_(x @ tile.view(num_inputs, -1))
    return y_sn
