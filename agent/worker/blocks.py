"""The arithmetic of one layer on one device, without communication.

T rows in all, s some of them, H hidden, a heads of this rank, d head_dim, w = a*d, c MLP columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own custom)
from torch import Tensor

from agent.worker.shard import EmbeddingShard, LayerShard, Norm
from hearth.geometry import Span

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class PackedRows:
    """The sequences of a step, packed without padding: sequence n has the rows `sequences[n]`."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each sequence
    sequences: tuple[Span, ...]

    @property
    def num_rows(self) -> int:
        return int(self.token_ids.shape[0])


def pack(token_ids: Sequence[int] | Tensor, cumulative_lengths: Sequence[int], device: torch.device) -> PackedRows:
    """`cumulative_lengths` is [0, len0, len0+len1, ...]."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    sequences = tuple(Span(a, b) for a, b in zip(cumulative_lengths[:-1], cumulative_lengths[1:], strict=True))
    positions = torch.cat([torch.arange(span.size) for span in sequences])
    return PackedRows(ids.to(device), positions.to(device), sequences)


def project_qkv(layer: LayerShard, x_sH: Tensor, out: Tensor) -> None:
    """Q, K and V of our heads for some rows: out [s,3w]."""
    torch.addmm(layer.qkv_bias, x_sH, layer.qkv_weight.t(), out=out)


def attention(q_sw: Tensor, k_Tw: Tensor, v_Tw: Tensor, head_dim: int, sequences: Sequence[Span], rows: Span) -> Tensor:
    """Bidirectional attention of the query rows `rows` of the step over all rows of their own sequence: [s,w]."""
    context_sw = torch.empty(q_sw.shape, dtype=q_sw.dtype, device=q_sw.device)
    if q_sw.shape[1] == 0:
        return context_sw
    for span in sequences:
        start, stop = max(span.start, rows.start), min(span.stop, rows.stop)
        if start >= stop:
            continue
        local = slice(start - rows.start, stop - rows.start)
        q, k, v = (
            x.unflatten(-1, (-1, head_dim)).transpose(0, 1)[None]
            for x in (q_sw[local], k_Tw[slice(*span)], v_Tw[slice(*span)])
        )
        context_sw[local] = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
    return context_sw


def connective(x_sH: Tensor, y_sH: Tensor, bias: Tensor, norm: Norm, eps: float) -> Tensor:
    """Post-LN: the row-parallel bias (added here, once), the residual and LayerNorm, on rows of our own."""
    return F.layer_norm(x_sH + (y_sH + bias), (x_sH.shape[-1],), norm.weight, norm.bias, eps)


def finish_embedding(embedding: EmbeddingShard, word_sH: Tensor, positions_s: Tensor, eps: float) -> Tensor:
    """Add position and type embeddings to the word rows and normalise."""
    x_sH = word_sH
    if embedding.token_type is not None:
        x_sH = x_sH + embedding.token_type[0]
    x_sH = x_sH + embedding.position[positions_s]
    return F.layer_norm(x_sH, (x_sH.shape[-1],), embedding.norm.weight, embedding.norm.bias, eps)
