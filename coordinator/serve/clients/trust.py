"""Whom a coordinator serves, and what an app learns: the keys of this home and of its apps, with what each may send.

Answers and errors for apps name no device, address, path or cause inside the home.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import PurePath
from typing import Any, TypeVar

from coordinator.port.access import Access, MessageRule
from coordinator.serve.clients.key_registry import KeyRegistry, RegisteredKeys
from coordinator.serve.config import CoordinatorSettings
from hearth.errors import HearthError
from hearth.platform.security import HomeKey, derive_keypair
from hearth.wire import messages as wire
from hearth.wire.intake import Limits
from hearth.wire.rpc import Reply, Response

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
_TO_CLIENT_PORT = wire.Hello | wire.ClientRequest | wire.Follow
CLIENT_MESSAGES = {tag: kind for tag, kind in wire.MESSAGE_TYPES.items() if issubclass(kind, _TO_CLIENT_PORT)}
MESSAGE_RULES = {
    tag: MessageRule(
        kind.__name__, [role for role, theirs in _MESSAGES_OF.items() if issubclass(kind, theirs)], kind.any_version
    )
    for tag, kind in CLIENT_MESSAGES.items()
}


class Trust:
    """The keys of this home's coordinator and administrators, and the registries of its apps and devices."""

    def __init__(self, settings: CoordinatorSettings, home: HomeKey) -> None:
        self.keypair = derive_keypair(home.key_bytes(), "coordinator")
        self.admins = (self.keypair.public, derive_keypair(home.key_bytes(), "admin").public)
        self.apps = KeyRegistry(settings.state_dir / "apps.json")
        self.devices = KeyRegistry(settings.state_dir / "devices.json", "device")
        self._settings = settings
        self._known: RegisteredKeys | None = None  # those of `_access`
        self._access: Access | None = None

    @property
    def access(self) -> Access:
        """The present rules: the same object until they change."""
        known = self.apps.current
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


# ---- what an app learns ------------------------------------------------------------------------------------------------

_Served = TypeVar("_Served", wire.Readiness, wire.ServedModel)

# Texts that replace the fields of errors, by name. Errors of the scope `request` keep their reason: it is about the request.
_SHOWN_TO_APPS = {
    "device": "a device", "peer": "a device", "first": "a device", "second": "another device", "device_id": "hidden",
    "holder": "another coordinator", "endpoint": "a device", "where": "the home", "state": "the home is not ready",
    "reason": "an administrator can see the reason with `hearth status`", "action": "a step of the request",
    "holders": "other models hold the memory",
    "compute_device": "compute", "rooms": "an administrator can see their room with `hearth status`",
}  # fmt: skip
_ALWAYS_HIDDEN = _SHOWN_TO_APPS.keys() - {"reason", "action", "state"}


def error_for_app(error: HearthError) -> HearthError:
    """The same error without what an app must not learn. It keeps its type and its numbers."""
    hidden = _ALWAYS_HIDDEN if error.scope == "request" else _SHOWN_TO_APPS.keys()
    texts = {name: value for name, value in error.details().items() if isinstance(value, str) and value}
    changes = {name: _SHOWN_TO_APPS[name] for name in texts if name in hidden}
    changes |= {name: PurePath(texts[name]).name for name in ("path", "model", "graph") if name in texts}
    shown = dataclasses.replace(error, **changes)
    if shown.scope != error.scope:  # an error of a newer version
        vars(shown)["scope"] = error.scope
    return shown


def response_for_app(response: Response) -> Response:
    """The same answer, or stream of answers, without what an app must not learn."""
    return _stream_for_app(response) if isinstance(response, AsyncGenerator) else _answer_for_app(response)


async def _stream_for_app(
    answers: AsyncGenerator[wire.Message | Reply, None],
) -> AsyncGenerator[wire.Message | Reply, None]:
    async with aclosing(answers):
        try:
            async for answer in answers:
                yield _answer_for_app(answer)
        except HearthError as error:
            raise error_for_app(error) from error


def _answer_for_app(answer: wire.Message | Reply) -> wire.Message | Reply:
    if isinstance(answer, Reply):
        message = _message_for_app(answer.message)
        return answer if message is answer.message else answer._replace(message=message)
    return _message_for_app(answer)


def _message_for_app(message: wire.Message) -> wire.Message:
    match message:
        case wire.Readiness():
            return _known_to_apps(message)
        case wire.ModelList():
            return wire.ModelList(models=tuple(map(_known_to_apps, message.models)))
        case wire.Vectors() | wire.Inferred() if message.traces:
            traces = tuple(each.model_copy(update={"device": f"device {each.rank}"}) for each in message.traces)
            return message.model_copy(update={"traces": traces})
    return message


def _known_to_apps(served: _Served) -> _Served:
    state = "serving" if served.ready else _SHOWN_TO_APPS["state"]
    changes: dict[str, Any] = {"state": state, "model": PurePath(served.model).name}
    if isinstance(served, wire.ServedModel):
        phase = ("unloaded" if served.phase == "unloaded" else "serving") if served.ready else "idle"
        changes |= {"devices": (), "memory_bytes": 0, "sent_bytes_per_second": 0.0, "phase": phase}
        if served.missing_bytes:
            changes["state"] = f"it does not fit: {served.missing_bytes} bytes of memory are missing"
    return served.model_copy(update=changes)
