"""Damaged messages for the fuzzer, made from valid ones. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack

_MOST_BYTES = 4 << 10  # of a repeated part: large enough to be seen, small enough for thousands of frames a second
_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 62, -(1 << 62), 0.5, float("inf"), float("nan"), "", "x" * 300, b"", b"\xff" * 40, [], {},
    [[[[[]]]]], [None] * 500, {"t": "hello"}, {1: 2}, "\x00", "../../etc/passwd",
)  # fmt: skip


def mutated(valid: Sequence[bytes], chance: random.Random) -> bytes:
    """One frame: bytes changed, cut, repeated or added, a field changed or exchanged, or nothing but noise."""
    data = bytearray(chance.choice(valid))
    match chance.randrange(8):
        case 0:
            return chance.randbytes(chance.randrange(200))
        case 1:
            return bytes(data[: chance.randrange(len(data) + 1)])
        case 2:
            return bytes(data) + chance.randbytes(chance.randrange(50))
        case 3:
            start = chance.randrange(len(data))
            part = data[start : start + chance.randrange(1, 20)]
            return bytes(data[:start] + part * chance.randrange(1, _MOST_BYTES // len(part)) + data[start:])
        case 4 | 5:
            return _with_other_field(bytes(data), valid, chance)
        case _:
            return with_changed_bytes(bytes(data), chance)


def with_changed_bytes(data: bytes, chance: random.Random) -> bytes:
    """The same with up to seven other bytes, sometimes cut as well."""
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 8) if data else 0):
        changed[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(changed if chance.random() < 0.8 else changed[: chance.randrange(len(data) + 1)])


def _with_other_field(data: bytes, valid: Sequence[bytes], chance: random.Random) -> bytes:
    """The message with one field that has an odd value, or one of another message."""
    fields = msgpack.unpackb(data, raw=False)
    name = chance.choice(sorted(fields))
    if chance.random() < 0.5:
        fields[name] = chance.choice(_ODD)
    else:
        others = msgpack.unpackb(chance.choice(valid), raw=False)
        fields[name] = others[chance.choice(sorted(others))]
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed
