"""CURVE: key pairs, and encrypted ZeroMQ sockets that admit only known keys. It imports neither asyncio nor pydantic."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import zmq

from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES

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
