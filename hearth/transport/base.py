"""The contract of the data plane: frames between ranks of one plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview


class Received(NamedTuple):
    """`source` is authenticated by the transport; `frames` are read-only and stay valid as long as they are held."""

    source: int
    frames: list[memoryview]


class Peer(Protocol):
    """Another rank of the plan, and where its transport listens. `public_key` is Z85, of this plan only."""

    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def public_key(self) -> str: ...


class Transport(Protocol):
    """Messages of several frames between the ranks of one plan: ordered per pair, reliable while both ends live."""

    rank: int
    num_ranks: int

    def send(self, target: int, frames: Sequence[Buffer]) -> None:
        """Queue a message and return at once; callable from any thread. The buffers must not change until sent."""

    def receive(self, timeout_seconds: float) -> Received | None:
        """The next message from any peer, or None when the time is up or the transport was closed. One thread only."""

    def close(self) -> None:
        """Drop what is queued and wake the receiver. May be called twice."""
