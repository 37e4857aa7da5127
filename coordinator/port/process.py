"""The process that owns the client port: sockets, limits, and the loop between clients and the coordinator.

The limits of keys apply to complete messages. What ZeroMQ holds of others has no limit: messages without an end, those of a
connection that it does not read, large frames of a stranger's handshake. So above a limit of the memory of this process, the
connections end that receive most (`MemoryGuard`).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from coordinator.port import protocol
from coordinator.port.outbox import STALLED_SECONDS, Outbox, Outcome
from coordinator.port.protocol import PortStart, PortState
from coordinator.port.requests import Action, ClientRequests, Disconnect, Forward, Send
from hearth.platform import curve
from hearth.platform.connections import end_connection, received_bytes
from hearth.platform.machine import give_back_freed_buffers
from hearth.wire.zmq_sockets import DirectSocket, direct_socket, end_connection_of

log = logging.getLogger(__name__)

_ZAP_DOMAIN = "coordinator"
# Answers in the buffer of one connection. Those that are not counted are smaller than `protocol.LARGE_ANSWER_BYTES`, so that
# they take up 4 MiB at most.
_ANSWERS_PER_CONNECTION = 256
# Messages that are handled in a row: of the coordinator first, since its answers end requests and free memory.
_ANSWERS_IN_A_ROW = 256
_REQUESTS_IN_A_ROW = 64
# Interval at which answers are looked at that have not left: a stream of large answers waits for it.
_POLL_SECONDS = 0.005
_FLUSH_SECONDS = 2.0  # for the last answers to leave
# A coordinator that is stopped (SIGSTOP) for this long serves no one: this process ends, and with it the connections, so that
# clients turn to another coordinator. One that ends is noticed at once.
_STOPPED_SECONDS = 1.5
_OOM_SCORE = 500  # of 1000: the kernel ends this process, which is soon started again, before the coordinator
# Interval of looks at the memory; the loop turns at least every 0.5 s. A fast network brings 0.1 GB in 0.1 s.
_LOOK_SECONDS = 0.1
# Above this, freed memory is given back to the kernel, so often: a flood leaves as much as had been received and not read.
_TIDY_BYTES = 64 << 20
_TIDY_SECONDS = 2.0
# Received by a connection between two looks: below this, none is the cause of the growth, but one that was so earlier.
_CAUSE_BYTES = 1 << 20


class PortProcess:
    """One run of the process."""

    def __init__(self, start: PortStart) -> None:
        """Listen, and connect to the coordinator."""
        self._refusals = curve.Refusals("messages")
        self._memory = MemoryGuard(start.memory_bytes)
        self._context = zmq.Context()
        self._requests = ClientRequests(start.rules, start.access, self._note_refusal)
        self._outbox = Outbox(self._try_to_send, self._left, self._gone)
        self._authenticator = curve.PolledAuthenticator(self._context)
        self._gatekeeper = curve.Gatekeeper(self._authenticator)
        self._gatekeeper.admit(_ZAP_DOMAIN, self._requests.admits)
        self._gatekeeper.start()
        self._coordinator = direct_socket(self._context, zmq.DEALER)
        # What is under way is bounded by the limits of the requests.
        self._coordinator.sndhwm = self._coordinator.rcvhwm = 0
        self._coordinator.linger = 0
        self._coordinator.connect(start.endpoint)
        self._clients = direct_socket(self._context, zmq.ROUTER)
        curve.secure_server(self._clients, curve.KeyPair(start.public_key, start.secret_key), _ZAP_DOMAIN)
        curve.limit_connections(self._clients)
        self._clients.sndhwm = _ANSWERS_PER_CONNECTION
        self._clients.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise an error for an answer to a caller that is gone
        # The kernel ends a connection that nobody reads.
        self._clients.setsockopt(zmq.TCP_MAXRT, int(STALLED_SECONDS * 1000))
        self._clients.setsockopt(zmq.USE_FD, start.listener)
        self._clients.bind("tcp://127.0.0.1:*")  # the address is that of the listening socket
        self._parent = os.getppid()
        self._stopped_since = math.inf
        self._ended = False

    def run(self) -> None:
        """Serve until the coordinator says `STOP`, has ended, or is stopped."""
        poller = zmq.Poller()
        for each in (self._coordinator, self._clients, self._authenticator.zap_socket):
            poller.register(each, zmq.POLLIN)
        next_state = 0.0
        while not self._ended:
            now = time.monotonic()
            if now >= next_state:
                if self._is_coordinator_gone(now):
                    return
                state = PortState(self._refusals.count, self._gatekeeper.refusals.count)
                self._coordinator.send_frames([protocol.STATE, protocol.encode(state)])
                next_state = now + protocol.STATE_SECONDS
            ready = dict(poller.poll(self._milliseconds_until(next_state)))
            now = time.monotonic()
            if num_ended := self._memory.look(now):
                log.warning("the memory is short: %d connections were ended", num_ended)
            if self._authenticator.zap_socket in ready:
                self._authenticator.answer()
            if self._coordinator in ready:
                self._drain(self._coordinator, _ANSWERS_IN_A_ROW, self._hear_coordinator, now)
            if self._outbox.is_busy:
                self._outbox.poll(now)
            if self._clients in ready:
                self._drain(self._clients, _REQUESTS_IN_A_ROW, self._hear_client, now)
            self._act(self._requests.start_due(now), now)

    def close(self) -> None:
        """Give the last answers time to leave, and close the port."""
        self._clients.close(linger=int(_FLUSH_SECONDS * 1000))
        self._coordinator.close()
        self._gatekeeper.stop()
        self._context.term()

    def _milliseconds_until(self, next_state: float) -> int:
        deadlines = [next_state]
        if self._requests.next_start is not None:
            deadlines.append(self._requests.next_start)
        seconds = max(min(deadlines) - time.monotonic(), 0.0)
        return math.ceil(1000 * (min(seconds, _POLL_SECONDS) if self._outbox.is_busy else seconds))

    def _drain(self, source: DirectSocket, most: int, handle: Any, now: float) -> None:
        for _ in range(most):
            if (frames := source.receive_frames()) is None:
                return
            handle(frames, now)

    def _hear_client(self, frames: list[zmq.Frame], now: float) -> None:
        self._act(self._requests.receive(frames, curve.user_id(frames[-1]), now), now)

    def _hear_coordinator(self, frames: list[zmq.Frame], now: float) -> None:
        match frames[0].bytes:
            case protocol.STOP:
                self._ended = True
            case protocol.ACCESS:
                self._act(self._requests.change_access(protocol.decode_access(frames[1].bytes)), now)
            case _:
                self._act(self._requests.answer(frames), now)

    def _act(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Forward):
                self._coordinator.send_frames(action.frames)
            elif isinstance(action, Disconnect):
                end_connection_of(action.frame)
            else:
                self._outbox.post(action, now)

    def _try_to_send(self, answer: Send) -> Outcome:
        """Send without waiting. The largest frame of a large answer is tracked: ZeroMQ encrypts and sends frames in order."""
        frames, tracker = list(answer.frames), None
        if answer.num_bytes:
            largest = max(range(2, len(frames)), key=lambda index: len(frames[index]))
            frames[largest] = zmq.Frame(frames[largest].buffer, track=True, copy=False, copy_threshold=0)
            tracker = frames[largest].tracker
        try:
            self._clients.send_frames(frames)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "gone"
        return tracker or "taken"

    def _left(self, answer: Send) -> None:
        self._act(self._requests.left(answer), time.monotonic())

    def _gone(self, identity: bytes) -> None:
        self._act(self._requests.gone(identity), time.monotonic())

    def _note_refusal(self, reason: str, public_key: str) -> None:
        self._refusals.note(f"{reason}, of {curve.fingerprint(public_key)}")

    def _is_coordinator_gone(self, now: float) -> bool:
        """Whether the coordinator has ended, or has been stopped for a while."""
        if os.getppid() != self._parent:
            return True
        with suppress(OSError):  # a system without /proc
            stat = Path(f"/proc/{self._parent}/stat").read_bytes()
            if stat.rpartition(b")")[2].split()[0] not in (b"T", b"t"):
                self._stopped_since = math.inf
            else:
                self._stopped_since = min(self._stopped_since, now)
        return now - self._stopped_since >= _STOPPED_SECONDS


def prefer_as_victim() -> None:
    """Have the kernel end this process, which is soon started again, before others when the device's memory is short."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


def heaviest(before: Mapping[int, int], received: Mapping[int, int]) -> list[int]:
    """The connections that have received most since the last look, or in all if none has received much since."""
    amounts = {descriptor: total - before.get(descriptor, 0) for descriptor, total in received.items()}
    if max(amounts.values(), default=0) < _CAUSE_BYTES:
        amounts = dict(received)
    most = max(amounts.values(), default=0)
    return [descriptor for descriptor, amount in amounts.items() if amount > most // 2]


def resident_bytes() -> int:
    """Memory that this process takes; 0 on a system without /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class MemoryGuard:
    """Ends connections while the process takes more than `limit_bytes`."""

    def __init__(
        self,
        limit_bytes: int,
        resident: Callable[[], int] = resident_bytes,
        received: Callable[[], Mapping[int, int]] = received_bytes,
        end: Callable[[int], None] = end_connection,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._resident = resident
        self._received = received
        self._end = end
        self._next_look = self._next_tidy = 0.0
        self._before: Mapping[int, int] = {}  # bytes that each connection had received at the last look

    def look(self, now: float) -> int:
        """Look at the memory, if it is time for that. Returns the number of connections that were ended."""
        if now < self._next_look:
            return 0
        self._next_look = now + _LOOK_SECONDS
        resident = self._resident()
        if resident > self._limit_bytes or (resident > _TIDY_BYTES and now >= self._next_tidy):
            self._next_tidy = now + _TIDY_SECONDS
            give_back_freed_buffers()
            resident = self._resident()
        if resident <= self._limit_bytes // 2:
            return 0
        received = self._received()
        before, self._before = self._before, received
        if resident <= self._limit_bytes:
            return 0
        causes = heaviest(before, received)
        for descriptor in causes:
            self._end(descriptor)
        return len(causes)
