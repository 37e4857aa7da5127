"""The gateway as an ASGI application: checks of every request, routes, the list of models, and how answers are sent."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.http import watching
from coordinator.http.answer_stream import while_connected
from coordinator.http.failures import Failure, failure, unknown_model
from coordinator.http.homes import Homes, shown_name
from coordinator.http.ollama import embeddings as ollama_embeddings
from coordinator.http.ollama import library, texts
from coordinator.http.openai.chat import chat_completion
from coordinator.http.openai.completions import completion
from coordinator.http.openai.embeddings import embeddings
from coordinator.http.openai.responses import response
from coordinator.http.request import Answer, Bodies, Call, EventStream, Handler
from coordinator.http.settings import LOCAL_SUFFIXES
from hearth.errors import HearthError
from hearth.platform.asyncio_tools import with_timeout

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 32 << 10
_HEALTH_SECONDS = 2.0  # for the coordinator's answer
_OPEN_PATHS = frozenset({"/", "/health", "/api/version"})  # without a token; they tell nothing of the home


async def list_models(call: Call) -> Answer:
    """List the models that can be asked."""
    return {"object": "list", "data": [_model_entry(shown_name(each)) for each in call.served.ready]}


async def describe_model(call: Call) -> Answer:
    """Describe one model."""
    served, name = call.served, call.path["model"]
    found = served.named(name)
    if found is None or not found.ready:
        raise unknown_model(name, served.ready)
    return _model_entry(shown_name(found))


def _model_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "hearth"}


_HANDLERS: Mapping[tuple[str, str], Handler] = {
    ("POST", "/v1/chat/completions"): chat_completion,
    ("POST", "/v1/completions"): completion,
    ("POST", "/v1/embeddings"): embeddings,
    ("POST", "/v1/responses"): response,
    ("GET", "/v1/models"): list_models,
    ("GET", "/v1/models/{model:path}"): describe_model,
    ("GET", "/api/tags"): library.tags,
    ("GET", "/api/ps"): library.running,
    ("POST", "/api/show"): library.show,
    ("POST", "/api/pull"): library.pull,
    ("POST", "/api/chat"): texts.chat,
    ("POST", "/api/generate"): texts.generate,
    ("POST", "/api/embed"): ollama_embeddings.embed,
    ("POST", "/api/embeddings"): ollama_embeddings.embed_one,
}


def http_app(homes: Homes, allowed_hosts: tuple[str, ...] = ()) -> Starlette:
    """The application. It closes no connection of `homes`."""

    async def is_ready() -> bool:
        async with homes.served(None) as served:
            return served.is_ready

    async def health(request: Request) -> Response:
        try:
            ready = await with_timeout(_HEALTH_SECONDS, is_ready())
        except (HearthError, asyncio.TimeoutError):
            ready = False
        return JSONResponse({"status": "ok" if ready else "not ready"}, 200 if ready else 503)

    async def events(request: Request) -> Response:
        return await _streamed(request, await watching.events(request.state.served, request))

    routes = [
        Route("/", _root),
        Route("/health", health),
        Route("/api/version", _version),
        Route("/metrics", watching.metrics),
        Route("/v1/events", events),
        *(Route(path, _endpoint(handler), methods=[method]) for (method, path), handler in _HANDLERS.items()),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(_Guard, homes=homes, allowed_hosts=allowed_hosts)],
        exception_handlers={
            Failure: _handled, HearthError: _handled, HTTPException: _refused, ClientDisconnect: _gone, Exception: _broken,
        },
    )  # fmt: skip
    app.router.redirect_slashes = False
    return app


class _Guard:
    """Refuses a request under a foreign host name, or without a token; puts what its token sees into its state."""

    def __init__(self, app: ASGIApp, homes: Homes, allowed_hosts: tuple[str, ...]) -> None:
        self._app = app
        self._homes = homes
        self._allowed_hosts = allowed_hosts
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
                raise Failure(431, f"The headers have more than {MAX_HEADER_BYTES} bytes.")
            if not is_allowed_host(request.headers.get("host", ""), self._allowed_hosts):
                reason = "This gateway does not know the name under which it was asked. Allow it with --allow-host."
                raise Failure(403, reason, "permission_error")
            if scope["path"] in _OPEN_PATHS:
                await self._app(scope, receive, send)
                return
            token = _token(request)
            async with self._homes.served(token, request.client.host if request.client else "") as served:
                with self._bodies.of(token) as read:
                    scope.setdefault("state", {}).update(served=served, read=read)
                    await self._app(scope, receive, send)
        except (Failure, HearthError) as error:
            await _failed(request, error)(scope, receive, send)


def is_allowed_host(host_header: str, more: Sequence[str] = ()) -> bool:
    """Whether a `Host` header names an address, this computer, a name of the local network, or one of `more`.

    A page on the Internet whose name resolves to this gateway (DNS rebinding) is refused.
    """
    host = _without_port(host_header).lower().rstrip(".")
    if not host or host in ("localhost", socket.gethostname().lower()) or host in more:
        return True
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return host.endswith(LOCAL_SUFFIXES)


def _without_port(host_header: str) -> str:
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    name, _, port = host_header.rpartition(":")
    return name if name and port.isdigit() else host_header


def _token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        reason = "This needs a token: `Authorization: Bearer TOKEN`. Make one with `hearth key add-app NAME --token`."
        raise Failure(401, reason, "authentication_error", code="invalid_api_key")
    return token.strip()


# ---- answers ----------------------------------------------------------------------------------------------------------


def _endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        body = await request.state.read(request) if request.method == "POST" else None
        answer = await handler(Call(request.state.served, request.receive, body, request.path_params))
        if isinstance(answer, EventStream):
            return await _streamed(request, answer)
        return JSONResponse(answer)

    return endpoint


async def _streamed(request: Request, answer: EventStream) -> Response:
    """The answer in pieces. Whatever fails before the first one has its own status."""
    return _Pieces(answer, await while_connected(request.receive, anext(answer.events)))


class _Pieces(Response):
    """Sends the pieces of a stream as they come, and ends it if the client goes away."""

    def __init__(self, stream: EventStream, first: bytes) -> None:
        super().__init__(media_type=stream.media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._stream, self._first = stream, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._stream.events):
            try:
                await while_connected(receive, self._send_all(send))
            except ClientDisconnect:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for piece in self._stream.events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (Failure, HearthError) as error:
            piece = self._stream.failed(error if isinstance(error, Failure) else failure(error))
            await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _root(request: Request) -> Response:
    return PlainTextResponse("Hearth is running")


async def _version(request: Request) -> Response:
    return JSONResponse({"version": library.API_VERSION})


# ---- failures ---------------------------------------------------------------------------------------------------------


def _failed(request: Request, error: Exception) -> Response:
    shown = error if isinstance(error, Failure) else failure(error) if isinstance(error, HearthError) else _BROKEN
    content: dict[str, Any] = shown.ollama() if request.url.path.startswith("/api/") else shown.openai()
    # The rest of a body is not read, and so the connection ends.
    ends = request.method == "POST" and not getattr(request.state, "is_read", False)
    return JSONResponse(content, shown.status, {**shown.headers, **({"connection": "close"} if ends else {})})


# Handlers are coroutines, because Starlette runs plain functions in threads.


async def _handled(request: Request, error: Exception) -> Response:
    return _failed(request, error)


async def _refused(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    return _failed(request, Failure(error.status_code, f"There is no {method} {path} here.", code="unknown_url"))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


_BROKEN = Failure(500, "Internal error in the gateway. Please report it, with its log.", "server_error")


async def _broken(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _failed(request, _BROKEN)
