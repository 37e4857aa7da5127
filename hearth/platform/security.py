"""The home key, the key pairs derived from it, credential files, and whom a credential gives access to.

The home key is 32 random bytes. One CURVE key pair each for agents, coordinators and admins is derived from it, so a holder
of the home key can authenticate in every role. Apps and devices can have separate key pairs;
`coordinator.serve.clients.key_registry` stores their public keys.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import zmq
from pydantic import AfterValidator, BaseModel, Field
from zmq.utils import z85

from hearth.errors import BadKey, KeyExists, KeyExposed, KeyMissing, NotAuthorised
from hearth.files import write_atomically
from hearth.platform.curve import KeyPair, new_keypair

Role = Literal["agent", "coordinator", "admin"]

_TOKEN_PREFIX = "hearth_"
_CHECKSUM_BYTES = 4  # of the SHA-256 of a credential's text: misses one typing error in 2^32


def derive_keypair(home_key: bytes, role: Role) -> KeyPair:
    """Derive the home's CURVE key pair for a role: keyed BLAKE2b of the role's name, with the home key as the key."""
    secret = z85.encode(hashlib.blake2b(f"hearth {role} 1".encode(), digest_size=32, key=home_key).digest())
    return KeyPair(zmq.curve_public(secret).decode(), secret.decode())


def _checked(key: str) -> str:
    with suppress(KeyError, struct.error):  # a character that Z85 lacks, or five that exceed four bytes
        if len(z85.decode(key.encode())) == 32:
            return key
    raise ValueError("a key has 32 bytes in Z85")


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
    checksum = _checksum(body)
    return f"hearth-{credential.kind}-1:{base64.urlsafe_b64encode(body + checksum).decode()}"


def parse_credential(text: str, source: str) -> Credential:
    """Parse a credential from one line. Raises BadKey with the reason; its text never contains the key."""
    prefix, _, encoded = text.strip().partition(":")
    kind = _CREDENTIAL_TYPES.get(prefix)
    if kind is None:
        reason = f"it does not begin with {', '.join(f'{each}:' for each in _CREDENTIAL_TYPES)}"
        raise BadKey(source=source, reason=reason)
    try:
        data = base64.b64decode(encoded, altchars=b"-_", validate=True)
        body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if _checksum(body) != checksum:
            raise BadKey(source=source, reason="its checksum is wrong: a character was mistyped or is missing")
        return kind.model_validate_json(body)
    except ValueError:
        raise BadKey(source=source, reason="it is damaged or was cut short") from None


def format_token(app: AppKey) -> str:
    """Format an app's secret key as a bearer token for HTTP: `hearth_<base64 of the secret key and a checksum>`."""
    secret = z85.decode(app.secret.encode())
    return _TOKEN_PREFIX + base64.urlsafe_b64encode(secret + _checksum(secret)).decode()


def parse_token(text: str, coordinator_public: str) -> AppKey:
    """Parse a bearer token of a home with this public key. Raises BadKey; its text never contains the token."""
    try:
        data = base64.b64decode(text.removeprefix(_TOKEN_PREFIX).encode(), altchars=b"-_", validate=True)
    except ValueError:
        data = b""
    secret, checksum = data[:32], data[32:]
    if not text.startswith(_TOKEN_PREFIX) or len(secret) != 32 or checksum != _checksum(secret):
        raise BadKey(source="the token", reason="it is damaged or was cut short")
    return AppKey(name="token", secret=z85.encode(secret).decode(), coordinator_public=coordinator_public)


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]


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
    """Read a credential file. Raises KeyMissing, BadKey, and KeyExposed if others than its owner, this user, can read it."""
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            if status.st_uid == os.geteuid() and status.st_mode & 0o077:
                raise KeyExposed(path=str(path))
            return parse_credential(file.read(), str(path))
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
    coordinator, admin = shared.coordinator_public, shared.admin_public
    return DeviceKey(name=name, secret=new_keypair().secret, coordinator_public=coordinator, admin_public=admin)
