"""Prepared messages are those of `framing`, and hold only for exactly the expected tile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.plan.parts import WireFormat
from hearth.plan.phases import Phase
from hearth.plan.value_formats import VALUE_FORMATS, ValueFormatName
from hearth.wire.codec import NUMPY_CASTS, Codec
from hearth.wire.framing import TileKey, decode_tile, encode_tile
from hearth.wire.prepared_tile import PreparedTile

TOKEN = bytes(range(16))
KEY = TileKey(epoch=7, step=3, layer=2, phase=Phase.SUM_MLP, tile=1, source=4)
ROWS = np.arange(-6, 6, dtype=np.float32).reshape(2, 6)
CONVERSIONS = {"exact": np.asarray, "bf16": NUMPY_CASTS.to_bf16, "fp16": NUMPY_CASTS.to_fp16}


def prepared(values: ValueFormatName) -> PreparedTile:
    tile = PreparedTile(TOKEN, Phase.SUM_MLP, ROWS.shape, VALUE_FORMATS[values])
    tile.values[...] = CONVERSIONS[values](ROWS)
    return tile


@pytest.mark.parametrize("values", CONVERSIONS)
@given(step=st.integers(0, 2**32 - 1), layer=st.integers(0, 2**16 - 1), tile=st.integers(0, 2**16 - 1))
def test_messages_equal_those_of_the_framing(values: ValueFormatName, step: int, layer: int, tile: int) -> None:
    key = KEY._replace(step=step, layer=layer, tile=tile)
    message = prepared(values).message(key)
    codec = Codec(WireFormat(values=values, lz4="off"), 1e6, lambda: 0.0)
    assert [message] == encode_tile(TOKEN, key, ROWS, codec)
    assert decode_tile(TOKEN, [message])[0] == key
    received = prepared(values).read(key, [message])
    assert received is not None
    np.testing.assert_array_equal(received, CONVERSIONS[values](ROWS))


def test_any_other_header_is_refused() -> None:
    message = prepared("bf16").message(KEY)
    for offset in range(len(message) - ROWS.size * 2):
        damaged = bytearray(message)
        damaged[offset] ^= 1
        assert prepared("bf16").read(KEY, [bytes(damaged)]) is None


@pytest.mark.parametrize("change", ["longer", "shorter", "more frames", "no frame", "empty"])
def test_other_lengths_are_refused(change: str) -> None:
    message = prepared("bf16").message(KEY)
    frames = {
        "longer": [message + b"\0"],
        "shorter": [message[:-1]],
        "more frames": [message, b""],
        "no frame": [],
        "empty": [b""],
    }[change]
    assert prepared("bf16").read(KEY, frames) is None
