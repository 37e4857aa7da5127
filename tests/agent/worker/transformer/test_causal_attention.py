"""Causal attention in blocks equals attention with all scores at once, and reads only the keys that queries see."""

from __future__ import annotations

import pytest

from hearth.plan.geometry import Span

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from agent.worker.transformer import causal_attention as attention  # noqa: E402 (needs torch)

GROUPS, HEADS, HEAD_DIM = 2, 3, 8  # KV heads, and query heads of each


class Keys:
    """Random keys and values, and the spans of them that were read; in two pieces, as of a cache in scattered blocks."""

    def __init__(self, length: int) -> None:
        self.k, self.v = torch.randn(2, GROUPS, length, HEAD_DIM, generator=torch.Generator().manual_seed(length))
        self.read: list[Span] = []

    def __call__(self, wanted: Span) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.read.append(wanted)
        middle = (wanted.start + wanted.stop) // 2
        pieces = [Span(wanted.start, middle), Span(middle, wanted.stop)] if wanted.size > 1 else [wanted]
        return [(self.k[:, slice(*piece)], self.v[:, slice(*piece)]) for piece in pieces]


@pytest.mark.parametrize("window", [None, 1, 2, 8, 30, 64, 200])
@pytest.mark.parametrize("num_queries", [1, 2, 5, 33])
@pytest.mark.parametrize("first", [0, 1, 40, 100])
def test_blocks_equal_all_scores_at_once(
    first: int, num_queries: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_KEYS_PER_CALL", 16)
    monkeypatch.setattr(attention, "_QUERIES_PER_WINDOW", 12)
    length = first + num_queries
    q = torch.randn(GROUPS, HEADS, num_queries, HEAD_DIM, generator=torch.Generator().manual_seed(7))
    keys = Keys(length)
    found = attention.causal_attention(q, keys, first, window)
    distance = torch.arange(first, length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    scores = torch.einsum("gesd,gnd->gesn", q, keys.k).div(HEAD_DIM**0.5).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(found, torch.einsum("gesn,gnd->gesd", scores.softmax(-1), keys.v))
    seen = {position for span in keys.read for position in range(*span)}
    assert seen == set(range(0 if window is None else max(first - window + 1, 0), length))


def test_earlier_keys_are_read_in_pieces_of_bounded_size() -> None:
    keys = Keys(3000)
    attention.causal_attention(torch.randn(GROUPS, HEADS, 100, HEAD_DIM), keys, 2900, None)
    assert sorted(keys.read) == [Span(0, 1024), Span(1024, 2048), Span(2048, 2900), Span(2900, 3000)]


def test_keys_in_bfloat16_are_attended_to_where_they_are() -> None:
    keys = Keys(300)
    q = torch.randn(GROUPS, HEADS, 1, HEAD_DIM, generator=torch.Generator().manual_seed(7))
    expected = attention.causal_attention(q, keys, 299, None)
    keys.k, keys.v = keys.k.bfloat16(), keys.v.bfloat16()
    found = attention.causal_attention(q, keys, 299, None)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
