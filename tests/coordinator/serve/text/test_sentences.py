"""Batches of texts and their pooling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.serve.text.sentences import SentenceTokenizer, mean_pool, pack_sequences, step_batches
from hearth.errors import BadCheckpoint, TextTooLong


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 100))
def test_batches_keep_order_and_limit(lengths: list[int], max_rows: int) -> None:
    found = step_batches(lengths, max_rows)
    assert [i for batch in found for i in batch] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in batch) <= max_rows or len(batch) == 1 for batch in found)


def test_sums_become_normalised_means() -> None:
    ids, lengths = pack_sequences([[1, 2], [3]])
    assert (ids.tolist(), lengths.tolist()) == ([1, 2, 3], [0, 2, 3])
    pooled = mean_pool(np.array([[6.0, 8.0], [0.0, 0.0]], np.float32), lengths)
    assert pooled.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0.0, 0.0]]


def test_long_texts_raise_an_error_instead_of_truncation(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sentence = SentenceTokenizer(tmp_path)
    assert sentence.encode(["a b a"], 3) == [[0, 1, 0]]
    with pytest.raises(TextTooLong) as error:
        sentence.encode(["a", "a a a a"], 3)
    assert (error.value.index, error.value.num_tokens) == (1, 4)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="tokenizer"):
        SentenceTokenizer(tmp_path)
