"""Texts to packed token ids, and summed rows to sentence embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hearth.errors import BadCheckpoint, BadRequest, TextTooLong

if TYPE_CHECKING:
    import numpy as np


class SentenceTokenizer:
    """The model's own tokenizer.json, without truncation or padding: a text that is too long is an error."""

    def __init__(self, model_dir: Path) -> None:
        from tokenizers import Tokenizer

        path = model_dir / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise BadCheckpoint(path=str(path), reason=f"the tokenizer cannot be read ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Token ids of each text, special tokens included. Raises TextTooLong with the index of the first such text."""
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        for index, ids in enumerate(encoded):
            if len(ids) > max_tokens:
                raise TextTooLong(index=index, num_tokens=len(ids), max_tokens=max_tokens)
            if not ids:
                raise BadRequest(reason=f"text {index} has no tokens")
        return encoded


def batches(lengths: Sequence[int], max_rows: int) -> list[range]:
    """Cut sequences, in order, into steps of at most `max_rows` rows; a step holds at least one sequence."""
    result: list[range] = []
    start = rows = 0
    for index, length in enumerate(lengths):
        if index > start and rows + length > max_rows:
            result.append(range(start, index))
            start, rows = index, 0
        rows += length
    if start < len(lengths):
        result.append(range(start, len(lengths)))
    return result


def pack(sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Token ids [T] and cumulative lengths [N+1], both int32."""
    import numpy as np

    ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in sequences])
    lengths = np.zeros(len(sequences) + 1, dtype=np.int32)
    np.cumsum([len(ids) for ids in sequences], out=lengths[1:])
    return ids, lengths


def mean_pool(sums_NH: np.ndarray[Any, Any], cumulative_lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Mean over each sequence's tokens, then L2 normalisation: [N,H]."""
    import numpy as np

    means = sums_NH / np.diff(cumulative_lengths)[:, None].astype(np.float32)
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    pooled: np.ndarray[Any, Any] = (means / np.maximum(norms, 1e-12)).astype(np.float32)
    return pooled
