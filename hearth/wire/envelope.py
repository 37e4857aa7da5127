"""The envelope of a message: its tag and protocol version, read without decoding the message or importing its type. Pure."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgpack

from hearth.errors import BadMessage, FrameTooLarge, ProtocolMismatch, UnknownMessage
from hearth.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION

_HEAD_BYTES = 256  # of a message, in which its tag and version are expected
# What msgpack raises for bytes that hold no message.
NOT_MSGPACK = (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException)


def message_tag(data: bytes | memoryview, any_version: Container[str]) -> str:
    """The tag of an encoded message. Messages whose tags are in `any_version` may have any protocol version.

    Raises FrameTooLarge, BadMessage, ProtocolMismatch, and UnknownMessage for a tag that is no text.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise FrameTooLarge(num_bytes=len(data), cap_bytes=MAX_MESSAGE_BYTES)
    try:
        tag, version = _tag_and_version(data)
    except NOT_MSGPACK as error:
        raise BadMessage(reason=f"not valid msgpack ({type(error).__name__})") from None
    if version != PROTOCOL_VERSION and not (isinstance(tag, str) and tag in any_version):
        if not isinstance(version, int):
            raise BadMessage(reason="the protocol version is not a number")
        raise ProtocolMismatch(peer="The other end", ours=PROTOCOL_VERSION, theirs=version)
    if not isinstance(tag, str):
        raise UnknownMessage(tag=str(tag)[:64])
    return tag


def _tag_and_version(data: bytes | memoryview) -> tuple[Any, Any]:
    """The fields `t` and `v`. Our encoder writes them first; else other fields are skipped, for which no object is made."""
    try:
        return _find_tag_and_version(data[:_HEAD_BYTES])
    except msgpack.OutOfData:
        return _find_tag_and_version(data)


def _find_tag_and_version(data: bytes | memoryview) -> tuple[Any, Any]:
    unpacker = msgpack.Unpacker(
        read_size=_HEAD_BYTES,
        max_buffer_size=MAX_MESSAGE_BYTES,
        max_str_len=256,
        max_bin_len=256,
        max_array_len=0,
        max_map_len=0,
    )
    unpacker.feed(data)
    found: dict[str, Any] = {}
    for _ in range(unpacker.read_map_header()):
        name = unpacker.unpack()
        if name in ("t", "v"):
            found[name] = unpacker.unpack()
            if len(found) == 2:
                break
        else:
            unpacker.skip()
    return found.get("t"), found.get("v", 1)
