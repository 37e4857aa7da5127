"""What an app learns about the home: its answers and errors name no device, address, path or cause inside the home."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import PurePath
from typing import Any, TypeVar

from hearth.errors import HearthError
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply, Response

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
    changes: dict[str, Any] = {
        "state": "serving" if served.ready else _SHOWN_TO_APPS["state"],
        "model": PurePath(served.model).name,
    }
    if isinstance(served, wire.ServedModel):
        loaded = "unloaded" if served.phase == "unloaded" else "serving"
        changes |= {
            "devices": (),
            "memory_bytes": 0,
            "sent_bytes_per_second": 0.0,
            "phase": loaded if served.ready else "idle",
        }
        if served.missing_bytes:
            changes["state"] = f"it does not fit: {served.missing_bytes} bytes of memory are missing"
    return served.model_copy(update=changes)
