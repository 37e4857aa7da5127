"""Connections to the coordinator, one for each token in use."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import PurePath
from typing import NamedTuple

from coordinator.http.settings import HttpSettings
from hearth.client.home import AsyncHome, connect_async
from hearth.errors import AppRevoked, BadKey, DeadlineExceeded, NotServing, QueueFull, WrongKey
from hearth.platform.asyncio_tools import loop_time
from hearth.platform.security import AppKey, parse_credential, parse_token
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire import messages as wire

_MAX_IDLE = 32  # connections without a request that are kept open; each takes a socket and about 100 kB
_OPENING_AT_ONCE = 4  # unknown tokens cost the coordinator a handshake each
_OPEN_SECONDS = 10.0
_ASK_SECONDS = 5.0
# For a token that the coordinator has refused, without asking it again. A new app's token was never refused.
_REFUSED_SECONDS = 5.0
_MAX_REFUSED = 1024
# An address that sent a wrong token waits before its next unknown one is looked at, and so do the others that it has sent.
_WRONG_TOKEN_SECONDS = 1.0
_MAX_WAITING_OF_ADDRESS = 16


class Served(NamedTuple):
    """The home as one token sees it: a connection, and what it serves now."""

    home: AsyncHome
    models: tuple[wire.ServedModel, ...]  # that take texts, oldest first
    is_ready: bool  # whether any model is, also one that takes no texts

    @property
    def ready(self) -> tuple[wire.ServedModel, ...]:
        """The models that can be asked now."""
        return tuple(each for each in self.models if each.ready)

    def named(self, name: str) -> wire.ServedModel | None:
        """The model that a request's name means: its own name, with Ollama's tag or without."""
        return next((each for each in self.models if name in (shown_name(each), f"{shown_name(each)}:latest")), None)


class Asked(NamedTuple):
    """The model that a request is for."""

    home: AsyncHome
    model: str  # its name, as clients see it
    deployment: str


def shown_name(model: wire.ServedModel) -> str:
    """The name of a model, as clients see it: that of its deployment, or of the model if that has none of its own."""
    return PurePath(model.model).name if model.deployment == DEFAULT_DEPLOYMENT else model.deployment


class _Connection:
    def __init__(self) -> None:
        self.home: AsyncHome | None = None
        self.num_users = 0
        self.opening = asyncio.Lock()


class _Door:
    """Where the unknown tokens of one address wait for each other."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_waiting = 0


class Homes:
    """Opens a connection when a token is first used and closes those that are idle longest."""

    def __init__(self, settings: HttpSettings) -> None:
        """Raises BadKey unless the gateway's own key is an app's."""
        own = parse_credential(settings.key, "the gateway's settings")
        if not isinstance(own, AppKey):
            raise BadKey(source="the gateway's settings", reason="this needs an app key")
        self._own = own
        self._settings = settings
        self._connections: OrderedDict[str, _Connection] = OrderedDict()  # by secret; the latest used last
        self._refused: OrderedDict[bytes, float] = OrderedDict()  # by hash of the secret: time of the refusal
        self._opening = asyncio.Semaphore(_OPENING_AT_ONCE)
        self._doors: dict[str, _Door] = {}  # by address

    @property
    def coordinator_public(self) -> str:
        """The coordinator's public key: the same for all gateways of a home, and for as long as the home has its key."""
        return self._own.coordinator_public

    @asynccontextmanager
    async def served(self, token: str | None, address: str = "") -> AsyncIterator[Served]:
        """Ask the coordinator, as the app of this token (None: as the gateway), what it serves. `address`: of the client.

        Raises BadKey for a text that is no token, WrongKey or AppRevoked if the coordinator refuses it, Unreachable, ...
        """
        key = parse_token(token, self._own.coordinator_public) if token is not None else self._own
        if self._is_refused(key.secret):
            raise WrongKey(endpoint="the coordinator")
        connection = self._connections.setdefault(key.secret, _Connection())
        self._connections.move_to_end(key.secret)
        connection.num_users += 1
        try:
            try:
                home = await self._open(connection, key, address)
                models = await home.models(_ASK_SECONDS)
            except (AppRevoked, WrongKey):
                self._note_refusal(key)
                raise
            take_texts = tuple(each for each in models if each.answers in ("text", "vectors"))
            yield Served(home, take_texts, any(each.ready for each in models))
        finally:
            connection.num_users -= 1
            await self._close_idle()

    async def close(self) -> None:
        """Close all connections; their requests end."""
        connections, self._connections = list(self._connections.values()), OrderedDict()
        for each in connections:
            if each.home is not None:
                await each.home.close()

    async def _open(self, connection: _Connection, key: AppKey, address: str) -> AsyncHome:
        async with connection.opening:
            if connection.home is None:
                settings = self._settings
                async with self._alone(address), self._opening:
                    connection.home = await connect_async(
                        settings.address, key, _OPEN_SECONDS, list(settings.interfaces) if settings.interfaces else None
                    )
            return connection.home

    @asynccontextmanager
    async def _alone(self, address: str) -> AsyncIterator[None]:
        """One unknown token of an address at a time. After a wrong one, its next ones wait. Raises QueueFull."""
        door = self._doors.setdefault(address, _Door())
        if door.num_waiting >= _MAX_WAITING_OF_ADDRESS:
            raise QueueFull(limit=_MAX_WAITING_OF_ADDRESS)
        door.num_waiting += 1
        try:
            async with door.lock:
                try:
                    yield
                except (AppRevoked, WrongKey):
                    await asyncio.sleep(_WRONG_TOKEN_SECONDS)
                    raise
        finally:
            door.num_waiting -= 1
            if not door.num_waiting:
                del self._doors[address]

    async def _close_idle(self) -> None:
        """Close connections that failed to open, and idle ones beyond the limit, the longest unused first."""
        unused = [(secret, each) for secret, each in self._connections.items() if not each.num_users]
        excess = len(unused) - _MAX_IDLE
        for number, (secret, each) in enumerate(unused):
            if each.home is None or number < excess or self._is_refused(secret):
                del self._connections[secret]
                if each.home is not None:
                    await each.home.close()

    # ---- refused tokens -------------------------------------------------------------------------------------------

    def _is_refused(self, secret: str) -> bool:
        refused_at = self._refused.get(_digest(secret))
        return refused_at is not None and loop_time() - refused_at < _REFUSED_SECONDS

    def _note_refusal(self, key: AppKey) -> None:
        self._refused[_digest(key.secret)] = loop_time()
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)


async def wait_until_ready(home: AsyncHome, model: wire.ServedModel, seconds: float) -> Asked:
    """The model once it is ready: a plan that replaces a lost device takes a moment. Raises NotServing."""
    if not model.ready:
        try:
            await home.wait_ready(seconds, model=model.deployment)
        except DeadlineExceeded:
            raise NotServing(state=model.state) from None
    return Asked(home, shown_name(model), model.deployment)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
