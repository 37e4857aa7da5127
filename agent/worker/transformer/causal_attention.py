"""Causal attention over a KV cache, block by block with an online softmax: no scores or masks of the context's size.

A query sees three ranges of keys: all rows before its block of queries, its own block up to itself, and with a sliding window
only the newest part of the oldest ones. Each range is a call of a fused kernel that returns the logarithm of its softmax's
denominator too, by which results are merged (Flash Attention, arXiv:2205.14135, section 3.1).

Shapes: g KV heads, e query heads of each, s queries, n keys, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hearth.plan.geometry import Span

KeysAndValues = Callable[[Span], Sequence[tuple[Tensor, Tensor]]]  # of these positions, as pairs of [g,n,d]

# Keys of one call: the rows of a KV cache that are converted or gathered at a time. With 512 queries and 15,872 keys, all at
# once take 223 ms, 1024 at a time 227 ms and 256 at a time 255 ms (one core of a Xeon, 16 query heads, d = 64).
_KEYS_PER_CALL = 1024
_QUERIES_PER_WINDOW = 256  # queries of one call with a sliding window, whose keys differ


def causal_attention(q_gesd: Tensor, keys_and_values: KeysAndValues, first: int, window: int | None) -> Tensor:
    """Attention of queries at the positions from `first` on to these and all earlier ones: [g,e,s,d].

    With a sliding window, to the last `window` of these.
    """
    num_queries = q_gesd.shape[2]
    if num_queries == 1:
        oldest = 0 if window is None else max(first - window + 1, 0)
        return _attention_of_one_row(q_gesd, keys_and_values(Span(oldest, first + 1)))
    if window is None or window >= first + num_queries:
        return _attention_of_block(q_gesd, keys_and_values, first, first + num_queries)
    size = max(min(_QUERIES_PER_WINDOW, window - 1), 1)
    blocks = [
        _attention_of_block(q_gesd[:, :, start : start + size], keys_and_values, first + start, window)
        for start in range(0, num_queries, size)
    ]
    return torch.cat(blocks, dim=2)


def _attention_of_one_row(q_ge1d: Tensor, pieces: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of one query, which sees all keys: [g,e,1,d]. Pieces of the KV cache are read where they are.

    With keys in bfloat16, the query and the softmax's numerators are rounded to bfloat16 too; sums are in float32.
    """
    if pieces[0][0].dtype == torch.bfloat16:
        q_g1ed = q_ge1d.transpose(1, 2).bfloat16()  # as rows of one head, which read its keys and values once
        (context, lse), *others = (_fused(q_g1ed, k, v) for k, v in pieces)
        context = context.float()
        for other, other_lse in others:
            _merge(context, lse, other.float(), other_lse)
        return context.transpose(1, 2)
    q = q_ge1d.squeeze(2) * q_ge1d.shape[-1] ** -0.5
    weights = torch.cat([q @ k.transpose(1, 2) for k, _ in pieces], dim=2).softmax(dim=2)
    parts = weights.split([k.shape[1] for k, _ in pieces], dim=2)
    context = parts[0] @ pieces[0][1]
    for part, (_, v) in zip(parts[1:], pieces[1:], strict=True):
        context.baddbmm_(part, v)
    return context.unsqueeze(2)


def _attention_of_block(q_gesd: Tensor, keys_and_values: KeysAndValues, first: int, window: int) -> Tensor:
    """Attention of a block of queries: fewer than `window`, unless the window holds all positions: [g,e,s,d]."""
    g, e, s, d = q_gesd.shape
    context_gesd, lse_ges = _fused(q_gesd, *_joined(keys_and_values(Span(first, first + s))), causal=True)
    oldest, seen_by_all = (max(first + query - window + 1, 0) for query in (0, s - 1))
    folded = q_gesd.reshape(g, 1, e * s, d)  # without a mask, all queries of a KV head are rows of one head
    for start in range(seen_by_all, first, _KEYS_PER_CALL):
        keys = Span(start, min(start + _KEYS_PER_CALL, first))
        other, other_lse = _fused(folded, *_joined(keys_and_values(keys)))
        _merge(context_gesd, lse_ges, other.reshape(g, e, s, d), other_lse.reshape(g, e, s))
    if oldest < seen_by_all:
        # The first query sees all of these keys, each later one misses one more: causal attention in reverse order.
        k, v = (x.flip(1) for x in _joined(keys_and_values(Span(oldest, seen_by_all))))
        reverse, reverse_lse = _fused(q_gesd[:, :, :-1].flip(2), k, v, causal=True)
        _merge(context_gesd[:, :, :-1], lse_ges[:, :, :-1], reverse.flip(2), reverse_lse.flip(2))
    return context_gesd


def _joined(pieces: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Keys and values [g,n,d] of pieces that follow each other, in float32."""
    k, v = pieces[0] if len(pieces) == 1 else (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
    return k.float(), v.float()


def _fused(q_gesd: Tensor, k_gnd: Tensor, v_gnd: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Fused attention: the context [g,e,s,d], and the log-sum-exp of each query's scores [g,e,s].

    `causal`: query i sees the keys up to i. `scaled_dot_product_attention` calls the same kernels, and drops the log-sum-exp.
    """
    k, v = k_gnd[:, None], v_gnd[:, None]
    if q_gesd.shape[1] > 1:
        k, v = (x.expand(-1, q_gesd.shape[1], -1, -1) for x in (k, v))
    if q_gesd.device.type == "cpu":
        context, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_gesd, k, v, is_causal=causal)
        return context, lse
    context, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_gesd, k, v, None, compute_log_sumexp=True, is_causal=causal
    )
    return context, lse[..., : q_gesd.shape[2]]  # padded


def _merge(context: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge the results of the same queries with other keys, in place."""
    context.lerp_(other, torch.sigmoid(other_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)
