"""Tiles and arrays as frames: round trips, and rejection of malformed frames."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hearth.errors import BadMessage, FrameTooLarge
from hearth.plan.common import VALUE_FORMATS, ValueFormatName, WireFormat
from hearth.plan.phases import Phase
from hearth.wire.codec import NUMPY_CASTS, Codec
from hearth.wire.framing import (
    MAX_DIMS,
    TileForm,
    TileKey,
    decode_tile,
    encode_tile,
    pack_array,
    read_header,
    split_frames,
    unpack_array,
)

TOKEN = bytes(range(16))
KEY = TileKey(epoch=7, step=3, layer=2, phase=Phase.REDUCE_MLP, tile=1, source=4)
keys = st.builds(
    TileKey,
    epoch=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**32 - 1),
    layer=st.integers(0, 2**16 - 1),
    phase=st.sampled_from(Phase),
    tile=st.integers(0, 2**16 - 1),
    source=st.integers(0, 2**16 - 1),
    chunk=st.integers(0, 2**16 - 1),
)
tiles = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=6), elements=st.floats(-100, 100, width=32))
wires = st.builds(
    WireFormat, values=st.sampled_from(["exact", "bf16", "fp16", "int8"]), lz4=st.sampled_from(["on", "off"])
)


def frames_of(array: np.ndarray, wire: WireFormat, key: TileKey = KEY) -> list[bytes]:
    return [bytes(frame) for frame in split_frames(encode_tile(TOKEN, key, array, Codec(wire, 1e6, lambda: 0.0)))]


@given(keys, tiles, wires)
def test_tile_and_key_round_trip(key: TileKey, array: np.ndarray, wire: WireFormat) -> None:
    frames = frames_of(array, wire, key)
    found, result = decode_tile(TOKEN, frames)
    assert found == read_header(TOKEN, frames).key == key
    assert result.shape == array.shape
    if wire.values == "exact":
        assert np.array_equal(result, array)


@given(tiles, wires, st.data())
def test_small_tile_in_one_frame_is_validated(array: np.ndarray, wire: WireFormat, data: st.DataObject) -> None:
    frames = encode_tile(TOKEN, KEY, array, Codec(wire, 1e6, lambda: 0.0))
    assert len(frames) == 1 or array.size == 0 or wire.values == "int8"
    whole = [bytes(frame) for frame in frames]
    key, result = decode_tile(TOKEN, whole)
    assert (key, result.shape) == (KEY, array.shape)
    if len(frames) == 1:
        damaged = whole[0][: data.draw(st.integers(0, len(whole[0]) - 1))]
        with pytest.raises((BadMessage, FrameTooLarge)):
            decode_tile(TOKEN, [damaged])


@given(tiles, wires, keys, keys, st.binary(min_size=16, max_size=16))
def test_headers_that_differ_in_key_or_token_alone_are_told_apart(
    array: np.ndarray, wire: WireFormat, key: TileKey, second: TileKey, token: bytes
) -> None:
    codec = Codec(wire, 1e6, lambda: 0.0)
    second = second._replace(phase=key.phase)
    for each in (key, second, key):
        frames = encode_tile(TOKEN, each, array, codec)
        header = read_header(TOKEN, frames)
        assert header.key == each
        assert header.form.shape == array.shape
        if token != TOKEN:
            with pytest.raises(BadMessage, match="another plan's token"):
                read_header(token, frames)


def test_exact_tiles_are_not_copied() -> None:
    array = np.arange(10_000, dtype=np.float32)
    frames = encode_tile(TOKEN, KEY, array, Codec(WireFormat(lz4="off"), 1e6, lambda: 0.0))
    assert np.shares_memory(np.frombuffer(frames[1], np.float32), array)
    _, result = decode_tile(TOKEN, frames)
    assert np.shares_memory(result, array)
    assert not result.flags.writeable  # frames may still be queued for forwarding


@given(tiles, wires, st.data())
def test_truncated_tiles_raise_typed_errors(array: np.ndarray, wire: WireFormat, data: st.DataObject) -> None:
    frames = frames_of(array, wire)
    index = data.draw(st.integers(0, len(frames) - 1))
    kept = data.draw(st.integers(0, max(len(frames[index]) - 1, 0)))
    damaged = [*frames[:index], frames[index][:kept], *frames[index + 1 :]]
    if damaged != frames:
        with pytest.raises((BadMessage, FrameTooLarge)):
            decode_tile(TOKEN, damaged)


@given(tiles, wires, st.data())
def test_flipped_bits_decode_or_raise_typed_errors(array: np.ndarray, wire: WireFormat, data: st.DataObject) -> None:
    frames = frames_of(array, wire)
    index = data.draw(st.integers(0, len(frames) - 1).filter(lambda i: len(frames[i]) > 0))
    bit = data.draw(st.integers(0, len(frames[index]) * 8 - 1))
    damaged = bytearray(frames[index])
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        decode_tile(TOKEN, [*frames[:index], bytes(damaged), *frames[index + 1 :]])
    except (BadMessage, FrameTooLarge):
        pass


@given(st.lists(st.binary(max_size=100), max_size=4))
def test_arbitrary_frames_raise_only_typed_errors(frames: list[bytes]) -> None:
    for read in (lambda: decode_tile(TOKEN, frames), lambda: unpack_array(frames)):
        try:
            read()
        except (BadMessage, FrameTooLarge):
            pass


def test_wrong_plan_token_is_rejected() -> None:
    with pytest.raises(BadMessage, match="token"):
        read_header(bytes(16), frames_of(np.zeros(3, np.float32), WireFormat()))


def test_false_sizes_allocate_no_memory() -> None:
    frames = frames_of(np.zeros((2, 64), np.float32), WireFormat(lz4="on"))
    assert len(frames[1]) < 2 * 64 * 4  # lz4 was applied
    damaged = bytearray(frames[0])
    dims = slice(-4 * MAX_DIMS, 8 - 4 * MAX_DIMS)  # the first two dimensions
    damaged[dims] = (4096).to_bytes(4, "little") * 2  # 64 MiB, just below the limit; in lz4
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage):
            decode_tile(TOKEN, [bytes(damaged), *frames[1:]])
        damaged[dims] = (1 << 31).to_bytes(4, "little") * 2  # 16 EiB
        with pytest.raises(FrameTooLarge):
            decode_tile(TOKEN, [bytes(damaged), *frames[1:]])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "shape", [(0, 1 << 24, 1 << 24, 1 << 24), (1 << 20, 1 << 20, 1 << 20, 0), (0, (1 << 32) - 1, 1, 1)]
)
def test_zero_dimension_does_not_hide_an_impossible_shape(shape: tuple[int, ...]) -> None:
    dims = struct.pack(f"<{MAX_DIMS}I", *shape, *[0] * (MAX_DIMS - 4))
    tile = frames_of(np.zeros((1, 1, 1, 0), np.float32), WireFormat())
    packed = [bytes(frame) for frame in pack_array(np.zeros((1, 1, 1, 0), np.float32))]
    with pytest.raises(FrameTooLarge):
        decode_tile(TOKEN, [tile[0][: -len(dims)] + dims, tile[1]])
    with pytest.raises(FrameTooLarge):
        unpack_array([packed[0][: -len(dims)] + dims, packed[1]])


@given(wires, st.integers(0, 4))
def test_wrong_number_of_frames_is_detected_in_the_header(wire: WireFormat, num_buffers: int) -> None:
    frames = frames_of(np.ones((2, 3), np.float32), wire)
    damaged = (frames + [b""] * 4)[: 1 + num_buffers]
    if len(damaged) == len(frames):
        assert read_header(TOKEN, damaged).key == KEY
    else:
        with pytest.raises(BadMessage, match="buffers"):
            read_header(TOKEN, damaged)


def test_tiles_that_peers_would_reject_are_not_sent() -> None:
    link = Codec(WireFormat(), 1e6, lambda: 0.0)
    large = np.broadcast_to(np.float32(0), (1 << 12, (1 << 12) + 1))  # just above 64 MiB
    for send in (lambda: encode_tile(TOKEN, KEY, large, link), lambda: pack_array(large)):
        with pytest.raises(FrameTooLarge):
            send()
    for array in (np.zeros(3, np.float64), np.zeros(3, np.int32), np.zeros((1,) * 9, np.float32)):
        with pytest.raises(ValueError, match=r"none of|dimensions"):
            encode_tile(TOKEN, KEY, array, link)
    assert link.stats.num_tiles == 0


@given(
    hnp.arrays(
        st.sampled_from(["f4", "f2", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]),
        hnp.array_shapes(min_dims=0, max_dims=MAX_DIMS, min_side=0, max_side=3),
    ),
    wires,
)
@example(np.array(0, np.float32), WireFormat(values="bf16", lz4="on"))  # no axis over which a format could scale
def test_graph_tensors_keep_dtype_and_only_floats_are_lossy(array: np.ndarray, wire: WireFormat) -> None:
    _, result = decode_tile(TOKEN, frames_of(array, wire, KEY._replace(phase=Phase.TENSOR)))
    assert (result.shape, result.dtype) == (array.shape, array.dtype)
    if array.dtype != np.float32 or wire.values == "exact":
        assert np.array_equal(result, array, equal_nan=array.dtype.kind == "f")


@pytest.mark.parametrize("array", [np.arange(6, dtype=">f4"), np.array(3.0, np.float32), np.ones((3, 4), np.float32).T])
def test_byte_orders_scalars_and_transposed_arrays_round_trip(array: np.ndarray) -> None:
    _, tile = decode_tile(TOKEN, frames_of(array, WireFormat()))
    payload = unpack_array([bytes(frame) for frame in pack_array(array)])
    for result in (tile, payload):
        assert (result.shape, result.dtype) == (array.shape, np.dtype("<f4"))
        assert np.array_equal(result, array)


@given(hnp.arrays(st.sampled_from([np.float32, np.int32, np.int64]), hnp.array_shapes(min_side=0, max_dims=3)))
def test_arrays_round_trip_as_payload(array: np.ndarray) -> None:
    result = unpack_array([bytes(frame) for frame in pack_array(array)])
    assert result.dtype == array.dtype
    assert np.array_equal(result, array, equal_nan=True)


# ---- forms of tiles -------------------------------------------------------------------------------------------------

SUM_KEY = KEY._replace(phase=Phase.SUM_MLP)
ROWS = np.arange(-6, 6, dtype=np.float32).reshape(2, 6)
CONVERSIONS = {"exact": np.asarray, "bf16": NUMPY_CASTS.to_bf16, "fp16": NUMPY_CASTS.to_fp16}


def form(values: ValueFormatName) -> TileForm:
    made = TileForm(TOKEN, Phase.SUM_MLP, ROWS.shape, VALUE_FORMATS[values])
    made.values[...] = CONVERSIONS[values](ROWS)
    return made


@pytest.mark.parametrize("values", CONVERSIONS)
@given(step=st.integers(0, 2**32 - 1), layer=st.integers(0, 2**16 - 1), tile=st.integers(0, 2**16 - 1))
def test_messages_of_a_form_are_those_of_encode_tile(values: ValueFormatName, step: int, layer: int, tile: int) -> None:
    key = SUM_KEY._replace(step=step, layer=layer, tile=tile)
    message = form(values).message(key)
    codec = Codec(WireFormat(values=values, lz4="off"), 1e6, lambda: 0.0)
    assert [message] == encode_tile(TOKEN, key, ROWS, codec)
    assert decode_tile(TOKEN, [message])[0] == key
    received = form(values).read(key, [message])
    assert received is not None
    np.testing.assert_array_equal(received, CONVERSIONS[values](ROWS))


def test_form_refuses_any_other_header() -> None:
    message = form("bf16").message(SUM_KEY)
    for offset in range(len(message) - ROWS.size * 2):
        damaged = bytearray(message)
        damaged[offset] ^= 1
        assert form("bf16").read(SUM_KEY, [bytes(damaged)]) is None


@pytest.mark.parametrize("change", ["longer", "shorter", "more frames", "no frame", "empty"])
def test_form_refuses_other_lengths(change: str) -> None:
    message = form("bf16").message(SUM_KEY)
    frames = {
        "longer": [message + b"\0"],
        "shorter": [message[:-1]],
        "more frames": [message, b""],
        "no frame": [],
        "empty": [b""],
    }[change]
    assert form("bf16").read(SUM_KEY, frames) is None
