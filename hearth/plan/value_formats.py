"""Value formats of activations on the wire. Pure.

A new format needs one `ValueFormat` here and its conversion in `hearth.wire.codec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

ValueFormatName = Literal["exact", "bf16", "fp16", "int8"]


class ValueFormat(NamedTuple):
    """Encoding of float32 values on the wire. `code` is part of the protocol."""

    name: ValueFormatName
    code: int
    bytes_per_value: int
    bytes_per_row: int = 0  # in addition to the values: the scale of a quantised row

    def num_bytes(self, num_values: int, num_rows: int) -> int:
        """Bytes of a float32 tensor of `num_rows` rows (all axes but the last) on the wire, before lz4."""
        return num_values * self.bytes_per_value + num_rows * self.bytes_per_row


EXACT = ValueFormat("exact", 0, 4)
BF16 = ValueFormat("bf16", 1, 2)
FP16 = ValueFormat("fp16", 2, 2)
INT8 = ValueFormat("int8", 3, 1, 4)

VALUE_FORMATS: Mapping[ValueFormatName, ValueFormat] = {each.name: each for each in (EXACT, BF16, FP16, INT8)}
VALUE_FORMAT_NAMES: tuple[ValueFormatName, ...] = get_args(ValueFormatName)
BYTES_PER_VALUE: Mapping[ValueFormatName, int] = {name: each.bytes_per_value for name, each in VALUE_FORMATS.items()}
_BY_CODE = {each.code: each for each in VALUE_FORMATS.values()}


def format_by_code(code: int) -> ValueFormat:
    """The format with this wire code. Raises KeyError."""
    return _BY_CODE[code]
