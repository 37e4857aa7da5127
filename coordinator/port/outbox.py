"""Answers on their way to clients: in order for each connection, without waiting for a slow reader, and of limited size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from coordinator.port.requests import Send

# An answer that no buffer takes for this long has lost its reader: a client may pause, but its request must not occupy the
# devices for ever.
STALLED_SECONDS = 30.0
# Small answers that wait for one reader: more than a stream of tokens in `STALLED_SECONDS`.
_MAX_WAITING_BYTES = 1 << 20


class Tracker(Protocol):
    """Tells whether ZeroMQ has done with an answer, as `zmq.MessageTracker` does."""

    @property
    def done(self) -> bool: ...


# What became of an answer: it was taken, the buffer is full, or the client is gone. A large one that was taken is tracked.
Outcome: TypeAlias = Tracker | Literal["taken", "full", "gone"]


class _Connection:
    """The answers to one connection that have not left."""

    def __init__(self, now: float) -> None:
        self.waiting: deque[Send] = deque()  # while its buffer is full
        self.waiting_bytes = 0  # of the small ones
        self.moved_at = now  # when an answer was taken last, while others wait
        self.leaving: deque[tuple[Tracker, Send]] = deque()  # large ones that were taken


class Outbox:
    """Sends answers with `send`, which never waits. `left(answer)` and `gone(connection)` are called for what happens later."""

    def __init__(
        self, send: Callable[[Send], Outcome], left: Callable[[Send], None], gone: Callable[[bytes], None]
    ) -> None:
        self._send = send
        self._left = left
        self._gone = gone
        self._connections: dict[bytes, _Connection] = {}

    @property
    def is_busy(self) -> bool:
        """Whether `poll` has something to do."""
        return bool(self._connections)

    def post(self, answer: Send, now: float) -> None:
        """Send an answer now, or after those that wait for the same client."""
        connection = self._connections.get(answer.identity)
        if connection is None or not connection.waiting:
            outcome = self._send(answer)
            if outcome == "taken":
                return
            if outcome == "gone":
                return self._give_up(answer)
            connection = self._connections.setdefault(answer.identity, _Connection(now))
            if outcome != "full":
                connection.leaving.append((outcome, answer))
                return
            connection.moved_at = now
        connection.waiting.append(answer)
        if answer.num_bytes == 0:
            connection.waiting_bytes += sum(map(len, answer.frames))
            if connection.waiting_bytes > _MAX_WAITING_BYTES:
                self._abandon(answer.identity, connection)

    def poll(self, now: float) -> None:
        """Note what has left, and send what waits."""
        for identity, connection in list(self._connections.items()):
            while connection.leaving and connection.leaving[0][0].done:
                self._left(connection.leaving.popleft()[1])
            while connection.waiting and self._send_next(connection, now):
                pass
            if connection.waiting and now - connection.moved_at > STALLED_SECONDS:
                self._abandon(identity, connection)
            if not connection.waiting and not connection.leaving:
                del self._connections[identity]

    def _send_next(self, connection: _Connection, now: float) -> bool:
        """Send the first answer that waits. Returns False if the buffer is still full."""
        answer = connection.waiting[0]
        outcome = self._send(answer)
        if outcome == "full":
            return False
        connection.waiting.popleft()
        connection.moved_at = now
        if answer.num_bytes == 0:
            connection.waiting_bytes -= sum(map(len, answer.frames))
        if outcome == "gone":
            self._give_up(answer)
        elif outcome != "taken":
            connection.leaving.append((outcome, answer))
        return True

    def _abandon(self, identity: bytes, connection: _Connection) -> None:
        """Drop what waits for a client that does not read."""
        waiting, connection.waiting, connection.waiting_bytes = connection.waiting, deque(), 0
        for answer in waiting:
            if answer.num_bytes:
                self._left(answer)
        self._gone(identity)

    def _give_up(self, answer: Send) -> None:
        """Drop an answer whose client is gone."""
        if answer.num_bytes:
            self._left(answer)
        self._gone(answer.identity)
