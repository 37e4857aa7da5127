"""The interface of the data plane's transport: messages between the ranks of one plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview


class Received(NamedTuple):
    """A received message. The transport has authenticated `source`; `frames` are read-only and stay valid while referenced."""

    source: int
    frames: list[memoryview]


class PeerAddress(Protocol):
    """Another rank of the plan, and the address of its transport. `public_key` is in Z85 and used for this plan only."""

    @property
    def rank(self) -> int:
        """Its rank in the plan."""

    @property
    def host(self) -> str:
        """Its host name or IP address."""

    @property
    def port(self) -> int:
        """Its TCP port."""

    @property
    def public_key(self) -> str:
        """Its public key in Z85."""

    @property
    def bytes_per_second(self) -> float:
        """The measured rate of the link to it."""


class Transport(Protocol):
    """Sends multi-frame messages between the ranks of one plan: ordered per pair, reliable while both ends are alive.

    After a connection broke, the newest messages may arrive a second time, and later ones before them.
    """

    rank: int
    num_ranks: int

    def send(self, target: int, frames: Sequence[Buffer], background: bool = False) -> None:
        """Queue a message and return at once. Thread-safe. Buffers that the transport does not copy must never change.

        No step waits for a `background` message, so it takes no room from the others that are sent again after a break.
        """

    def receive(self, timeout_seconds: float) -> Received | None:
        """Return the next message from any peer, or None after the timeout or when closed. For one thread at a time."""

    def interrupt(self) -> None:
        """Make a running `receive` return None; if none is running, the next one. Thread-safe."""

    def close(self) -> None:
        """Drop queued messages and wake the receiver. May be called more than once."""
