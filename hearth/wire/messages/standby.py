"""Messages between a leading coordinator and its standby."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from hearth.wire.messages.agent import Configuration
from hearth.wire.messages.base import Bytes, Message, Name

# Path of a file of the leader's state, relative to the standby's copy. Each part begins with a letter or a digit, so that no
# path leaves the folder.
ReplicaPath = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*){0,3}$", max_length=512),
]


class Follow(Message):
    """Ask to be the standby of this coordinator. The answer is a stream of `ReplicaPart` and `LeaderAlive`, without an end."""

    name: Name


class ReplicaPart(Message):
    """A part of a file of the leader's state. Payload: its bytes, one frame. Bytes that no part holds are zero."""

    path: ReplicaPath
    num_bytes: Bytes  # of the whole file
    offset: Bytes
    is_last: bool  # the file is complete with this part


class LeaderAlive(Message):
    """Sent by the leader at short intervals; `is_complete`: all files have been sent since the last change."""

    name: Name
    is_complete: bool
    configuration: Configuration | None
