"""The codec of activations: value formats, lz4, and malformed input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hearth.errors import BadMessage
from hearth.plan.common import EXACT, FP16, INT8, VALUE_FORMATS, ValueFormat, WireFormat
from hearth.wire.codec import SAMPLE_EVERY, Codec, decode_array, lz4_pays

floats = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9), elements=st.floats(width=32)
)
ALL = [(values, lz4) for values in ("exact", "bf16", "fp16", "int8") for lz4 in ("off", "on", "auto")]


def fake_clock(step: float) -> Callable[[], float]:
    """A clock that advances by `step` seconds at each call."""
    now = [0.0]

    def read() -> float:
        now[0] += step
        return now[0]

    return read


def codec(values: Any, lz4: Any = "off", rate: float = 1e6, step: float = 1e-6) -> Codec:
    return Codec(WireFormat(values=values, lz4=lz4), rate, fake_clock(step))


def round_trip(link: Codec, array: np.ndarray) -> np.ndarray:
    encoded = link.encode("kind", array)
    buffers = [memoryview(bytes(buffer)) for buffer in encoded.buffers]
    return decode_array(encoded.values, encoded.compressed, array.dtype, array.shape, buffers)


@given(floats, st.sampled_from(["off", "on", "auto"]))
def test_exact_format_is_bit_exact(array: np.ndarray, lz4: str) -> None:
    result = round_trip(codec("exact", lz4), array)
    assert result.dtype == array.dtype
    assert result.shape == array.shape
    assert np.array_equal(result.view(np.uint32), array.view(np.uint32))  # also NaN payloads and -0.0


@given(floats, st.sampled_from(ALL))
def test_all_formats_keep_shape_and_dtype(array: np.ndarray, wire: tuple[str, str]) -> None:
    result = round_trip(codec(*wire), array)
    assert (result.shape, result.dtype) == (array.shape, array.dtype)


@given(floats)
def test_bf16_rounds_to_nearest_even_as_torch(array: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    expected = torch.from_numpy(array).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(round_trip(codec("bf16"), array), expected, equal_nan=True)


@given(floats.filter(lambda a: not np.abs(a[np.isfinite(a)]).max(initial=0) > 65504))
def test_fp16_rounds_as_numpy(array: np.ndarray) -> None:
    expected = array.astype(np.float16).astype(np.float32)
    assert np.array_equal(round_trip(codec("fp16"), array), expected, equal_nan=True)


def test_fp16_falls_back_to_exact_on_overflow() -> None:
    link = codec("fp16")
    large = np.array([[1.0, 70000.0]], np.float32)
    assert link.encode("kind", large).values is EXACT
    assert np.array_equal(round_trip(link, large), large)
    assert link.encode("kind", large / 2).values is FP16
    infinite = np.array([[np.inf, 1.0]], np.float32)
    assert link.encode("kind", infinite).values is FP16  # infinity has a float16 value


@given(hnp.arrays(np.float32, (5, 33), elements=st.floats(-1e6, 1e6, width=32)))
def test_int8_error_is_at_most_half_a_step_of_the_row(array: np.ndarray) -> None:
    result = round_trip(codec("int8"), array)
    step = np.abs(array).max(axis=1, keepdims=True) / 127
    assert (np.abs(result - array) <= step * 0.501 + 1e-30).all()


def test_int8_falls_back_to_exact_for_non_finite_rows() -> None:
    array = np.array([[1.0, np.nan], [2.0, 3.0]], np.float32)
    assert np.array_equal(round_trip(codec("int8"), array), array, equal_nan=True)


@pytest.mark.parametrize(
    ("compressed", "compress", "decompress", "rate", "pays"),
    [
        (500, 0.0, 0.0, 1000.0, True),
        (500, 0.1, 0.1, 1000.0, False),  # saves 0.5 s of transfer, costs 0.2 s of compute
        (500, 0.05, 0.05, 1000.0, True),
        (1000, 0.0, 0.0, 1000.0, False),  # saves no bytes
        (500, 0.2, 0.2, 1e6, False),  # a fast link
    ],
)
def test_lz4_pays_if_it_saves_a_multiple_of_its_cost(
    compressed: int, compress: float, decompress: float, rate: float, pays: bool
) -> None:
    assert lz4_pays(1000, compressed, compress, decompress, rate) is pays


def test_auto_compresses_on_slow_links_only() -> None:
    array = np.zeros((64, 256), np.float32)
    slow, fast = codec("exact", "auto", rate=1e6), codec("exact", "auto", rate=1e12)
    assert slow.encode("kind", array).compressed
    assert not fast.encode("kind", array).compressed


def test_auto_skips_incompressible_tiles() -> None:
    noise = np.frombuffer(np.random.default_rng(0).bytes(1 << 16), np.float32)
    assert not codec("exact", "auto", rate=1.0).encode("kind", noise).compressed


def test_auto_samples_each_kind_separately_and_again_later() -> None:
    link = codec("exact", "auto", rate=1e6)
    noise = np.frombuffer(np.random.default_rng(0).bytes(1 << 16), np.float32)
    zeros = np.zeros(1 << 14, np.float32)
    assert not link.encode("noise", noise).compressed
    assert link.encode("zeros", zeros).compressed
    for _ in range(SAMPLE_EVERY - 1):
        assert not link.encode("noise", zeros).compressed  # the first decision still holds
    assert link.encode("noise", zeros).compressed  # after a new sample


def test_auto_stops_after_a_tile_that_did_not_pay() -> None:
    """The first tile is often not like the others: a warm-up request computes with zeros."""
    link = codec("exact", "auto", step=0.001)
    noise = np.frombuffer(np.random.default_rng(0).bytes(1 << 16), np.float32)
    zeros = np.zeros(1 << 14, np.float32)
    assert link.encode("kind", zeros).compressed
    assert link.encode("kind", zeros).compressed
    assert not link.encode("kind", noise).compressed
    assert not link.encode("kind", zeros).compressed


def test_statistics_report_saved_bytes() -> None:
    link = codec("fp16", "on")
    link.encode("kind", np.zeros((10, 100), np.float32))
    stats = link.stats
    assert (stats.num_tiles, stats.raw_bytes, stats.lz4_tiles) == (1, 4000, 1)
    assert stats.sent_bytes < 100


def test_compression_never_increases_size() -> None:
    noise = np.frombuffer(np.random.default_rng(0).bytes(4096), np.float32)
    encoded = codec("exact", "on").encode("kind", noise)
    assert sum(len(buffer) for buffer in encoded.buffers) <= noise.nbytes


def test_maximal_compression_ratio_round_trips() -> None:
    zeros = np.zeros((1024, 1024), np.float32)  # lz4 comes close to its largest ratio, 255 to 1
    link = codec("exact", "on")
    assert np.array_equal(round_trip(link, zeros), zeros)
    assert link.stats.sent_bytes < zeros.nbytes / 250


def test_lz4_is_imported_before_the_first_sample() -> None:
    code = (
        "import sys; from hearth.wire.codec import Codec; from hearth.plan.common import WireFormat;"
        "Codec(WireFormat(lz4='off'), 1e6, lambda: 0.0); assert 'lz4' not in sys.modules;"
        "Codec(WireFormat(lz4='auto'), 1e6, lambda: 0.0); assert 'lz4.block' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@given(st.binary(max_size=200), st.sampled_from(list(VALUE_FORMATS.values())), st.booleans())
def test_arbitrary_bytes_decode_or_raise_bad_message(data: bytes, values: ValueFormat, compressed: bool) -> None:
    try:
        result = decode_array(values, compressed, np.dtype("<f4"), (3, 4), [data, data][: 1 + (values is INT8)])
    except BadMessage:
        return
    assert result.shape == (3, 4)
