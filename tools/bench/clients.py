"""Client apps that request generation: `python -m tools.bench.clients ipc://PATH KEY ADDRESS`, in the hub's namespace.

Each client has its own connection and uses the client library like any app.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from hearth.client.home import AsyncHome, connect_async
from hearth.errors import DeadlineExceeded, HearthError, InternalError
from tools.bench.child import AsyncTarget, serve

_CONNECT_SECONDS = 30.0  # most time to reach a coordinator that serves already
_POLL_SECONDS = 0.5  # between looks at the status
_ANSWER_SECONDS = 300.0  # timeout of a request: far above any answer, so that a loaded machine causes no error


class Request(BaseModel):
    """A request to generate; arguments of `hearth.client.AsyncHome.generate`."""

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    max_tokens: int


class Outcome(BaseModel):
    """The outcome of a request."""

    model_config = ConfigDict(frozen=True)

    tokens: list[int]
    error: str = ""


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


class Clients(HomeClients):
    """A client that generates."""

    async def ping(self) -> dict[str, Any]:
        """Answer, to show that the process has started."""
        return {}

    async def first_answer(self, prompt: list[int], timeout_seconds: float) -> dict[str, Any]:
        """Wait until a plan serves, then for the first token of an answer, whose time is returned."""
        async with await self.connected(timeout_seconds) as home:
            await home.wait_ready(timeout_seconds)
            began = time.monotonic()
            outcome = await _generate(home, Request(token_ids=prompt, max_tokens=1))
            if outcome.error:
                raise InternalError(where="the first answer", reason=outcome.error)
            return {"answer_seconds": time.monotonic() - began}

    async def generate(self, requests: list[Any]) -> dict[str, Any]:
        """Send all requests concurrently. `outcomes`: in the order of the requests."""
        async with await self.connected() as home:
            outcomes = await asyncio.gather(*(_generate(home, Request.model_validate(each)) for each in requests))
        return {"outcomes": [outcome.model_dump() for outcome in outcomes]}


async def _generate(home: AsyncHome, request: Request) -> Outcome:
    answer = home.generate(**request.model_dump(), timeout_seconds=_ANSWER_SECONDS)
    error = ""
    try:
        async with answer:
            async for _ in answer:
                pass
    except HearthError as failure:
        error = str(failure)
    return Outcome(tokens=answer.token_ids, error=error)


if __name__ == "__main__":
    serve(sys.argv[1], Clients(Path(sys.argv[2]), sys.argv[3]))
