"""Messages between a leading coordinator and its standby."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from hearth.wire.messages.agent import Configuration
from hearth.wire.messages.base import Bytes, Message, Name, PublicKey, WireModel

_MAX_PATH_PARTS = 16  # the weights of an ONNX file may lie in folders below it


def is_replica_path(path: str) -> bool:
    """Whether a path stays inside the folder that it is relative to. The first part is a plain name, none is hidden there."""
    parts = path.split("/")
    return (
        len(parts) <= _MAX_PATH_PARTS
        and path.isprintable()
        and parts[0][:1].isalnum()
        and all(part not in ("", ".", "..") for part in parts)
    )


def _checked(path: str) -> str:
    if not is_replica_path(path):
        raise ValueError("the path leaves the folder of the copy, or is not printable")
    return path


# Path of a file of the leader's state, relative to the standby's copy.
ReplicaPath = Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(_checked)]

# Number that a leader gives to what it has sent to one standby; 0: none.
Receipt = Annotated[int, Field(ge=0, lt=1 << 63)]

MAX_KEYS = 1000  # of one list
# Public keys, each with the name of its app or device.
NamedKeys = Annotated[tuple[tuple[PublicKey, Name], ...], Field(max_length=MAX_KEYS)]


class KnownKeys(WireModel):
    """The keys of apps, or of devices, that a coordinator knows."""

    admitted: NamedKeys = ()
    revoked: NamedKeys = ()
    roles: NamedKeys = ()  # of admitted keys of apps with another role than "app": each with its role


class Follow(Message):
    """Ask to be the standby of this coordinator. The answer is a stream of `ReplicaPart` and `LeaderAlive`, without an end.

    With `takes_over`, accept the place of a leader that leaves; the answer is `Done`. With `confirmed`, say that all that came
    before a `LeaderAlive` with this receipt is stored; the answer is `Done`. `confirms`: this standby does so.

    `apps` and `devices`: the keys that this standby knows; it may have led while the present leader was cut off.
    """

    name: Name
    takes_over: bool = False
    confirms: bool = False
    confirmed: Receipt = 0
    apps: KnownKeys = KnownKeys()
    devices: KnownKeys = KnownKeys()


class ReplicaPart(Message):
    """A part of a file of the leader's state. Payload: its bytes, one frame. Bytes that no part holds are zero."""

    path: ReplicaPath
    num_bytes: Bytes  # of the whole file
    offset: Bytes
    is_last: bool  # the file is complete with this part


class LeaderAlive(Message):
    """Sent by the leader at short intervals; `is_complete`: all files have been sent since the last change.

    `is_leaving`: it stops, and leaves its devices to the standby that accepts (`Follow.takes_over`). `receipt`: the standby
    confirms it once it has stored all that came before (`Follow.confirmed`).
    """

    name: Name
    is_complete: bool
    configuration: Configuration | None
    is_leaving: bool = False
    receipt: Receipt = 0
