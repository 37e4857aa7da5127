"""CURVE: key pairs, encrypted ZeroMQ sockets, and the gatekeeper (ZAP) that decides which public keys pass their handshakes.

It imports neither asyncio nor pydantic: the client port's process, which must stay small, uses it. `loop_gatekeeper` has the
gatekeeper of a program with an event loop.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import zmq
from zmq.auth.base import Authenticator

from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES

log = logging.getLogger(__name__)

_HEARTBEAT_MS = 2000  # interval of ZeroMQ heartbeats, which detect a peer that vanished without closing its connection
_HEARTBEAT_TIMEOUT_MS = 6000  # three intervals: bad Wi-Fi may lose two heartbeats
# The same for a client that can change to another server and repeat its requests. ZeroMQ answers in a thread of its own, so
# that a busy server is not silent. Wi-Fi that is silent for longer costs the client a repetition.
_QUICK_HEARTBEAT_MS = 1000
_QUICK_HEARTBEAT_TIMEOUT_MS = 2000
# Of one attempt to connect. The kernel repeats it after 1 s, then after 2, 4 and 8 s more: a link that was cut for 10 s would
# be found mended only after 15 s. So each attempt has one repetition.
_CONNECT_MS = 2000
# A connection whose handshake takes longer is closed: idle ones must not use up the descriptors. A busy event loop answers
# within a second or two; clients take several closed handshakes in a row for a wrong key.
_HANDSHAKE_MS = 10_000
BACKLOG = 1024  # connections that the kernel accepts while ZeroMQ is busy; more than a home has
_LOG_SECONDS = 10.0  # interval of log lines about refusals: an attack leaves a trace and cannot fill a disk


class KeyPair(NamedTuple):
    """A CURVE key pair in Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


def new_keypair() -> KeyPair:
    """Generate a random CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def fingerprint(public_key: str) -> str:
    """A short identifier of a public key (64 bits of its SHA-256), safe to show and to advertise."""
    return hashlib.sha256(public_key.encode()).hexdigest()[:16]


# ---- sockets --------------------------------------------------------------------------------------------------------


def harden(socket: zmq.Socket[Any]) -> None:
    """Set the options that every socket has, also the unencrypted ones of the data plane: limits of sizes and times."""
    socket.linger = 0
    # No limit of messages that nobody has read yet. At a limit, libzmq 4.3.5 stops reading the connection; if that then
    # breaks, the next heartbeat of either end fails the assertion `!_io_error` and ends this process. In the data plane, a full
    # queue would also stall the ring.
    socket.rcvhwm = 0
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    socket.setsockopt(zmq.IPV6, 1)


def secure_server(socket: zmq.Socket[Any], keypair: KeyPair, domain: str) -> None:
    """Make a socket a CURVE server that admits only the keys that the gatekeeper admits to `domain`.

    ZAP_ENFORCE_DOMAIN is required: without it, a server admits any key while no gatekeeper runs.
    """
    harden(socket)
    socket.curve_server = True
    socket.curve_secretkey = keypair.secret.encode()
    socket.curve_publickey = keypair.public.encode()
    socket.zap_domain = domain.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def limit_connections(socket: zmq.Socket[Any]) -> None:
    """Limit what idle connections to a server's socket take up. Call it before `bind`."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)


def detect_silence(socket: zmq.Socket[Any]) -> None:
    """Make a client's socket end its connection within 3 s if the server is silent, instead of 8 s."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _QUICK_HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _QUICK_HEARTBEAT_TIMEOUT_MS)


def secure_client(socket: zmq.Socket[Any], own: KeyPair, server_public: str) -> None:
    """Make a socket a CURVE client that connects only to the server with the public key `server_public`."""
    harden(socket)
    socket.curve_serverkey = server_public.encode()
    socket.curve_secretkey = own.secret.encode()
    socket.curve_publickey = own.public.encode()


def user_id(frame: zmq.Frame) -> str:
    """The authenticated public key (Z85) of the peer that sent a frame."""
    return str(frame.get("User-Id"))


# ---- handshakes -----------------------------------------------------------------------------------------------------


class Refusals:
    """`count` refusals since the start. The first one is logged at once; later ones are summed up every 10 s."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._what = what
        self._clock = clock
        self._logged_count = 0
        self._logged_at = -math.inf

    def note(self, reason: str) -> None:
        """Count one refusal. `reason` names the cause and the fingerprint of the key, for the log."""
        self.count += 1
        now = self._clock()
        if now - self._logged_at >= _LOG_SECONDS:
            log.warning("%s refused: %d more; the last: %s", self._what, self.count - self._logged_count, reason)
            self._logged_at, self._logged_count = now, self.count


AdmitRule = Callable[[str], bool]


class _Callback:
    """A credentials provider as pyzmq expects it. A rule that fails refuses this key only."""

    def __init__(self, admit: AdmitRule, refusals: Refusals) -> None:
        self._admit = admit
        self._refusals = refusals

    def callback(self, domain: str, key: bytes) -> bool:
        public_key = key.decode()
        try:
            admitted = self._admit(public_key)
            if not admitted:
                self._refusals.note(f"the key {fingerprint(public_key)}")
            return admitted
        except Exception:
            log.exception("whether %s may connect could not be decided; it is refused", fingerprint(public_key))
            return False


class PolledAuthenticator(Authenticator):
    """pyzmq's authenticator for a program that polls its sockets itself, and calls `answer` when `zap_socket` is readable."""

    def answer(self) -> None:
        """Answer one handshake."""
        message = self.zap_socket.recv_multipart(zmq.NOBLOCK)
        with suppress(StopIteration):
            self.handle_zap_message(message).send(None)  # our rules wait for nothing


class Gatekeeper:
    """The ZAP handler of a context. Each domain has its own rule; a domain without a rule admits no key.

    `refusals` counts the keys that were not admitted.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self.refusals = Refusals("connections")
        self._authenticator = authenticator
        # Without any rule, pyzmq falls back to stored certificates; this rule for an unused domain prevents that.
        self._authenticator.configure_curve_callback("-", _Callback(lambda key: False, self.refusals))

    def admit(self, domain: str, rule: AdmitRule) -> None:
        """Set the rule of a domain. `rule(public_key)` is called at every handshake."""
        self._authenticator.configure_curve_callback(domain, _Callback(rule, self.refusals))

    def start(self) -> None:
        """Start answering handshakes. Until then, no key is admitted."""
        self._authenticator.start()

    def stop(self) -> None:
        """Stop answering handshakes."""
        self._authenticator.stop()
