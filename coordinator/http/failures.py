"""Errors as HTTP answers: status, headers, and the body in the form that the client's API has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coordinator.http.homes import shown_name
from hearth import errors
from hearth.errors import HearthError
from hearth.wire import messages as wire


class Failure(Exception):
    """A request that is refused or has failed. `kind`, `param` and `code` are those of OpenAI's error objects."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: when to try again, and how to log in."""
        if self.status in (429, 503):
            return {"retry-after": "1"}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}

    def openai(self) -> dict[str, Any]:
        """The body for clients of OpenAI's API."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def ollama(self) -> dict[str, Any]:
        """The body for clients of Ollama's API."""
        return {"error": self.message}


class _Form(NamedTuple):
    status: int
    kind: str
    code: str | None = None


_FORMS: Mapping[type[HearthError], _Form] = {
    errors.BadKey: _Form(401, "authentication_error", "invalid_api_key"),
    errors.WrongKey: _Form(401, "authentication_error", "invalid_api_key"),
    errors.AppRevoked: _Form(401, "authentication_error", "invalid_api_key"),
    errors.NotAuthorised: _Form(403, "permission_error"),
    errors.BadRequest: _Form(400, "invalid_request_error"),
    errors.BadGrammar: _Form(400, "invalid_request_error", "invalid_schema"),
    errors.TextTooLong: _Form(400, "invalid_request_error", "context_length_exceeded"),
    errors.ContextTooLong: _Form(400, "invalid_request_error", "context_length_exceeded"),
    errors.FrameTooLarge: _Form(413, "invalid_request_error"),
    errors.QueueFull: _Form(429, "rate_limit_error", "queue_full"),
    errors.DeadlineExceeded: _Form(504, "timeout_error"),
    errors.InternalError: _Form(500, "server_error"),
}
# A home that re-plans, has lost a device, or does not answer: the request may succeed later.
_LATER = _Form(503, "server_error", "not_ready")
_BAD_TOKEN = (
    "The token in the Authorization header is unknown or was revoked. Make one with `hearth key add-app NAME --token`."
)


def failure(error: HearthError) -> Failure:
    """An error of the home as an answer; its advice is part of the message."""
    form = _FORMS.get(type(error), _LATER)
    message = _BAD_TOKEN if form.status == 401 else str(error)
    return Failure(form.status, message, form.kind, code=form.code)


def unsupported(field: str, reason: str = "this version of Hearth does not support it") -> Failure:
    """A field that would change the answer and that nothing here heeds."""
    text = f"The field '{field}' cannot be used: {reason}. Leave it out."
    return Failure(400, text, param=field, code="unsupported_field")


def unknown_model(name: str, served: Sequence[wire.ServedModel]) -> Failure:
    """A request for a model that is not served."""
    names = ", ".join(f"'{shown_name(each)}'" for each in served)
    there = f"{names} {'is' if len(served) == 1 else 'are'}" if served else "none is"
    text = f"The model '{name}' is not served; {there}. `GET /v1/models` lists what is."
    return Failure(404, text, param="model", code="model_not_found")
