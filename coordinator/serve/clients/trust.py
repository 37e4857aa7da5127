"""The keys that a coordinator serves: those of this home, and those of its apps."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.port.access import Access, MessageRule
from coordinator.serve.clients.key_registry import KeyRegistry, RegisteredKeys
from coordinator.serve.config import CoordinatorSettings
from hearth.platform.security import HomeKey, derive_keypair
from hearth.wire import messages as wire
from hearth.wire.quota import Limits

# Bytes of all requests of one app that wait or run: they stay in memory until they have been answered. That of one request
# may be larger.
_APP_TOTAL_BYTES = 64 << 20
# Bytes of the requests and unread answers of all apps together; twice the largest request, if that is more.
_ALL_APPS_BYTES = 256 << 20
# An administrator may do more, but a program with an error must not exhaust the coordinator either.
_ADMIN_LIMITS = Limits(total_bytes=512 << 20, request_bytes=512 << 20, per_second=2000.0, burst=2000.0)

# Messages that apps may send, by their role; all others need an admin key.
_EVERY_APP = (wire.Hello, wire.GetReadiness, wire.ListModels)
_MESSAGES_OF: Mapping[wire.AppRole, tuple[type[wire.Message], ...]] = {
    "app": (*_EVERY_APP, wire.ModelRequest, wire.KeepLoaded),
    "metrics": (*_EVERY_APP, wire.GetMetrics),
    "observer": (*_EVERY_APP, wire.ModelRequest, wire.KeepLoaded, wire.GetMetrics, wire.WatchEvents),
}
# What clients may send.
CLIENT_MESSAGES = {
    tag: kind
    for tag, kind in wire.MESSAGE_TYPES.items()
    if issubclass(kind, wire.Hello | wire.ClientRequest | wire.Follow)
}
MESSAGE_RULES = {
    tag: MessageRule(
        kind.__name__, [role for role, theirs in _MESSAGES_OF.items() if issubclass(kind, theirs)], kind.any_version
    )
    for tag, kind in CLIENT_MESSAGES.items()
}


class Trust:
    """The keys of this home's coordinator and administrators, and the registry of its apps."""

    def __init__(self, settings: CoordinatorSettings, home: HomeKey) -> None:
        self.keypair = derive_keypair(home.key_bytes(), "coordinator")
        self.admins = (self.keypair.public, derive_keypair(home.key_bytes(), "admin").public)
        self.apps = KeyRegistry(settings.state_dir / "apps.json")
        self._settings = settings
        self._known: RegisteredKeys | None = None  # those of `_access`
        self._access: Access | None = None

    @property
    def access(self) -> Access:
        """The present rules: the same object until they change."""
        known = self.apps.current()
        if self._access is None or known is not self._known:
            settings = self._settings
            app_limits = Limits(
                total_bytes=max(_APP_TOTAL_BYTES, settings.app_request_bytes),
                request_bytes=settings.app_request_bytes,
                per_second=settings.app_requests_per_second,
                burst=2 * settings.app_requests_per_second,
            )
            app_bytes = max(_ALL_APPS_BYTES, 2 * settings.app_request_bytes)
            self._known = known
            self._access = Access(
                self.admins, known.keys, known.revoked, known.roles, app_limits, _ADMIN_LIMITS, app_bytes
            )
        return self._access

    def authorise(self, public_key: str, kind: type[wire.Message]) -> None:
        """Raises AppRevoked or NotAuthorised if this key may not send such a message."""
        self.access.authorise(public_key, MESSAGE_RULES[kind.tag])
