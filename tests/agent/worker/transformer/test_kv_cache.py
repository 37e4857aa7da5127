"""Copies of another rank's KV cache: pieces that arrive twice, late or not at all. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from support.models import save_random_model, small_decoder

from coordinator.models.checkpoint.families import read_spec
from hearth.errors import BadMessage
from hearth.plan.geometry import Span
from hearth.plan.kept_caches import CacheBlock

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from agent.worker.transformer.kv_cache import CacheCopies  # noqa: E402 (needs torch)

ROWS = 4  # of a piece
BLOCK = CacheBlock(Span(0, 2), Span(0, 1))


@pytest.fixture(scope="module")
def copies_of(tmp_path_factory: pytest.TempPathFactory) -> type[CacheCopies]:
    spec = read_spec(save_random_model(tmp_path_factory.mktemp("models"), small_decoder("llama"), generates=True))

    class Copies(CacheCopies):
        def __init__(self, max_tokens: int = 100) -> None:
            super().__init__(spec, BLOCK, max_tokens)
            self._head_dim = spec.head_dim

        def add(self, piece: int) -> None:
            """Accept one piece, whose values are its number."""
            shape = (BLOCK.layers.size, 2, BLOCK.heads.size, ROWS, self._head_dim)
            self.accept(1, piece * ROWS, np.full(shape, piece, np.float32))

    return Copies


def kept(copies: CacheCopies) -> list[int]:
    """The pieces that are there without a gap."""
    copy = copies.take(1)
    if copy is None or not copy.num_rows:
        return []
    rows = copy.rows(BLOCK, Span(0, copy.num_rows))[0, 0, 0, ::ROWS, 0]
    return [int(value) for value in rows]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_pieces_that_were_sent_again_late_are_put_in_their_place(copies_of: type, order: Sequence[int]) -> None:
    copies = copies_of()
    for piece in (*order, *order):
        copies.add(piece)
    assert kept(copies) == [0, 1, 2, 3]


def test_rows_after_a_lost_piece_do_not_count(copies_of: type) -> None:
    copies = copies_of()
    for piece in (0, 1, 3, 4):
        copies.add(piece)
    assert kept(copies) == [0, 1]


def test_rows_after_a_gap_take_room(copies_of: type) -> None:
    copies = copies_of(max_tokens=3 * ROWS)
    for piece in (5, 3, 7):
        copies.add(piece)
    with pytest.raises(BadMessage, match="has room for"):
        copies.add(9)
