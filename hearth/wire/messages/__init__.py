"""All messages of the protocol: frozen, validated, msgpack on the wire.

Requests have imperative names (`Load`), answers state a result (`WorkerBound`). Tensors and chunk bytes are sent as payload
frames after a message, never inside it. Every message contains the protocol version (`v`; absent in version 1). Unknown fields
are ignored. An unknown tag (`t`) raises `UnknownMessage`; a different version raises `ProtocolMismatch`, except for the few
messages that have the same form in all versions.
"""

from __future__ import annotations

from typing import Any

import msgpack
from pydantic import ValidationError

from hearth.errors import BadMessage, FrameTooLarge, ProtocolMismatch, UnknownMessage
from hearth.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from hearth.validation import first_error
from hearth.wire.messages.agent import *  # noqa: F403
from hearth.wire.messages.base import *  # noqa: F403
from hearth.wire.messages.base import MESSAGE_TYPES, Message
from hearth.wire.messages.client import *  # noqa: F403
from hearth.wire.messages.worker import *  # noqa: F403

_MAX_REASON_CHARACTERS = 500  # the name of an invalid field comes from the peer, and may be as long as the message


def encode(message: Message) -> bytes:
    """Encode a message. Raises FrameTooLarge if the peer would have to refuse it."""
    fields = {"v": PROTOCOL_VERSION, "t": message.tag, **message.__pydantic_serializer__.to_python(message)}
    data: bytes = msgpack.packb(fields, use_bin_type=True)
    if len(data) > MAX_MESSAGE_BYTES:
        raise FrameTooLarge(num_bytes=len(data), cap_bytes=MAX_MESSAGE_BYTES)
    return data


def decode(data: bytes | memoryview) -> Message:
    """Decode a message. Raises only FrameTooLarge, BadMessage, ProtocolMismatch or UnknownMessage."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise FrameTooLarge(num_bytes=len(data), cap_bytes=MAX_MESSAGE_BYTES)
    try:
        fields: Any = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise BadMessage(reason=f"not valid msgpack ({type(error).__name__})") from None
    if not isinstance(fields, dict):
        raise BadMessage(reason=f"a map was expected, not {type(fields).__name__}")
    tag, version = fields.get("t"), fields.get("v", 1)
    message_type = MESSAGE_TYPES.get(tag) if isinstance(tag, str) else None
    if version != PROTOCOL_VERSION and not (message_type is not None and message_type.any_version):
        if not isinstance(version, int):
            raise BadMessage(reason="the protocol version is not a number")
        raise ProtocolMismatch(peer="The other end", ours=PROTOCOL_VERSION, theirs=version)
    if message_type is None:
        raise UnknownMessage(tag=str(tag)[:64])
    try:
        message: Message = message_type.__pydantic_validator__.validate_python(fields)
    except ValidationError as error:
        raise BadMessage(reason=first_error(error)[:_MAX_REASON_CHARACTERS]) from None
    return message
