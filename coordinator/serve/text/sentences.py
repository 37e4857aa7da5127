"""Tokenises and packs texts for encoders, and turns summed rows into sentence embeddings."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.models.limits import MAX_GROWTH
from coordinator.models.model_files import read_model_file
from hearth.errors import BadCheckpoint, BadRequest, TextTooLong
from hearth.wire.codec import Array

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


def open_tokenizer(directory: Path) -> Tokenizer:
    """The model's tokenizer.json, with truncation and padding switched off. Raises BadCheckpoint."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    with no_panic(path):
        try:
            tokenizer = Tokenizer.from_buffer(read_model_file(path))
            changing = [each for each in (tokenizer.normalizer, tokenizer.decoder) if each is not None]
            growth = max((_growth(json.loads(each.__getstate__())) for each in changing), default=1)
        except Exception as error:  # the library raises plain Exception
            reason = getattr(error, "strerror", None) or error
            raise BadCheckpoint(path=str(path), reason=f"the tokenizer cannot be read ({reason})") from None
        if growth > MAX_GROWTH:
            raise BadCheckpoint(path=str(path), reason=f"it can make a text {growth:.0f} times as long")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def _growth(part: Any) -> float:
    """How many times as long a normalizer or a decoder with these settings can make a text."""
    if part["type"] == "Sequence":
        return math.prod(map(_growth, part.get("normalizers") or part.get("decoders") or ()))
    if part["type"] == "Replace":
        ((kind, pattern),) = part["pattern"].items()
        length = len(part["content"])
        return length + 1 if kind == "Regex" or not pattern else max(length / len(pattern), 1)
    if part["type"] == "Precompiled":
        # The size of a table, the table, and the replacements of letters, each with a 0 behind.
        table = base64.b64decode(part["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].decode(errors="replace").split("\0")
        return max(map(len, texts))
    return 1


@contextmanager
def no_panic(path: Path) -> Iterator[None]:
    """Raise BadCheckpoint for a panic of the tokenizer's library, which is written in Rust: that is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library does not export it
            raise
        raise BadCheckpoint(path=str(path), reason=f"its tokenizer failed ({error})") from None


def encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> Encoding:
    """Encode a text. Unlike the library's `encode`, this does not hold Python's lock, so that other threads go on."""
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]


class SentenceTokenizer:
    """Tokenises texts for an encoder. A text that is too long raises an error and is not truncated."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer = open_tokenizer(directory)

    def encode(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Token ids of each text, with special tokens. Raises TextTooLong for the first text that is too long, BadRequest."""
        with no_panic(self._directory):
            encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        for index, ids in enumerate(encoded):
            if len(ids) > max_tokens:
                raise TextTooLong(index=index, num_tokens=len(ids), max_tokens=max_tokens)
            if not ids:
                raise BadRequest(reason=f"text {index} has no tokens")
        return encoded


def step_batches(lengths: Sequence[int], max_rows: int) -> list[range]:
    """Group sequences, in order, into steps of at most `max_rows` rows and at least one sequence."""
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


def pack_sequences(sequences: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Concatenate sequences: token ids [T] and cumulative lengths [N+1], both int32."""
    ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in sequences])
    lengths = np.zeros(len(sequences) + 1, dtype=np.int32)
    np.cumsum([len(ids) for ids in sequences], out=lengths[1:])
    return ids, lengths


def mean_pool(sums_NH: Array, cumulative_lengths: Array) -> Array:
    """Mean over each sequence's tokens, then L2 normalisation: [N,H]."""
    means = sums_NH / np.diff(cumulative_lengths)[:, None].astype(np.float32)
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    return np.asarray(means / np.maximum(norms, 1e-12), np.float32)
