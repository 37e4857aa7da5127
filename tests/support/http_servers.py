"""The gateway's server on a free port of the loopback interface, and homes for its application that answer from a script."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import uvicorn

from coordinator.http.homes import Served
from coordinator.http.server import BoundedProtocol, Connections
from hearth.client.answers import AsyncGeneration, Token, Usage
from hearth.client.home import Result
from hearth.errors import AppRevoked, HearthError
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.network import listening_socket
from hearth.wire.messages import LogProb, ServedModel, TokenLogProbs

_STOP_SECONDS = 30.0  # that only failures reach


@asynccontextmanager
async def served(app: Any, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a server of the application."""
    listening = listening_socket("127.0.0.1", 0, 64, "--listen")
    config = uvicorn.Config(
        app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    config.load()
    config.ssl = tls
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.ensure_future(server._serve([]))
    accepting = asyncio.ensure_future(Connections(server).accept(listening))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, _STOP_SECONDS)
        await cancel_all([accepting])
        listening.close()


USAGE = Usage(7, 3, "stop", 0.5, 0.1, 0.2, 4)


def _log_probs(word: str) -> TokenLogProbs:
    each = LogProb(token_id=1, value=-0.5, piece=word.encode())
    return TokenLogProbs(chosen=each, top=(each,))


class ScriptedHome:
    """Says three words, or fails before or after the first."""

    def __init__(self, error: HearthError | None = None, words_before: int = 0, silent: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        self.kept: list[float] = []
        self.ended = 0
        self._error, self._words_before, self._silent = error, words_before, silent

    def generate(self, **asked: Any) -> AsyncGeneration:
        self.asked.append(asked)
        return AsyncGeneration(self._parts())

    async def _parts(self) -> AsyncGenerator[Token | Usage, None]:
        try:
            for number, word in enumerate(("It ", "is ", "on")):
                if self._error is not None and number == self._words_before:
                    raise self._error
                yield Token(word, number, 0.1, log_probs=_log_probs(word) if self.asked[-1].get("logprobs") else None)
                if self._silent:
                    await asyncio.Event().wait()
            yield USAGE
        finally:
            self.ended += 1

    async def keep_loaded(self, seconds: float, model: str) -> None:
        assert (self.ended, model) == (len(self.asked), "tiny")  # not before the answer
        self.kept.append(seconds)

    async def request_embeddings(self, texts: list[str], seconds: float, model: str) -> Result:
        return Result(np.tile(np.float32([0.6, 0.8, 0.0]), (len(texts), 1)), 0.1, 5, ())


class ScriptedHomes:
    """Serve `home` to everybody, or to the apps of `tokens` only."""

    def __init__(
        self,
        home: ScriptedHome,
        readiness: ServedModel,
        refusal: HearthError | None = None,
        tokens: Sequence[str] | None = None,
    ) -> None:
        self._served, self._refusal = Served(home, (readiness,), readiness.ready), refusal  # type: ignore[arg-type]
        self._tokens = tokens

    @asynccontextmanager
    async def served(self, token: str | None, address: str = "") -> AsyncIterator[Served]:
        if self._refusal is not None:
            raise self._refusal
        if token is not None and self._tokens is not None and token not in self._tokens:
            raise AppRevoked(app="unknown")
        yield self._served


READY = ServedModel(
    deployment="tiny", ready=True, phase="serving", state="serving", model="tiny", answers="text", context_tokens=64
)
