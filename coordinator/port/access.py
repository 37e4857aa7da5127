"""Who may send what to a coordinator, and how much of it. Pure; the port's process and the coordinator use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hearth.errors import AppRevoked, HearthError, NotAuthorised, UnknownMessage
from hearth.wire.intake import Limits, Pool, Rules


class MessageRule(NamedTuple):
    """A type of message that clients may send."""

    name: str  # of its class
    roles: Sequence[str]  # of the apps that may send it; all others need an admin key
    any_version: bool  # whether a peer of another protocol version may send it


class Access(NamedTuple):
    """The keys that are admitted, with their roles and limits."""

    admins: Sequence[str]  # public keys
    apps: Mapping[str, str]  # public keys, with the names of the apps
    revoked: Mapping[str, str]
    roles: Mapping[str, str]  # of apps with another role than "app", by public key
    app_limits: Limits  # of each app
    admin_limits: Limits  # of each administrator
    app_bytes: int  # of the requests and unread answers of all apps together

    def admits(self, public_key: str) -> bool:
        """Whether a key passes the handshake. A revoked app does: its first request then fails with AppRevoked."""
        return public_key in self.admins or public_key in self.apps or public_key in self.revoked

    def authorise(self, public_key: str, rule: MessageRule) -> None:
        """Raises AppRevoked or NotAuthorised if this key may not send such a message."""
        if public_key in self.admins:
            return
        if public_key in self.revoked:
            raise AppRevoked(app=self.revoked[public_key])
        if public_key not in self.apps:
            raise NotAuthorised(role="none", action="ask this coordinator")
        if (role := self.roles.get(public_key, "app")) not in rule.roles:
            raise NotAuthorised(role=role, action=f"send {rule.name}")

    def limits(self, public_key: str) -> Limits:
        """The limits of a key that is admitted."""
        return self.admin_limits if public_key in self.admins else self.app_limits


class PortRules(Rules):
    """The rules of the client port, by tag of the messages. `access` changes while the port serves."""

    def __init__(self, messages: Mapping[str, MessageRule], access: Access) -> None:
        self.access = access
        self.any_version = frozenset(tag for tag, rule in messages.items() if rule.any_version)
        self._messages = messages

    def check(self, public_key: str, tag: str) -> None:
        """See `Rules.check`."""
        if (rule := self._messages.get(tag)) is None:
            raise UnknownMessage(tag=tag[:64])
        self.access.authorise(public_key, rule)

    def limits_of(self, public_key: str) -> Limits:
        return self.access.limits(public_key)

    def revocation(self, public_key: str) -> HearthError | None:
        app = self.access.revoked.get(public_key)
        return AppRevoked(app=app) if app is not None else None

    def pool_of(self, public_key: str) -> Pool | None:
        """All apps share one pool."""
        return None if public_key in self.access.admins else Pool(self.access.app_bytes, len(self.access.apps))
