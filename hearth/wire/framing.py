"""Tensors as frames: a fixed-size header, then raw little-endian buffers, which are not copied here.

A tile message of the data plane is `[plan token + header, buffer...]`. A small tile with one buffer is sent as a single frame,
since ZeroMQ encrypts and delivers each frame separately. All sizes in a header are checked against limits before memory is
allocated.
"""

from __future__ import annotations

import hmac
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hearth.errors import BadMessage, FrameTooLarge
from hearth.plan.common import EXACT, ValueFormat, format_by_code
from hearth.plan.phases import Phase
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES
from hearth.transport.base import Buffer
from hearth.wire import codec
from hearth.wire.codec import NUMPY_CASTS, Array, Casts, Codec, Conversions

TOKEN_BYTES = 16  # length of the plan token: 128 random bits cannot be guessed
MAX_DIMS = 8  # enough for vision models, whose operators split axes into windows and heads
_HEADER_VERSION = 3  # of the headers below: a change of their layout takes the next number
_COMPRESSED = 0x80  # flag in the encoding byte: the buffers are in lz4
# A tile's header after the plan token: version, dtype, encoding, number of axes, phase; epoch, step, layer, tile, source,
# chunk; shape.
_KIND = struct.Struct("<5Bxxx")
_KEY = struct.Struct("<QIHHHH")
_DIMS = struct.Struct(f"<{MAX_DIMS}I")
_KIND_END = TOKEN_BYTES + _KIND.size
_KEY_END = _KIND_END + _KEY.size
_HEADER_BYTES = _KEY_END + _DIMS.size
_ENCODING = TOKEN_BYTES + 2  # offset of the encoding byte
_MAX_CACHED_FORMS = 256  # a decoding step has a few; a prefill, some for each number of rows
MAX_SINGLE_FRAME_BYTES = 32 << 10  # for larger buffers, copying costs more than a second frame
_ARRAY_HEADER = struct.Struct(f"<3Bx{MAX_DIMS}I")

_DTYPES = tuple(
    np.dtype(name) for name in ("<f4", "<f2", "<i4", "<i8", "u1", "i1", "?", "<f8", "<i2", "<u2", "<u4", "<u8")
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
# float32, float16, or the bytes of a message; a `Phase.TENSOR` tile may have any dtype.
_TILE_DTYPES = (_DTYPES[0], _DTYPES[1], _DTYPES[4])


class TileKey(NamedTuple):
    """Identity of a tile. `source` is the owner of the rows in a gather, else the rank that sent the tile.

    A large tile is sent in chunks of its rows, so that a rank of a ring can forward one before the whole tile has arrived.
    """

    epoch: int
    step: int
    layer: int
    phase: Phase
    tile: int
    source: int
    chunk: int = 0


def encode_tile(
    token: bytes, key: TileKey, array: Array, link_codec: Codec, converted: Conversions | None = None
) -> list[Buffer]:
    """Encode one tile for one link. The frames may refer to the array, which must then not change any more.

    For a tile that goes to several links, pass the same `converted`: its values are converted once per format.

    Raises FrameTooLarge if the peer would have to refuse the tile, ValueError for a dtype that tiles cannot have.
    """
    phase = key.phase
    dtype, _, _ = _wire_form(array.dtype, array.shape, phase)
    array = array.astype(dtype, copy=False)
    encoded = link_codec.encode(phase.name, array, phase.verbatim, converted)
    header = encode_header(token, key, dtype, array.shape, encoded.values, encoded.compressed)
    if len(encoded.buffers) == 1 and 0 < len(encoded.buffers[0]) <= MAX_SINGLE_FRAME_BYTES:
        return [b"".join((header, encoded.buffers[0]))]
    return [header, *encoded.buffers]


def encode_header(
    token: bytes,
    key: TileKey,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    values: ValueFormat,
    compressed: bool = False,
) -> bytes:
    """Encode the header of a tile. Raises FrameTooLarge, ValueError for a dtype that tiles cannot have."""
    _, dtype_code, dims = _wire_form(dtype, shape, key.phase)
    encoding = values.code | (_COMPRESSED if compressed else 0)
    kind = _KIND.pack(_HEADER_VERSION, dtype_code, encoding, len(shape), key.phase)
    header = bytearray(b"".join((token, kind, bytes(_KEY.size), dims)))
    write_key(header, key)
    return bytes(header)


def write_key(header: bytearray, key: TileKey) -> None:
    """Replace the key in an encoded header, or at the beginning of a frame. The phase must be the same."""
    epoch, step, layer, _, tile, source, chunk = key
    _KEY.pack_into(header, _KIND_END, epoch, step, layer, tile, source, chunk)


def format_code(frame: Buffer) -> int | None:
    """The code of the value format that a frame's header states, of a tile that is not in lz4. Nothing is checked."""
    return frame[_ENCODING] if len(frame) > _HEADER_BYTES else None


def split_frames(frames: Sequence[Buffer]) -> Sequence[Buffer]:
    """Split the frames of a tile into header and buffers; a small tile has both in one frame."""
    if len(frames) != 1 or len(frames[0]) <= _HEADER_BYTES:
        return frames
    frame = memoryview(frames[0])
    return [frame[:_HEADER_BYTES], frame[_HEADER_BYTES:]]


def decode_tile(token: bytes, frames: Sequence[Buffer]) -> tuple[TileKey, Array]:
    """Decode a tile; read-only and without a copy if its values need no conversion. Raises BadMessage, FrameTooLarge."""
    header = read_header(token, frames)
    return header.key, decode_body(header, frames)


def decode_body(header: TileHeader, frames: Sequence[Buffer], casts: Casts = NUMPY_CASTS) -> Array:
    """Decode the values of a tile, given its header from `read_header`. Raises BadMessage."""
    form = header.form
    return codec.decode_array(form.values, form.compressed, form.dtype, form.shape, split_frames(frames)[1:], casts)


def pack_array(array: Array) -> list[Buffer]:
    """Encode an array as two payload frames of a message. Raises FrameTooLarge, ValueError for an unsupported dtype."""
    dtype, dtype_code = _for_wire(array.dtype, array.shape, _DTYPES)
    array = array.astype(dtype, copy=False)
    header = _ARRAY_HEADER.pack(_HEADER_VERSION, dtype_code, array.ndim, *_padded(array.shape))
    return [header, memoryview(np.ascontiguousarray(array).data).cast("B") if array.size else b""]


def unpack_array(frames: Sequence[Buffer]) -> Array:
    """Decode the frames of `pack_array`; read-only, without a copy. Raises BadMessage, FrameTooLarge."""
    if len(frames) != 2 or len(frames[0]) != _ARRAY_HEADER.size:
        raise BadMessage(reason="an array is a header and a buffer")
    version, dtype_code, num_dims, *dims = _ARRAY_HEADER.unpack(frames[0])
    if version != _HEADER_VERSION or dtype_code >= len(_DTYPES):
        raise BadMessage(reason=f"unknown array header (version {version}, dtype {dtype_code})")
    dtype = _DTYPES[dtype_code]
    shape = _checked_shape(num_dims, dims, dtype)
    return codec.decode_array(EXACT, False, dtype, shape, frames[1:])


def pack_arrays(arrays: Mapping[str, Array], names: Iterable[str] | None = None) -> list[Buffer]:
    """Encode arrays as payload frames, two each, in the order of `names`. Raises as `pack_array`."""
    return [frame for name in (arrays if names is None else names) for frame in pack_array(arrays[name])]


def unpack_arrays(names: Sequence[str], frames: Sequence[Buffer]) -> dict[str, Array]:
    """Decode the frames of `pack_arrays`. Raises BadMessage, FrameTooLarge."""
    if len(frames) != 2 * len(names):
        raise BadMessage(reason=f"{len(names)} arrays came in {len(frames)} frames; each takes two")
    return {name: unpack_array(frames[2 * index : 2 * index + 2]) for index, name in enumerate(names)}


class HeaderForm(NamedTuple):
    """What a tile's header says except its key: the same for many tiles."""

    phase: Phase
    dtype: np.dtype[Any]
    values: ValueFormat
    compressed: bool
    shape: tuple[int, ...]
    num_buffers: int


class TileHeader(NamedTuple):
    """A tile's header, validated by `read_header`."""

    key: TileKey
    form: HeaderForm


def read_header(token: bytes, frames: Sequence[Buffer]) -> TileHeader:
    """Decode and validate a tile's header. Raises BadMessage, FrameTooLarge.

    All checks that need no values are made here, because a rank may forward a tile without decoding its values.
    """
    num_buffers = len(frames) - 1
    if num_buffers == 0 and len(frames[0]) > _HEADER_BYTES:  # a small tile, see `split_frames`
        num_buffers = 1
    elif num_buffers < 0 or len(frames[0]) != _HEADER_BYTES:
        raise BadMessage(reason="a tile begins with a header")
    head = bytes(memoryview(frames[0])[:_HEADER_BYTES])
    if not hmac.compare_digest(head[:TOKEN_BYTES], token):
        raise BadMessage(reason="a tile carries another plan's token")
    form = _read_form(head[TOKEN_BYTES:_KIND_END], head[_KEY_END:])
    if num_buffers != form.num_buffers:
        raise BadMessage(reason=f"{num_buffers} buffers for a tile of {form.num_buffers}")
    epoch, step, layer, tile, source, chunk = _KEY.unpack_from(head, _KIND_END)
    key = TileKey(epoch, step, layer, form.phase, tile, source, chunk)
    return TileHeader(key, form)


@lru_cache(_MAX_CACHED_FORMS)
def _read_form(packed_kind: bytes, packed_dims: bytes) -> HeaderForm:
    version, dtype_code, encoding, num_dims, phase_number = _KIND.unpack(packed_kind)
    if version != _HEADER_VERSION or dtype_code >= len(_DTYPES):
        raise BadMessage(reason=f"unknown tile header (version {version}, dtype {dtype_code})")
    try:
        phase = Phase(phase_number)
    except ValueError:
        raise BadMessage(reason=f"unknown phase {phase_number}") from None
    dtype = _DTYPES[dtype_code]
    if dtype not in _tile_dtypes(phase):
        raise BadMessage(reason=f"{phase.name} tiles are not of {dtype}")
    shape = _checked_shape(num_dims, _DIMS.unpack(packed_dims), dtype)
    try:
        values = format_by_code(encoding & ~_COMPRESSED)
    except KeyError:
        raise BadMessage(reason=f"unknown value format {encoding & ~_COMPRESSED}") from None
    if values is not EXACT and (dtype != _DTYPES[0] or not shape):
        raise BadMessage(reason=f"a tile of {dtype} cannot be in {values.name}")
    num_buffers = len(codec.wire_layout(values, dtype, shape))
    return HeaderForm(phase, dtype, values, bool(encoding & _COMPRESSED), shape, num_buffers)


@lru_cache(_MAX_CACHED_FORMS)
def _wire_form(dtype: np.dtype[Any], shape: tuple[int, ...], phase: Phase) -> tuple[np.dtype[Any], int, bytes]:
    """The little-endian dtype of a tile, its code, and the packed shape. Raises ValueError, FrameTooLarge."""
    return *_for_wire(dtype, shape, _tile_dtypes(phase)), _DIMS.pack(*_padded(shape))


def _tile_dtypes(phase: Phase) -> tuple[np.dtype[Any], ...]:
    return _DTYPES if phase is Phase.TENSOR else _TILE_DTYPES


def _checked_shape(num_dims: int, dims: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    if num_dims > MAX_DIMS or any(dims[num_dims:]):
        raise BadMessage(reason=f"a tensor of {num_dims} dimensions, at most {MAX_DIMS} are allowed")
    shape = tuple(dims[:num_dims])
    _check_size(shape, dtype)
    return shape


def _check_size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    # An axis of size 0 counts as 1, so that it does not hide other axes that are too large.
    num_bytes = math.prod(shape if all(shape) else [max(dim, 1) for dim in shape]) * dtype.itemsize
    if num_bytes > MAX_PAYLOAD_FRAME_BYTES:
        raise FrameTooLarge(num_bytes=num_bytes, cap_bytes=MAX_PAYLOAD_FRAME_BYTES)


def _for_wire(
    dtype: np.dtype[Any], shape: tuple[int, ...], allowed: Sequence[np.dtype[Any]]
) -> tuple[np.dtype[Any], int]:
    """The little-endian dtype of an array, and its code. Raises ValueError, FrameTooLarge."""
    wire_dtype = dtype if dtype in allowed else dtype.newbyteorder("<")
    if wire_dtype not in allowed:
        raise ValueError(f"{dtype} is none of {', '.join(str(each) for each in allowed)}")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor of {len(shape)} dimensions, at most {MAX_DIMS} are allowed")
    _check_size(shape, wire_dtype)
    return wire_dtype, _DTYPE_CODES[wire_dtype]


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape + (0,) * (MAX_DIMS - len(shape))


class TileForm:
    """The messages of tiles that differ only in key and values: one frame each, whose header is encoded and checked once.

    Between two exchanges of a decoding step, the weights displace everything else from the caches, so that each operation of
    an exchange takes several times as long as in a loop. The tiles are float32, of one phase and shape, in a value format with
    one buffer. The other end may use `encode_tile` and `decode_tile` instead. Not thread-safe.

    `values`: the values of the next message, in the format's dtype; write them before `message`.
    """

    def __init__(self, token: bytes, phase: Phase, shape: tuple[int, ...], values: ValueFormat) -> None:
        """Raises FrameTooLarge."""
        self._header = bytearray(encode_header(token, TileKey(0, 0, 0, phase, 0, 0), _DTYPES[0], shape, values))
        ((self._dtype, self._shape),) = codec.wire_layout(values, _DTYPES[0], shape)
        self._frame = self._header + bytes(math.prod(shape) * self._dtype.itemsize)
        self.values: Array = np.frombuffer(self._frame, self._dtype, offset=len(self._header)).reshape(shape)

    def message(self, key: TileKey) -> bytes:
        """The frame of `values` under this key."""
        write_key(self._frame, key)
        return bytes(self._frame)

    def read(self, key: TileKey, frames: Sequence[Buffer]) -> Array | None:
        """The values of a received message, in the format's dtype and read-only; None if it is not exactly this tile."""
        num_bytes = len(self._header)
        if len(frames) != 1 or len(frames[0]) != len(self._frame):
            return None
        write_key(self._header, key)
        if not hmac.compare_digest(memoryview(frames[0])[:num_bytes], self._header):
            return None
        return np.frombuffer(frames[0], self._dtype, offset=num_bytes).reshape(self._shape)
