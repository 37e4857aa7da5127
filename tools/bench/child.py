"""Child processes of a benchmark: answer JSON requests over a socket, one at a time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import zmq

from hearth.errors import HearthError

_CALL_SECONDS = 1800.0  # timeout of a coroutine; above every timeout of a parent, which reports its own first

_T = TypeVar("_T")


class AsyncTarget:
    """Base class of targets with `async def` methods. They run in one event loop, which also runs between requests."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the event loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(_CALL_SECONDS)


def serve(address: str, target: object) -> None:
    """Answer requests `{"do": METHOD, ...}` by calling methods of `target`, until the parent ends this process.

    An answer is the returned dictionary ({} for None), or `{"error": TEXT}`. Coroutine methods need an `AsyncTarget`.
    """
    socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(address)
    while True:
        request = json.loads(socket.recv())
        try:
            answer = getattr(target, request.pop("do"))(**request)
            if isinstance(target, AsyncTarget) and asyncio.iscoroutine(answer):
                answer = target.run(answer)
        except Exception as error:
            text = str(error) if isinstance(error, HearthError) else f"{type(error).__name__}: {error}"
            answer = {"error": text}
        socket.send(json.dumps(answer or {}).encode())
