"""Keys and authentication: the home key, derived key pairs, credential files, CURVE sockets and ZAP.

The home key is 32 random bytes. One CURVE key pair each for agents, coordinators and admins is derived from it, so a holder
of the home key can authenticate in every role. Apps and devices can have separate key pairs;
`coordinator.serve.key_registry` stores their public keys.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import zmq
import zmq.asyncio
from pydantic import AfterValidator, BaseModel, Field
from zmq.auth.base import Authenticator
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from hearth.errors import BadKey, KeyExists, KeyMissing, NotAuthorised
from hearth.files import write_atomically
from hearth.platform.asyncio_tools import cancel_all, loop_time, supervised
from hearth.platform.refusals import Refusals
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES

log = logging.getLogger(__name__)

Role = Literal["agent", "coordinator", "admin"]

_CHECKSUM_BYTES = 4  # of the SHA-256 of a credential's text: misses one typing error in 2^32
_DECISION_SECONDS = 5.0  # a rule reads a set of keys, or a small file: it takes milliseconds
_HEARTBEAT_MS = 2000  # interval of ZeroMQ heartbeats, which detect a peer that vanished without closing its connection
_HEARTBEAT_TIMEOUT_MS = 6000  # three intervals: bad Wi-Fi may lose two heartbeats
# The same for a client that can change to another server and repeat its requests. ZeroMQ answers in a thread of its own, so
# that a busy server is not silent. Wi-Fi that is silent for longer costs the client a repetition.
_QUICK_HEARTBEAT_MS = 1000
_QUICK_HEARTBEAT_TIMEOUT_MS = 2000


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


def derive_keypair(home_key: bytes, role: Role) -> KeyPair:
    """Derive the home's CURVE key pair for a role: keyed BLAKE2b of the role's name, with the home key as the key."""
    secret = z85.encode(hashlib.blake2b(f"hearth {role} 1".encode(), digest_size=32, key=home_key).digest())
    return KeyPair(zmq.curve_public(secret).decode(), secret.decode())


def fingerprint(public_key: str) -> str:
    """A short identifier of a public key (64 bits of its SHA-256), safe to show and to advertise."""
    return hashlib.sha256(public_key.encode()).hexdigest()[:16]


def _checked(key: str) -> str:
    if len(z85.decode(key.encode())) != 32:
        raise ValueError("a key has 32 bytes in Z85")
    return key


# ---- credentials ----------------------------------------------------------------------------------------------------


_Z85 = Annotated[str, Field(min_length=40, max_length=40), AfterValidator(_checked)]


class HomeKey(BaseModel, frozen=True, hide_input_in_errors=True):
    """The home key, which agents and coordinators need. It grants full access to the home until `hearth key rotate`."""

    kind: Literal["home"] = "home"
    key: str = Field(repr=False, pattern="^[0-9a-fA-F]{64}$")  # 32 bytes

    def key_bytes(self) -> bytes:
        """The 32 bytes of the key."""
        return bytes.fromhex(self.key)


class AdminKey(BaseModel, frozen=True, hide_input_in_errors=True):
    """An administrator's key: may see devices and status, request inference, and manage apps."""

    kind: Literal["admin"] = "admin"
    secret: _Z85 = Field(repr=False)
    agent_public: _Z85
    coordinator_public: _Z85


class AppKey(BaseModel, frozen=True, hide_input_in_errors=True):
    """An app's key: may request inference and readiness only, and can be revoked."""

    kind: Literal["app"] = "app"
    name: str
    secret: _Z85 = Field(repr=False)
    coordinator_public: _Z85


class DeviceKey(BaseModel, frozen=True, hide_input_in_errors=True):
    """The key of one agent. It serves this home's coordinators, controls nothing, and can be revoked."""

    kind: Literal["device"] = "device"
    name: str
    secret: _Z85 = Field(repr=False)
    coordinator_public: _Z85
    admin_public: _Z85


Credential: TypeAlias = HomeKey | AdminKey | AppKey | DeviceKey
_CREDENTIAL_TYPES: dict[str, type[Credential]] = {
    "hearth-home-1": HomeKey,
    "hearth-admin-1": AdminKey,
    "hearth-app-1": AppKey,
    "hearth-device-1": DeviceKey,
}


def new_home_key() -> HomeKey:
    """Generate a random home key."""
    return HomeKey(key=secrets.token_hex(32))


def admin_key(home: HomeKey) -> AdminKey:
    """Derive the admin key of a home."""
    key = home.key_bytes()
    return AdminKey(
        secret=derive_keypair(key, "admin").secret,
        agent_public=derive_keypair(key, "agent").public,
        coordinator_public=derive_keypair(key, "coordinator").public,
    )


def format_credential(credential: Credential) -> str:
    """Format a credential as one line: `hearth-<kind>-1:<base64 of the JSON fields and a checksum>`."""
    body = credential.model_dump_json(exclude={"kind"}).encode()
    checksum = hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]
    return f"hearth-{credential.kind}-1:{base64.urlsafe_b64encode(body + checksum).decode()}"


def parse_credential(text: str, source: str) -> Credential:
    """Parse a credential from one line. Raises BadKey with the reason; its text never contains the key."""
    prefix, _, encoded = text.strip().partition(":")
    kind = _CREDENTIAL_TYPES.get(prefix)
    if kind is None:
        raise BadKey(
            source=source, reason=f"it does not begin with {', '.join(f'{each}:' for each in _CREDENTIAL_TYPES)}"
        )
    try:
        data = base64.b64decode(encoded, altchars=b"-_", validate=True)
        body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if hashlib.sha256(body).digest()[:_CHECKSUM_BYTES] != checksum:
            raise BadKey(source=source, reason="its checksum is wrong: a character was mistyped or is missing")
        return kind.model_validate_json(body)
    except ValueError:
        raise BadKey(source=source, reason="it is damaged or was cut short") from None


def default_key_path(environ: Mapping[str, str]) -> Path:
    """The default credential file: $HEARTH_KEY, else systemd's credential `home.key`, else ~/.config/hearth/key."""
    if path := environ.get("HEARTH_KEY"):
        return Path(path)
    if directory := environ.get("CREDENTIALS_DIRECTORY"):
        credential = Path(directory) / "home.key"
        if credential.exists():
            return credential
    config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", ".")) / ".config")
    return Path(config) / "hearth" / "key"


def load_credential(path: Path) -> Credential:
    """Read a credential file. Raises KeyMissing or BadKey."""
    try:
        return parse_credential(path.read_text(), str(path))
    except FileNotFoundError:
        raise KeyMissing(path=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadKey(source=str(path), reason=f"the file cannot be read ({error})") from None


def save_credential(path: Path, credential: Credential, force: bool = False) -> None:
    """Write a credential file atomically, readable by its owner only. Raises KeyExists unless `force`."""
    if path.exists() and not force:
        raise KeyExists(path=str(path))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, format_credential(credential) + "\n", private=True)


def resolve_credential(key: str | Path | Credential | None) -> Credential:
    """Resolve a credential given as an object, its one-line text or its file; None: the default file."""
    if isinstance(key, HomeKey | AdminKey | AppKey | DeviceKey):
        return key
    if isinstance(key, str) and key.startswith("hearth-"):
        return parse_credential(key, "the given text")
    return load_credential(Path(key) if key is not None else default_key_path(os.environ))


# ---- access by credential -------------------------------------------------------------------------------------------


class Access(NamedTuple):
    """Our own key pair, and the public key that the server must authenticate with."""

    own: KeyPair
    server_public: str


def _own_keypair(credential: Credential) -> KeyPair:
    if isinstance(credential, HomeKey):
        return derive_keypair(credential.key_bytes(), "coordinator")
    return KeyPair(zmq.curve_public(credential.secret.encode()).decode(), credential.secret)


def coordinator_access(credential: Credential) -> Access:
    """The keys for connecting to this home's coordinator."""
    if isinstance(credential, HomeKey):
        return Access(_own_keypair(credential), derive_keypair(credential.key_bytes(), "coordinator").public)
    return Access(_own_keypair(credential), credential.coordinator_public)


def agent_access(credential: Credential) -> Access:
    """The keys for connecting to agents: as coordinator with the home key, as admin with an admin key.

    Raises NotAuthorised for an app key.
    """
    if isinstance(credential, HomeKey):
        return Access(_own_keypair(credential), derive_keypair(credential.key_bytes(), "agent").public)
    if isinstance(credential, AdminKey):
        return Access(_own_keypair(credential), credential.agent_public)
    raise NotAuthorised(role=credential.kind, action="talk to agents")


class AgentTrust(NamedTuple):
    """The key pair of an agent, and the public keys of those that it serves."""

    own: KeyPair
    coordinator_public: str
    admin_public: str


def agent_trust(credential: HomeKey | DeviceKey) -> AgentTrust:
    """The keys of an agent: its own with a device key; with the home key, those that all such agents share."""
    if isinstance(credential, DeviceKey):
        return AgentTrust(_own_keypair(credential), credential.coordinator_public, credential.admin_public)
    key = credential.key_bytes()
    return AgentTrust(
        derive_keypair(key, "agent"), derive_keypair(key, "coordinator").public, derive_keypair(key, "admin").public
    )


def new_device_key(home: HomeKey, name: str) -> DeviceKey:
    """Generate the key of one agent of this home."""
    shared = agent_trust(home)
    return DeviceKey(
        name=name,
        secret=new_keypair().secret,
        coordinator_public=shared.coordinator_public,
        admin_public=shared.admin_public,
    )


# ---- sockets --------------------------------------------------------------------------------------------------------


def harden(socket: zmq.Socket[Any]) -> None:
    """Set message size limit and heartbeats. Applies to every socket, including unencrypted data-plane sockets."""
    socket.linger = 0
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
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


AdmitRule = Callable[[str], bool]


class _Callback:
    """A credentials provider as pyzmq expects it. A rule that fails refuses this key; the next one is decided anew."""

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


class _LoopAuthenticator(Authenticator):
    """pyzmq's authenticator in the running event loop. It survives a message that it cannot handle."""

    _waiting_since: float | None = None  # since when a message is handled, in the loop's time

    def has_worked(self) -> bool:
        """Whether no handshake has waited for its decision for long."""
        return self._waiting_since is None or loop_time() - self._waiting_since < _DECISION_SECONDS

    async def _answer_all(self) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(self.zap_socket, zmq.POLLIN)
        while True:
            await poller.poll()
            message = self.zap_socket.recv_multipart(zmq.NOBLOCK)
            self._waiting_since = loop_time()
            try:
                await self.handle_zap_message(message)
            except Exception:
                log.exception("a handshake could not be decided; it must be tried again")
                with suppress(zmq.ZMQError):  # it was answered before
                    self._send_zap_reply(message[1], b"300", b"Internal error")  # temporary: the client tries again
            self._waiting_since = None

    def start(self) -> None:
        super().start()
        self._task = supervised(self._answer_all(), "the gatekeeper")

    async def end_task(self) -> None:
        await cancel_all([self._task])

    def stop(self) -> None:
        self._task.cancel()
        super().stop()


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

    def has_worked(self) -> bool:
        """Whether handshakes are answered: since the last call, or none waits."""
        return self._authenticator.has_worked() if isinstance(self._authenticator, _LoopAuthenticator) else True

    def start(self) -> None:
        """Start answering handshakes. Until then, no key is admitted."""
        self._authenticator.start()

    def stop(self) -> None:
        """Stop answering handshakes."""
        self._authenticator.stop()

    async def close(self) -> None:
        """As `stop`, in an event loop that goes on: a later socket may get the file descriptor of the closed one."""
        if isinstance(self._authenticator, _LoopAuthenticator):
            await self._authenticator.end_task()
        self._authenticator.stop()


def asyncio_gatekeeper(context: zmq.Context[Any]) -> Gatekeeper:
    """A gatekeeper for the daemon and the coordinator. Start it inside the running event loop."""
    return Gatekeeper(_LoopAuthenticator(context))


def thread_gatekeeper(context: zmq.Context[Any]) -> Gatekeeper:
    """A gatekeeper for the worker, which has no event loop: the handler runs in its own thread."""
    return Gatekeeper(ThreadAuthenticator(context))
