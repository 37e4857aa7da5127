"""What the coordinator and the process of its client port exchange over their private socket. Pure.

Every message is `[kind, ...]`. The process numbers the requests; the frames of a client's message, body and payload, follow
as they are. Both ends come from the same installation, so that this format has no version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coordinator.port.access import Access, MessageRule
from hearth.wire.intake import Limits

# From the process.
REQUEST = b"R"  # number, public key, body, payload...
CANCEL = b"C"  # number: the caller no longer waits; it may return
GIVE_UP = b"G"  # number: the caller has cancelled the request, and will not return
LEFT = b"K"  # number: a `LARGE_ANSWER` has left
STATE = b"S"  # a `PortState`; sent at an interval, as a sign of life
# From the coordinator.
ANSWER = b"A"  # number, body, payload...: one of several answers
LARGE_ANSWER = b"B"  # as `ANSWER`; the process answers with `LEFT`
LAST_ANSWER = b"L"  # number, body, payload...
END = b"E"  # number: a stream has ended
ACCESS = b"P"  # an `Access`, which replaces the one before
STOP = b"X"  # end once all answers have left

NUMBER_BYTES = 8  # of a request's number; a counter that never wraps
# Answers of at least this size are counted until they have left, and those of a stream are acknowledged. For smaller ones, that
# would cost more time than they take.
LARGE_ANSWER_BYTES = 16 << 10
STATE_SECONDS = 0.5  # interval of the process's signs of life


class PortState(NamedTuple):
    """Counters of the process since its start."""

    refused_requests: int
    refused_connections: int

    @classmethod
    def decode(cls, data: bytes) -> PortState:
        """Decode an encoded value."""
        return cls(*json.loads(data))


class PortStart(NamedTuple):
    """What the process reads from its stdin. It holds the coordinator's secret key."""

    public_key: str
    secret_key: str
    listener: int  # file descriptor of the listening socket
    endpoint: str  # of the private socket
    memory_bytes: int  # limit of the process
    rules: Mapping[str, MessageRule]  # keyed by tag
    access: Access

    @classmethod
    def decode(cls, data: bytes) -> PortStart:
        """Decode an encoded value."""
        public_key, secret_key, listener, endpoint, memory_bytes, rules, access = json.loads(data)
        rules = {tag: MessageRule(*rule) for tag, rule in rules.items()}
        return cls(public_key, secret_key, listener, endpoint, memory_bytes, rules, _access(access))


def encode(value: PortState | PortStart | Access) -> bytes:
    """JSON: the second frame of `STATE` and of `ACCESS`, and the process's stdin."""
    return json.dumps(value).encode()


def decode_access(data: bytes) -> Access:
    """Decode an encoded `Access`."""
    return _access(json.loads(data))


def _access(fields: Sequence[Any]) -> Access:
    admins, apps, revoked, roles, app_limits, admin_limits, app_bytes = fields
    return Access(admins, apps, revoked, roles, Limits(*app_limits), Limits(*admin_limits), app_bytes)
