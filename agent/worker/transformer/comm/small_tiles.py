"""Tiles of a few rows in prepared messages, for the one thread that exchanges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hearth.plan.common import BF16, EXACT, FP16, ValueFormat
from hearth.plan.phases import Phase
from hearth.transport.base import Buffer
from hearth.wire.codec import NUMPY_CASTS, Array, Codec
from hearth.wire.framing import MAX_SINGLE_FRAME_BYTES, TileForm, TileKey, format_code

# By code. int8 is not among them, since its scales are a buffer of their own.
_FORMATS: dict[int, ValueFormat] = {each.code: each for each in (EXACT, BF16, FP16)}
_MAX_FORMS = 64  # of messages: two phases, by the number of rows that running sequences add up to


class _Form:
    """A tile of one phase and shape in one format, and its conversions: for few values, a call costs more than its work."""

    def __init__(self, token: bytes, phase: Phase, shape: tuple[int, ...], values: ValueFormat) -> None:
        self.tile = TileForm(token, phase, shape, values)
        self._values = values
        self._shape = shape
        array = self.tile.values if values is not BF16 else self.tile.values.view(np.int16)
        with torch.inference_mode(False):  # else only code in inference mode could write to it
            tensor = torch.from_numpy(array)
            self._tensor = tensor.view(torch.bfloat16) if values is BF16 else tensor
        # By source: float32 values, and the upper halves of their bits.
        self._widened: dict[int, tuple[Array, Array]] = {}

    def write(self, rows: Tensor) -> bool:
        """Convert rows for the following messages; False if the format cannot hold a value."""
        self._tensor.copy_(rows)
        return self._values is not FP16 or bool(np.isfinite(self.tile.values).all())

    def to_float32(self, values: Array, source: int) -> Array:
        """The values of a received message in float32, valid until the next one of this source."""
        if self._values is EXACT:
            return values
        if self._values is FP16:
            return NUMPY_CASTS.from_fp16(values)
        widened = self._widened.get(source)
        if widened is None:
            bits = np.zeros(self._shape, "<u4")
            widened = self._widened[source] = bits.view("<f4"), bits.view("<u2").reshape(*self._shape, 2)[..., 1]
        np.copyto(widened[1], values)
        return widened[0]


class Broadcast(NamedTuple):
    """How few rows are sent to all peers: the forms in use, and for each peer its number, its message and its codec."""

    forms: Sequence[_Form]
    peers: Sequence[tuple[int, TileForm, Codec]]

    def write(self, rows: Tensor) -> bool:
        """Convert rows for the following messages; False if a format cannot hold a value."""
        return all(form.write(rows) for form in self.forms)


class SmallTiles:
    """The messages of float32 tiles of one plan, by phase, shape and value format. Not thread-safe."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._form = lru_cache(_MAX_FORMS)(self._new_form)

    @staticmethod
    def fit(rows: Tensor) -> bool:
        """Whether one frame holds these rows, in any format."""
        return rows.dtype is torch.float32 and 0 < rows.nbytes <= MAX_SINGLE_FRAME_BYTES

    def broadcast(self, phase: Phase, rows: Tensor, codecs: Mapping[int, Codec]) -> Broadcast | None:
        """The broadcast of rows of this shape over these links; None if a link needs another message."""
        if any(each.values.code not in _FORMATS or not each.skips_lz4(rows.nbytes) for each in codecs.values()):
            return None
        forms = {code: self._form(int(phase), rows.shape, code) for code in {c.values.code for c in codecs.values()}}
        peers = [(peer, forms[codec.values.code].tile, codec) for peer, codec in codecs.items()]
        return Broadcast(tuple(forms.values()), peers)

    def read(self, key: TileKey, shape: tuple[int, ...], frames: Sequence[Buffer]) -> Array | None:
        """The values of a received message in float32, valid until the next one of its source; None if it is another tile."""
        code = format_code(frames[0])
        if code not in _FORMATS:
            return None
        form = self._form(int(key.phase), shape, code)
        values = form.tile.read(key, frames)
        return None if values is None else form.to_float32(values, key.source)

    def _new_form(self, phase: int, shape: tuple[int, ...], code: int) -> _Form:
        return _Form(self._token, Phase(phase), tuple(shape), _FORMATS[code])
