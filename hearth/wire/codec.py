"""Activation codec: value format, byte shuffle, lz4. Needs numpy only.

Measured on activations of a real model: lz4 gains nothing on raw floats; after a byte shuffle it saves 6 % (fp32) to 15 %
(bf16). So `auto` samples ratio and speed for each link and kind of tensor, and compresses only where that shortens the
transfer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hearth.errors import BadMessage
from hearth.plan.common import BF16, EXACT, FP16, INT8, VALUE_FORMATS, ValueFormat, ValueFormatName, WireFormat
from hearth.transport.base import Buffer
from hearth.wire.messages import WireStats

Array = np.ndarray[Any, Any]
Layout = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]  # dtype and shape of each buffer of a tile

SAMPLE_BYTES = 64 << 10  # of a tile; `auto` compresses them to measure ratio and speed: a small part of a large tile
SAMPLE_EVERY = 64  # `auto` measures the first tile of each kind, then one in this many, so that sampling costs little
# Weight of a second of compute against a second on the link. Measured: with 1, lz4 made four devices at 270 Mbit/s a quarter
# slower in fp16.
_COMPUTE_WEIGHT = 3.0
# lz4 saves at most 15 % of a transfer this short: less than `_COMPUTE_WEIGHT` times the 0.1 ms that it costs in a decoding
# step.
_RAW_TRANSFER_SECONDS = 2e-3
_MAX_CACHED_LAYOUTS = 256  # a decoding step has a few; a prefill, some for each number of rows
_LZ4_MAX_RATIO = 255  # a byte of an lz4 block adds at most 255 bytes of output, as one more byte of a match length


_FP16_MAX = 65504.0  # the largest finite fp16 value


class Casts:
    """Conversions between float32 and the 16-bit formats in numpy. Transformer workers use torch's, several times faster."""

    def fits_fp16(self, array: Array) -> bool:
        """Whether every value is finite and within fp16's range."""
        return bool(np.abs(array).max(initial=0.0) <= _FP16_MAX)  # also False for a NaN

    def to_fp16(self, array: Array) -> Array:
        """Round to nearest; values out of range become infinite."""
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype("<f2")

    def from_fp16(self, array: Array) -> Array:
        """Convert fp16 to float32."""
        return array.astype(np.float32)

    def to_bf16(self, array: Array) -> Array:
        """Round to nearest even; return the upper halves as uint16. NaN stays NaN."""
        bits = array.view(np.uint32)
        with np.errstate(over="ignore"):
            rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
        nan = np.isnan(array)
        if nan.any():
            rounded[nan] = (bits[nan] >> 16).astype("<u2") | 0x40  # rounding could turn a NaN into infinity
        return rounded

    def from_bf16(self, array: Array) -> Array:
        """Convert bf16, given as the upper halves in uint16, to float32."""
        return (array.astype(np.uint32) << 16).view(np.float32)


NUMPY_CASTS = Casts()


# The values of one array in the formats of several links, by the format that a link asks for.
Conversions: TypeAlias = dict[ValueFormat, tuple[ValueFormat, list[Array]]]


class EncodedTile(NamedTuple):
    """An encoded tile. `buffers` are in the order of `wire_layout`; with `compressed`, each is byte-shuffled and in lz4."""

    values: ValueFormat
    compressed: bool
    buffers: list[Buffer]


def lz4_pays(
    raw_bytes: int,
    compressed_bytes: int,
    compress_seconds: float,
    decompress_seconds: float,
    link_bytes_per_second: float,
) -> bool:
    """Whether lz4 saves more time on the link than it costs in compute.

    Transfers may overlap compute, but compression always takes compute time. So each second of compression must save
    `_COMPUTE_WEIGHT` seconds on the link.
    """
    saved_seconds = (raw_bytes - compressed_bytes) / link_bytes_per_second
    return saved_seconds > _COMPUTE_WEIGHT * (compress_seconds + decompress_seconds)


class Codec:
    """Encoder for one link. Only one thread at a time may call `encode`; `clock` returns seconds."""

    def __init__(
        self, wire: WireFormat, link_bytes_per_second: float, clock: Callable[[], float], casts: Casts = NUMPY_CASTS
    ) -> None:
        if wire.lz4 != "off":
            import lz4.block  # noqa: F401  # imported here, so that the first sample does not time the import
        self._wire = wire
        self.values = VALUE_FORMATS[wire.values]  # the current format
        self._lz4 = wire.lz4
        self.link_bytes_per_second = link_bytes_per_second  # as measured
        self._clock = clock
        self._casts = casts
        # By format and kind of tensor: tiles seen, and whether lz4 pays.
        self._decisions: dict[tuple[ValueFormat, str], tuple[int, bool]] = {}
        self._num_tiles = self._raw_bytes = self._sent_bytes = self._lz4_tiles = 0

    @property
    def stats(self) -> WireStats:
        """Counters of the tiles and bytes encoded so far."""
        return WireStats(
            num_tiles=self._num_tiles, raw_bytes=self._raw_bytes, sent_bytes=self._sent_bytes, lz4_tiles=self._lz4_tiles
        )

    @property
    def is_lossy(self) -> bool:
        """Whether the current value format loses precision."""
        return self.values is not EXACT

    def set_values(self, values: ValueFormatName | None) -> None:
        """Set the value format of the following tiles; None: the plan's."""
        self.values = VALUE_FORMATS[values or self._wire.values]

    def skips_lz4(self, num_bytes: int) -> bool:
        """Whether lz4 cannot pay for a tile of this size, so that it need not be tried."""
        return self._lz4 == "off" or (
            self._lz4 == "auto" and num_bytes < _RAW_TRANSFER_SECONDS * self.link_bytes_per_second
        )

    def count(self, raw_bytes: int, sent_bytes: int) -> None:
        """Count a tile that was encoded elsewhere, without lz4."""
        self._num_tiles += 1
        self._raw_bytes += raw_bytes
        self._sent_bytes += sent_bytes

    def encode(
        self, kind: str, array: Array, verbatim: bool = False, converted: Conversions | None = None
    ) -> EncodedTile:
        """Encode an array, without a copy if nothing is converted. `kind` identifies tensors that compress alike.

        With `verbatim`, the array is neither converted nor compressed. `converted` collects the conversions of an array that
        goes to several links.
        """
        array = np.asarray(array, order="C")  # ascontiguousarray would add an axis to a scalar
        wanted = EXACT if verbatim else self.values
        found = converted.get(wanted) if converted is not None else None
        values, planes = found if found is not None else _to_wire(array, wanted, self._casts)
        if converted is not None:
            converted[wanted] = values, planes
        compress = not verbatim and array.nbytes > 0 and self._wants_lz4((values, kind), planes)
        buffers: list[Buffer] = [memoryview(plane.data).cast("B") if plane.size else b"" for plane in planes]
        if compress:
            smaller = self._compressed((values, kind), planes, sum(map(len, buffers)))
            compress = smaller is not None
            buffers = smaller or buffers
        self.count(array.nbytes, sum(len(buffer) for buffer in buffers))
        self._lz4_tiles += compress
        return EncodedTile(values, compress, buffers)

    def _compressed(
        self, kind: tuple[ValueFormat, str], planes: Sequence[Array], num_bytes: int
    ) -> list[Buffer] | None:
        """The planes in lz4; None if that is not smaller. If it did not pay, no more of the kind until the next sample."""
        start = self._clock()
        smaller: list[Buffer] = [_compress(plane) for plane in planes]
        seconds, compressed_bytes = self._clock() - start, sum(map(len, smaller))
        if self._lz4 == "auto" and not lz4_pays(num_bytes, compressed_bytes, seconds, 0.0, self.link_bytes_per_second):
            self._decisions[kind] = (self._decisions[kind][0], False)
        return smaller if compressed_bytes < num_bytes else None

    def _wants_lz4(self, kind: tuple[ValueFormat, str], planes: Sequence[Array]) -> bool:
        if self._lz4 != "auto":
            return self._lz4 == "on"
        seen, pays = self._decisions.get(kind, (0, False))
        if seen % SAMPLE_EVERY == 0:
            pays = self._sample(planes[0])
        self._decisions[kind] = (seen + 1, pays)
        return pays

    def _sample(self, plane: Array) -> bool:
        sample = plane.reshape(-1)[: SAMPLE_BYTES // plane.itemsize]
        start = self._clock()
        compressed = _compress(sample)
        between = self._clock()
        _decompress(compressed, sample.dtype, sample.size)
        end = self._clock()
        return lz4_pays(sample.nbytes, len(compressed), between - start, end - between, self.link_bytes_per_second)


def decode_array(
    values: ValueFormat,
    compressed: bool,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    buffers: Sequence[Buffer],
    casts: Casts = NUMPY_CASTS,
) -> Array:
    """Decode an array to its original dtype and shape; read-only if nothing was converted. Raises BadMessage.

    The caller must have checked that `shape` is no larger than a frame may be. lz4 output is bounded by that size and by
    the buffer's length times the maximum ratio, so a short buffer with a large shape allocates nothing.
    """
    layout = wire_layout(values, dtype, shape)
    if len(buffers) != len(layout):
        raise BadMessage(reason=f"{len(buffers)} buffers for a tile of {len(layout)}")
    planes = []
    for buffer, (plane_dtype, plane_shape) in zip(buffers, layout, strict=True):
        size = math.prod(plane_shape)
        if compressed:
            plane = _decompress(buffer, plane_dtype, size)
        elif len(buffer) != size * plane_dtype.itemsize:
            raise BadMessage(reason=f"{len(buffer)} bytes for {size} values of {plane_dtype}")
        else:
            plane = np.frombuffer(memoryview(buffer).toreadonly(), plane_dtype) if size else np.empty(0, plane_dtype)
        planes.append(plane.reshape(plane_shape))
    return _CONVERSIONS[values].from_wire(planes, dtype, casts)


@lru_cache(_MAX_CACHED_LAYOUTS)
def wire_layout(values: ValueFormat, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Layout:
    """Dtype and shape of each buffer of a tile in this value format."""
    return _CONVERSIONS[values].layout(dtype, shape)


# ---- value formats --------------------------------------------------------------------------------------------------


def _to_wire(array: Array, values: ValueFormat, casts: Casts) -> tuple[ValueFormat, list[Array]]:
    """Convert to a value format, or to exact if the format cannot represent the values. Only float32 is converted."""
    if array.dtype == np.float32 and array.ndim > 0:
        planes = _CONVERSIONS[values].to_wire(array, casts)
        if planes is not None:
            return values, planes
    return EXACT, [array]


class _Exact:
    """Layout, encoding and decoding of a value format. This class is the exact format; the others override it."""

    def layout(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Layout:
        """Dtype and shape of each buffer of a tile."""
        return ((dtype, shape),)

    def to_wire(self, array: Array, casts: Casts) -> list[Array] | None:
        """Encode to buffers; None if the format cannot represent the values."""
        return [array]

    def from_wire(self, planes: list[Array], dtype: np.dtype[Any], casts: Casts) -> Array:
        """Decode the values from buffers."""
        return planes[0]


class _Bf16(_Exact):
    def layout(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Layout:
        return ((np.dtype("<u2"), shape),)

    def to_wire(self, array: Array, casts: Casts) -> list[Array] | None:
        return [casts.to_bf16(array)]

    def from_wire(self, planes: list[Array], dtype: np.dtype[Any], casts: Casts) -> Array:
        return casts.from_bf16(planes[0]).astype(dtype, copy=False)


class _Fp16(_Exact):
    def layout(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Layout:
        return ((np.dtype("<f2"), shape),)

    def to_wire(self, array: Array, casts: Casts) -> list[Array] | None:
        half = casts.to_fp16(array)
        # The values fit unless rounding has made a finite value infinite.
        if casts.fits_fp16(array) or np.array_equal(np.isinf(half), np.isinf(array)):
            return [half]
        return None

    def from_wire(self, planes: list[Array], dtype: np.dtype[Any], casts: Casts) -> Array:
        return casts.from_fp16(planes[0]).astype(dtype, copy=False)


class _Int8(_Exact):
    """int8 with one scale per row (last axis): the row's largest absolute value / 127."""

    def layout(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Layout:
        return (np.dtype("i1"), shape), (np.dtype("<f4"), shape[:-1])

    def to_wire(self, array: Array, casts: Casts) -> list[Array] | None:
        largest = np.abs(array).max(axis=-1, initial=0.0)
        if not np.isfinite(largest).all():
            return None
        # A subnormal scale would overflow in the division; rows this small are encoded as zeros.
        scale = np.maximum(largest / np.float32(127), np.finfo(np.float32).tiny).astype("<f4")
        quantised = np.rint(array / scale[..., None])
        return [np.clip(quantised, -127, 127).astype(np.int8), scale]

    def from_wire(self, planes: list[Array], dtype: np.dtype[Any], casts: Casts) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):  # a peer may send any scale
            return (planes[0] * planes[1][..., None]).astype(dtype, copy=False)


_CONVERSIONS: Mapping[ValueFormat, _Exact] = {EXACT: _Exact(), BF16: _Bf16(), FP16: _Fp16(), INT8: _Int8()}


# ---- shuffle and lz4 ------------------------------------------------------------------------------------------------


def _compress(plane: Array) -> bytes:
    import lz4.block  # imported here: clients only read uncompressed arrays, and need not install lz4

    shuffled = np.ascontiguousarray(plane.reshape(-1).view(np.uint8).reshape(-1, plane.itemsize).T)
    compressed: bytes = lz4.block.compress(shuffled, store_size=False)
    return compressed


def _decompress(buffer: Buffer, dtype: np.dtype[Any], size: int) -> Array:
    import lz4.block

    num_bytes = size * dtype.itemsize
    if num_bytes > len(buffer) * _LZ4_MAX_RATIO:
        raise BadMessage(reason=f"{len(buffer)} compressed bytes cannot hold a tile of {num_bytes}")
    try:
        raw = lz4.block.decompress(buffer, uncompressed_size=num_bytes) if num_bytes else b""
    except (lz4.block.LZ4BlockError, ValueError, OverflowError, MemoryError):
        raise BadMessage(reason="a compressed tile is damaged") from None
    if len(raw) != num_bytes:
        raise BadMessage(reason=f"a compressed tile holds {len(raw)} bytes instead of {num_bytes}")
    shuffled = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, size)
    return np.ascontiguousarray(shuffled.T).reshape(-1).view(dtype)
