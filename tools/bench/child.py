"""Child processes of a benchmark: answer JSON requests over a socket, one at a time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import zmq

from hearth.client.home import AsyncHome, connect_async
from hearth.errors import DeadlineExceeded, HearthError

_CALL_SECONDS = 1800.0  # timeout of a coroutine; above every timeout of a parent, which reports its own first
_CONNECT_SECONDS = 30.0  # most time to reach a coordinator that serves already
_POLL_SECONDS = 0.5  # between looks at the status

_T = TypeVar("_T")


class AsyncTarget:
    """Base class of targets with `async def` methods. They run in one event loop, which also runs between requests."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the event loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(_CALL_SECONDS)


class HomeClients(AsyncTarget):
    """Client apps of one home, on the client library. Subclasses add their requests."""

    def __init__(self, key: Path, address: str) -> None:
        super().__init__()
        self._key, self._address = key, address

    async def connected(self, timeout_seconds: float = _CONNECT_SECONDS) -> AsyncHome:
        return await connect_async(self._address, self._key, timeout_seconds)

    async def wait_ready(self, timeout_seconds: float) -> dict[str, Any]:
        """Wait until the coordinator serves; returns its status. Raises the errors of the client library."""
        async with await self.connected(timeout_seconds) as home:
            await home.wait_ready(timeout_seconds)
            return (await home.status()).model_dump(mode="json")

    async def wait_prepared(self, timeout_seconds: float) -> dict[str, Any]:
        """Wait until the coordinator has planned for each loss of a device, which takes processor time of requests."""
        async with await self.connected(timeout_seconds) as home:
            deadline = asyncio.get_running_loop().time() + timeout_seconds
            while not losses_are_prepared((await home.status()).redundancy):
                if asyncio.get_running_loop().time() > deadline:
                    raise DeadlineExceeded(action="plans for the loss of each device", seconds=timeout_seconds)
                await asyncio.sleep(_POLL_SECONDS)
        return {}


def losses_are_prepared(redundancy: str) -> bool:
    """Whether the loss of each device has been prepared for, with the devices that are there now, or found impossible.

    `redundancy` is that of the coordinator's status.
    """
    return "spare weights" in redundancy or redundancy.startswith("cannot lose")


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
