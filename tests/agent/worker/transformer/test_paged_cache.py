"""A paged KV cache returns the rows that were stored, however its blocks are scattered; attention is the same as unpaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest

from hearth.errors import StepFailed, UnsupportedKvCache
from hearth.plan.geometry import Span
from hearth.plan.kept_caches import CacheBlock
from hearth.plan.model_spec import KvFormat
from hearth.plan.transformer import KV_BLOCK_TOKENS
from hearth.wire.messages import NewSequence, Sampling

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.plans import LLAMA_1B  # noqa: E402

from agent.worker.transformer import blocks as compute  # noqa: E402 (needs torch)
from agent.worker.transformer import causal_attention  # noqa: E402
from agent.worker.transformer.paged_cache import (  # noqa: E402
    PagedRows,
    SequenceCache,
    check_format,
    from_format,
    stored_row,
    to_format,
)

PART = CacheBlock(Span(1, 3), Span(0, 2))  # layers and KV heads
SPEC = LLAMA_1B.model_copy(update={"num_heads": 8, "num_kv_heads": 2, "head_dim": 8})
ADJACENT, TWO_RUNS, SCATTERED = range(6), (7, 8, 9, 1, 2, 3), (5, 0, 9, 2, 7, 3)


def filled(blocks: Sequence[int], length: int, kind: KvFormat = "float32") -> tuple[SequenceCache, torch.Tensor]:
    """A cache with `length` random rows, and these rows."""
    memory = PagedRows(SPEC.model_copy(update={"kv_cache": kind}), PART, 10, torch.device("cpu"))
    memory.values.fill_(torch.nan if kind == "float32" else 255)
    cache = SequenceCache(memory, NewSequence(blocks=tuple(blocks[:2]), num_prompt_tokens=1, sampling=Sampling()))
    cache.add_blocks(blocks[2:])
    values = torch.randn(2, 2, 2, length, SPEC.head_dim, generator=torch.Generator().manual_seed(3))
    cache.extend(range(length))
    for start, stop in ((0, 5), (5, 40), (40, length)):  # not on the borders of blocks
        for layer in PART.layers.start, PART.layers.start + 1:
            k, v = values[layer - 1, :, :, start:stop].transpose(1, 2)
            cache.store(layer, start, k, v)
    cache.advance()
    return cache, values


@pytest.mark.parametrize("kind", get_args(KvFormat))
def test_cpu_computes_with_each_format(kind: KvFormat) -> None:
    check_format(SPEC.model_copy(update={"kv_cache": kind}), torch.device("cpu"))


def test_format_that_the_device_cannot_compute_with_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> None:
        if k.dtype == torch.bfloat16:  # as on a GPU of compute capability 7.5
            raise RuntimeError("Expected query, key and value to all be of dtype: {Half, Float}\nmore")

    monkeypatch.setattr(causal_attention, "_attention_of_one_row", lambda q, pieces: unsupported(q, *pieces[0]))
    with pytest.raises(
        UnsupportedKvCache, match=r"in bfloat16 on its cpu device: Expected.*--kv-cache float32"
    ) as error:
        check_format(SPEC.model_copy(update={"kv_cache": "bfloat16"}), torch.device("cpu"))
    assert "more" not in str(error.value)


@pytest.mark.parametrize("blocks", [ADJACENT, TWO_RUNS, SCATTERED], ids=str)
def test_rows_are_where_they_were_stored(blocks: Sequence[int]) -> None:
    cache, values = filled(blocks, 90)
    for rows in (Span(0, 90), Span(15, 17), Span(16, 48), Span(89, 90)):
        pieces = cache.keys_and_values(2, rows)
        for index, parts in enumerate(zip(*pieces, strict=True)):
            assert torch.equal(torch.cat(parts, dim=1), values[1, index, :, slice(*rows)])
        part = CacheBlock(Span(2, 3), Span(1, 2))
        assert torch.equal(cache.rows(part, rows), values[1:2, :, 1:2, slice(*rows)])
        cache.fill(part, rows, cache.rows(part, rows) + 1)
        values[1:2, :, 1:2, slice(*rows)] += 1


def test_drafted_rows_are_settled_by_the_next_step() -> None:
    """Only settled rows are copied to other ranks, or kept for the next plan."""
    cache, _ = filled(ADJACENT, 80)
    cache.extend([7, 8, 9, 10], num_drafted=3)
    assert (cache.num_rows, cache.num_settled_rows, len(cache.settled_tokens)) == (80, 80, 81)
    cache.advance()
    assert (cache.num_rows, cache.num_settled_rows) == (84, 81)
    with pytest.raises(StepFailed, match="4 of 3 drafted tokens"):
        cache.reject(4)
    cache.reject(2)
    cache.extend([11])
    assert cache.tokens[80:] == cache.settled_tokens[80:] == [7, 8, 11]
    assert (cache.num_rows, cache.num_settled_rows) == (82, 82)


# Largest error of a context against keys and values in float32, which have values up to 4.
TOLERANCES: list[tuple[KvFormat, float]] = [("float32", 1e-5), ("bfloat16", 0.02), ("int8", 0.03)]


@pytest.mark.parametrize(("kind", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("num_queries", [1, 9])
@pytest.mark.parametrize("window", [None, 20])
def test_attention_over_scattered_blocks_equals_attention_over_adjacent_ones(
    num_queries: int, window: int | None, kind: KvFormat, tolerance: float
) -> None:
    spec = SPEC.model_copy(update={"causal": True, "sliding_window": window, "kv_cache": kind})
    q = torch.randn(num_queries, spec.q_width(8), generator=torch.Generator().manual_seed(5))
    found = []
    for blocks in (ADJACENT, TWO_RUNS, SCATTERED):
        cache, values = filled(blocks, 90, kind)
        cache.num_rows = 90 - num_queries
        packed = compute.pack_rows(
            spec.model_copy(update={"rotary": None}), torch.zeros(num_queries, dtype=torch.int64),
            [Span(0, num_queries)], [cache], torch.device("cpu"),
        )  # fmt: skip
        found.append(compute.attention(spec, 1, q, q, q, packed, Span(0, num_queries)))
    for head in range(8):
        k, v = values[0, :, head // 4]
        scores = q[:, head * 8 : (head + 1) * 8] @ k.T / 8**0.5
        distance = torch.arange(90 - num_queries, 90)[:, None] - torch.arange(90)
        scores[(distance < 0) | (distance >= (window or 90))] = -torch.inf
        for attended in found:
            torch.testing.assert_close(
                attended[:, head * 8 : (head + 1) * 8], scores.softmax(-1) @ v, atol=tolerance, rtol=0
            )


# Largest error, relative to the largest value of a row: half a unit in the last place.
FORMATS: list[tuple[KvFormat, int, float]] = [("float32", 32, 0.0), ("bfloat16", 16, 2**-8), ("int8", 12, 0.51 / 127)]


@pytest.mark.parametrize(("kind", "row_bytes", "error"), FORMATS)
def test_formats_take_their_bytes_and_keep_their_precision(kind: KvFormat, row_bytes: int, error: float) -> None:
    spec = SPEC.model_copy(update={"kv_cache": kind})
    width, dtype = stored_row(spec)
    rows = torch.randn(50, 2, SPEC.head_dim, generator=torch.Generator().manual_seed(7)) * 20
    rows[3] = 0
    stored = to_format(rows, kind)
    assert (stored.shape[-1], stored.dtype, stored[0, 0].nbytes) == (width, dtype, row_bytes)
    assert PART.num_bytes(spec) == 2 * PART.size * row_bytes
    loaded = from_format(stored, kind)
    assert ((loaded.float() - rows).abs() <= error * rows.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(from_format(to_format(loaded, kind), kind), loaded) or kind == "int8"
    assert torch.equal(from_format(stored.transpose(0, 1)[:, 5:9], kind), loaded.transpose(0, 1)[:, 5:9])


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_rows_of_other_formats_are_moved_as_they_are(kind: KvFormat) -> None:
    caches = [filled(blocks, 90, kind)[0] for blocks in (TWO_RUNS, SCATTERED)]
    caches[1].fill(PART, Span(0, 90), caches[0].rows(PART, Span(0, 90)))
    for cache in caches:
        ((k, v),) = cache.keys_and_values(1, Span(30, 31))
        assert torch.equal(k, caches[0].keys_and_values(1, Span(30, 31))[0][0])
        assert k.dtype == v.dtype == (torch.bfloat16 if kind == "bfloat16" else torch.float32)


def test_rows_beyond_the_blocks_are_refused() -> None:
    cache, _ = filled(ADJACENT, 90)
    cache.extend(range(6 * KV_BLOCK_TOKENS - 90))
    with pytest.raises(StepFailed, match="97 tokens in a KV cache for 96"):
        cache.extend([1])
    with pytest.raises(StepFailed, match="no block 10"):
        cache.add_blocks([10])
