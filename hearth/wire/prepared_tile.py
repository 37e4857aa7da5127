"""Messages of tiles that differ only in key and values: one frame each, whose form is encoded and checked once.

Between two exchanges of a decoding step, the weights displace everything else from the caches, so that each operation of an
exchange takes several times as long as in a loop. The messages are those of `framing`; either end may use it instead.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Sequence

import numpy as np

from hearth.plan.phases import Phase
from hearth.plan.value_formats import ValueFormat
from hearth.transport.base import Buffer
from hearth.wire.codec import Array, wire_layout
from hearth.wire.framing import TileKey, encode_header, write_key

_FLOAT32 = np.dtype("<f4")


class PreparedTile:
    """The message of a float32 tile of one phase and shape, in a value format with one buffer. Not thread-safe.

    `values`: the values of the next message, in the format's dtype; write them before `message`.
    """

    def __init__(self, token: bytes, phase: Phase, shape: tuple[int, ...], values: ValueFormat) -> None:
        """Raises FrameTooLarge."""
        self._header = bytearray(encode_header(token, TileKey(0, 0, 0, phase, 0, 0), _FLOAT32, shape, values))
        ((self._dtype, self._shape),) = wire_layout(values, _FLOAT32, shape)
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
