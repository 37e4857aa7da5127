"""All messages of the protocol: frozen, validated, msgpack on the wire.

Requests have imperative names (`Load`), answers state a result (`WorkerBound`). Tensors and chunk bytes are sent as payload
frames after a message, never inside it. Every message contains the protocol version (`v`; absent in version 1). Unknown fields
are ignored. An unknown tag (`t`) raises `UnknownMessage`; a different version raises `ProtocolMismatch`, except for the few
messages that have the same form in all versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgpack
from pydantic import ValidationError

from hearth.errors import BadMessage, FrameTooLarge, UnknownMessage
from hearth.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from hearth.validation import first_error
from hearth.wire.envelope import NOT_MSGPACK, message_tag
from hearth.wire.messages.agent import *  # noqa: F403
from hearth.wire.messages.base import *  # noqa: F403
from hearth.wire.messages.base import MAX_LIST_ITEMS, MESSAGE_TYPES, Message
from hearth.wire.messages.client import *  # noqa: F403
from hearth.wire.messages.events import *  # noqa: F403
from hearth.wire.messages.worker import *  # noqa: F403

_MAX_REASON_CHARACTERS = 500  # the name of an invalid field comes from the peer, and may be as long as the message
ANY_VERSION_TAGS = frozenset(tag for tag, kind in MESSAGE_TYPES.items() if kind.any_version)


def encode(message: Message) -> bytes:
    """Encode a message. Raises FrameTooLarge if the peer would have to refuse it."""
    fields = {"v": PROTOCOL_VERSION, "t": message.tag, **message.__pydantic_serializer__.to_python(message)}
    data: bytes = msgpack.packb(fields, use_bin_type=True)
    if len(data) > MAX_MESSAGE_BYTES:
        raise FrameTooLarge(num_bytes=len(data), cap_bytes=MAX_MESSAGE_BYTES)
    return data


class Sizes(NamedTuple):
    """The largest parts of a message that a receiver decodes."""

    list_items: int
    map_entries: int
    string_bytes: int


PEER_SIZES = Sizes(MAX_LIST_ITEMS, 4096, MAX_MESSAGE_BYTES)  # of agents, workers and coordinators of this home
CLIENT_SIZES = Sizes(4096, 64, 4 << 16)  # the most that a request of a client may hold; a character takes up to 4 bytes


def message_type(
    data: bytes | memoryview, accepted: Mapping[str, type[Message]] = MappingProxyType(MESSAGE_TYPES)
) -> type[Message]:
    """The type of an encoded message, of which only the tag and the version are read.

    Raises FrameTooLarge, BadMessage, ProtocolMismatch, and UnknownMessage for a type that is not in `accepted`.
    """
    tag = message_tag(data, ANY_VERSION_TAGS)
    known = accepted.get(tag)
    if known is None:
        raise UnknownMessage(tag=tag[:64])
    return known


def decode(data: bytes | memoryview, kind: type[Message] | None = None, sizes: Sizes = PEER_SIZES) -> Message:
    """Decode a message, of the type `kind` that `message_type` has found.

    Raises only FrameTooLarge, BadMessage, ProtocolMismatch or UnknownMessage.
    """
    kind = kind or message_type(data)
    try:
        fields: Any = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_array_len=sizes.list_items,
            max_map_len=sizes.map_entries,
            max_str_len=sizes.string_bytes,
            max_bin_len=sizes.string_bytes,
        )
    except NOT_MSGPACK as error:
        raise BadMessage(reason=f"not valid msgpack, or too large a part ({type(error).__name__})") from None
    try:
        message: Message = kind.__pydantic_validator__.validate_python(fields)
    except ValidationError as error:
        raise BadMessage(reason=first_error(error)[:_MAX_REASON_CHARACTERS]) from None
    return message
