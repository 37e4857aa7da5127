"""The computations of one layer on one device, without communication.

Shapes: T rows of the step, s some of them, H hidden size, a heads of this rank, d head_dim, w = a*d, k KV width of this rank,
q = w + 2k, c MLP columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own custom)
from torch import Tensor

from agent.worker.transformer.causal_attention import causal_attention
from agent.worker.transformer.paged_cache import SequenceCache
from agent.worker.transformer.shard import EmbeddingShard, LayerShard, Norm, Shard
from hearth.plan.geometry import Span
from hearth.plan.model_spec import ModelSpec, RotarySpec, rope_frequencies

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True)
class PackedRows:
    """The sequences of a step, packed without padding: sequence n has the rows `sequences[n]`.

    Its first row has the position `starts[n]`; the keys and values of earlier rows are in `caches[n]` (None: no KV cache).
    `rope_tables` are cosines and sines [T, rotary_dim / 2]; None: learned positions.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    sequences: tuple[Span, ...]
    starts: tuple[int, ...]
    caches: tuple[SequenceCache | None, ...]
    rope_tables: tuple[Tensor, Tensor] | None

    @property
    def num_rows(self) -> int:
        return int(self.token_ids.shape[0])

    def slice_rows(self, span: Span) -> PackedRows:
        """Some rows of the step, as a micro-batch. Earlier rows must be in the KV caches when attention is computed."""
        parts = [
            (n, start, stop)
            for n, sequence in enumerate(self.sequences)
            if (start := max(sequence.start, span.start)) < (stop := min(sequence.stop, span.stop))
        ]
        rows = slice(*span)
        return PackedRows(
            self.token_ids[rows],
            self.positions[rows],
            tuple(Span(start - span.start, stop - span.start) for _, start, stop in parts),
            tuple(self.starts[n] + start - self.sequences[n].start for n, start, _ in parts),
            tuple(self.caches[n] for n, _, _ in parts),
            None if self.rope_tables is None else (self.rope_tables[0][rows], self.rope_tables[1][rows]),
        )


def pack_rows(
    spec: ModelSpec,
    token_ids: Tensor,
    sequences: Sequence[Span],
    caches: Sequence[SequenceCache | None],
    device: torch.device,
) -> PackedRows:
    """Pack the rows of a step. `token_ids` [T] int64 are those of all sequences, concatenated."""
    starts = tuple(cache.num_rows if cache is not None else 0 for cache in caches)
    positions = torch.cat(
        [torch.arange(start, start + span.size) for start, span in zip(starts, sequences, strict=True)]
    )
    rope_tables = None
    if spec.rotary is not None:
        tables = [
            _rope_tables(spec, spec.rotary, positions[slice(*span)], start + span.size)
            for start, span in zip(starts, sequences, strict=True)
        ]
        cosines, sines = (torch.cat(parts).to(device) for parts in zip(*tables, strict=True))
        rope_tables = cosines, sines
    return PackedRows(token_ids.to(device), positions.to(device), tuple(sequences), starts, tuple(caches), rope_tables)


def _rope_tables(spec: ModelSpec, rotary: RotarySpec, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
    by_length = rotary.kind in ("dynamic", "longrope")
    inverse, scale = _rope_frequencies(rotary, spec.head_dim, spec.max_positions, length if by_length else 0)
    angles = positions[:, None].float() * inverse
    return angles.cos() * scale, angles.sin() * scale


@lru_cache(maxsize=1024)
def _rope_frequencies(rotary: RotarySpec, head_dim: int, max_positions: int, length: int) -> tuple[Tensor, float]:
    """As `rotary.rope_frequencies`, cached, since every step needs them."""
    rope = rope_frequencies(rotary, head_dim, max_positions, length)
    return torch.tensor(rope.inverse, dtype=torch.float32), rope.scale


# ---- norms and residuals ---------------------------------------------------------------------------------------------


def normalise(spec: ModelSpec, x_sH: Tensor, norm: Norm) -> Tensor:
    """LayerNorm, or RMS norm if the norm has no bias, over the last dimension."""
    eps = spec.norm_eps
    if norm.bias is None and x_sH.shape[0] == 1 and x_sH.dim() == 2 and x_sH.is_cpu:
        # A token's: torch's norm consists of nine kernels, whose calls take most of its time.
        scale = (float(torch.linalg.vector_norm(x_sH)) ** 2 / x_sH.shape[1] + eps) ** -0.5
        return (x_sH * norm.weight).mul_(scale)
    if norm.bias is None:
        return F.rms_norm(x_sH, (x_sH.shape[-1],), norm.weight, eps)
    return F.layer_norm(x_sH, (x_sH.shape[-1],), norm.weight, norm.bias, eps)


class Connective(NamedTuple):
    """What surrounds attention or the MLP: names of a norm, and of the row-parallel matrix whose bias is added."""

    norm: str
    matrix: str


ATTENTION, MLP = Connective("norm1", "o"), Connective("norm2", "down")


def pre_norm(spec: ModelSpec, layer: LayerShard, around: Connective, x_sH: Tensor) -> Tensor:
    """Pre-norm: the input of attention or MLP. With post-norm, the rows are returned unchanged."""
    return normalise(spec, x_sH, layer.norms[around.norm]) if spec.norm_place == "pre" else x_sH


def add_residual(spec: ModelSpec, layer: LayerShard, around: Connective, x_sH: Tensor, y_sH: Tensor) -> Tensor:
    """The connective: add the row-parallel bias (here, so that it is added once) and the residual; apply post-norm."""
    bias = layer.biases.get(around.matrix)
    x_sH = x_sH + (y_sH if bias is None else y_sH + bias)
    return normalise(spec, x_sH, layer.norms[around.norm]) if spec.norm_place == "post" else x_sH


# ---- attention ---------------------------------------------------------------------------------------------------------


def project_qkv(
    spec: ModelSpec, layer: LayerShard, block: int, x_sH: Tensor, rows: PackedRows, span: Span, out: Tensor
) -> None:
    """Compute Q, K and V of one block of heads for the rows `span` of the step into `out` [s,q], with RoPE applied."""
    heads = layer.qkv_blocks[block].size
    part = layer.qkv_rows(spec, block)
    bias = layer.biases.get("qkv")
    layer.matrices["qkv"].rows(part).matmul(x_sH, None if bias is None else bias[part], out)
    q_width, kv_width = spec.q_width(heads), spec.kv_width(heads)
    if spec.qk_norm:
        for name, part in (("q_norm", out[:, :q_width]), ("k_norm", out[:, q_width : q_width + kv_width])):
            by_head = part.unflatten(-1, (-1, spec.head_dim))
            by_head.copy_(normalise(spec, by_head, layer.norms[name]))
    if rows.rope_tables is not None:
        cosines, sines = rows.rope_tables
        if span.size != rows.num_rows:
            cosines, sines = cosines[slice(*span)], sines[slice(*span)]
        apply_rope(out[:, : q_width + kv_width].unflatten(-1, (-1, spec.head_dim)), cosines[:, None], sines[:, None])


def apply_rope(x_sad: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Apply RoPE in place: dimension i is rotated together with dimension i + half."""
    half = cosines.shape[-1]
    first, second = x_sad[..., :half], x_sad[..., half : 2 * half]
    rotated = (first * cosines).addcmul_(second, sines, value=-1)
    second.mul_(cosines).addcmul_(first, sines)
    first.copy_(rotated)


def split_qkv(spec: ModelSpec, heads: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split `qkv` into views of Q [s,w], K and V [s,k]."""
    q, k, v = qkv.split([spec.q_width(heads), spec.kv_width(heads), spec.kv_width(heads)], dim=1)
    return q, k, v


def store_kv(spec: ModelSpec, rows: PackedRows, layer: int, k_Tk: Tensor, v_Tk: Tensor) -> None:
    """Store the keys and values of all rows of the step in their sequences' KV caches."""
    k, v = (x.unflatten(-1, (-1, spec.head_dim)) for x in (k_Tk, v_Tk))
    for span, start, cache in zip(rows.sequences, rows.starts, rows.caches, strict=True):
        if cache is not None:
            cache.store(layer, start, k[slice(*span)], v[slice(*span)])


def attention(
    spec: ModelSpec, index: int, q_sw: Tensor, k_Tk: Tensor, v_Tk: Tensor, rows: PackedRows, span: Span
) -> Tensor:
    """Attention of the query rows `span` of the step over their own sequences: [s,w].

    An encoder's rows attend to all rows of their sequence. A decoder's rows attend to earlier rows, including those in the
    KV cache, and themselves; with a sliding window, to the last `window` of these.
    """
    if q_sw.shape[1] == 0:
        return torch.empty_like(q_sw)
    if len(rows.sequences) == 1:
        return _attention_of_sequence(spec, index, q_sw, k_Tk, v_Tk, rows, 0, span.start)
    context_sw = torch.empty(q_sw.shape, dtype=q_sw.dtype, device=q_sw.device)
    for n, sequence in enumerate(rows.sequences):
        start, stop = max(sequence.start, span.start), min(sequence.stop, span.stop)
        if start >= stop:
            continue
        local = slice(start - span.start, stop - span.start)
        context_sw[local] = _attention_of_sequence(spec, index, q_sw[local], k_Tk, v_Tk, rows, n, start)
    return context_sw


def _attention_of_sequence(
    spec: ModelSpec, index: int, q_sw: Tensor, k_Tk: Tensor, v_Tk: Tensor, rows: PackedRows, n: int, start: int
) -> Tensor:
    """Attention of rows of sequence `n`, which begin with row `start` of the step: [s,w]."""
    q = q_sw.view(q_sw.shape[0], -1, spec.group_size, spec.head_dim).permute(1, 2, 0, 3)
    if spec.causal:
        keys_and_values = partial(_keys_and_values, spec, index, n, k_Tk, v_Tk, rows)
        first = rows.starts[n] + start - rows.sequences[n].start
        attended = causal_attention(q, keys_and_values, first, spec.window(index))
    else:
        ((k, v),) = _keys_and_values(spec, index, n, k_Tk, v_Tk, rows, Span(0, rows.sequences[n].size))
        attended = _grouped_query_attention(q, k, v)
    return attended.permute(2, 0, 1, 3).flatten(1)


def attention_block(
    spec: ModelSpec,
    index: int,
    layer: LayerShard,
    x_TH: Tensor,
    rows: PackedRows,
    on_kv_stored: Callable[[int], None] = lambda layer: None,
) -> Tensor:
    """The attention block for the layer's heads and all rows of the step: a partial sum [T,H].

    `on_kv_stored(index)` is called once keys and values are in the KV caches.
    """
    all_rows, heads = Span(0, rows.num_rows), layer.qkv_blocks[0].size
    qkv = x_TH.new_empty(rows.num_rows, spec.qkv_width(heads))
    project_qkv(spec, layer, 0, x_TH, rows, all_rows, qkv)
    q_Tw, k_Tk, v_Tk = split_qkv(spec, heads, qkv)
    store_kv(spec, rows, index, k_Tk, v_Tk)
    on_kv_stored(index)
    return layer.matrices["o"].matmul(attention(spec, index, q_Tw, k_Tk, v_Tk, rows, all_rows))


def _keys_and_values(
    spec: ModelSpec, index: int, n: int, k_Tk: Tensor, v_Tk: Tensor, rows: PackedRows, wanted: Span
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of some positions of sequence n, from its KV cache if it has one: pieces [kv heads, length, d]."""
    cache, sequence = rows.caches[n], slice(*rows.sequences[n])
    if cache is not None:
        return cache.keys_and_values(index, wanted)
    k, v = (x[sequence][slice(*wanted)].unflatten(-1, (-1, spec.head_dim)).transpose(0, 1) for x in (k_Tk, v_Tk))
    return [(k, v)]


def _grouped_query_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grouped-query attention. Each KV head is expanded to its group of query heads without a copy."""
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


# ---- MLP, whole layer, embedding and head ---------------------------------------------------------------------------------


def mlp_up(spec: ModelSpec, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """The first half of the MLP, up to the activation: [s,c]."""
    act = ACTIVATIONS[spec.activation]
    up_sc = layer.matrices["up"].matmul(x_sH, layer.biases.get("up"))
    if not spec.gated:
        return up_sc.copy_(act(up_sc))
    return act(layer.matrices["gate"].matmul(x_sH, layer.biases.get("gate"))).mul_(up_sc)


def mlp_block(spec: ModelSpec, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """The MLP for the layer's columns: a partial sum [s,H]."""
    return layer.matrices["down"].matmul(mlp_up(spec, layer, x_sH))


def whole_layer(spec: ModelSpec, index: int, layer: LayerShard, x_TH: Tensor, rows: PackedRows) -> Tensor:
    """One layer of which this rank holds all heads and columns: [T,H]."""
    y_TH = attention_block(spec, index, layer, pre_norm(spec, layer, ATTENTION, x_TH), rows)
    x_TH = add_residual(spec, layer, ATTENTION, x_TH, y_TH)
    y_TH = mlp_block(spec, layer, pre_norm(spec, layer, MLP, x_TH))
    return add_residual(spec, layer, MLP, x_TH, y_TH)


def finish_embedding(spec: ModelSpec, embedding: EmbeddingShard, word_sH: Tensor, positions_s: Tensor) -> Tensor:
    """Add position and type embeddings to the word embeddings; for an encoder, also normalise."""
    x_sH = word_sH
    if embedding.token_type is not None:
        x_sH = x_sH + embedding.token_type[0]
    if embedding.position is not None:
        x_sH = x_sH + embedding.position[positions_s + spec.position_offset]
    return x_sH if spec.causal else normalise(spec, x_sH, embedding.norm)


def logits(shard: Shard, hidden_NH: Tensor) -> Tensor:
    """The logits of this rank's vocabulary rows, for rows after the final norm: [N,V]."""
    assert shard.embedding.head is not None
    return shard.embedding.head.matmul(hidden_NH)
