"""Client apps that request generation: `python -m tools.bench.clients ipc://PATH KEY ADDRESS`, in the hub's namespace.

Each client has its own connection and uses the client library like any app.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from hearth.client.home import AsyncHome, connect_async
from hearth.errors import HearthError
from tools.bench.child import AsyncTarget, serve

_CONNECT_SECONDS = 30.0  # most time to reach a coordinator that serves already
_ANSWER_SECONDS = 300.0  # timeout of a request: far above any answer, so that a loaded machine causes no error
_CANCEL_EVERY = 3  # each client cancels one request in this many: enough to test, and most still complete
_BEFORE_FIRST_TOKEN_SECONDS = 0.05  # after which to cancel a request before its first token: it is in prefill then


class Request(BaseModel):
    """A request to generate; arguments of `hearth.client.Home.generate`."""

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    max_tokens: int
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None


class Outcome(BaseModel):
    """The outcome of a request. `index`: of the request in the list."""

    model_config = ConfigDict(frozen=True)

    index: int
    tokens: list[int]
    cancelled: bool = False
    error: str = ""
    first_token_seconds: float | None = None


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


class Clients(HomeClients):
    """Clients that generate."""

    async def generate(self, requests: list[Any], together: bool) -> dict[str, Any]:
        """Send all requests, concurrently (`together`) or one after the other."""
        async with await self.connected() as home:
            calls = [_generate(home, index, Request.model_validate(each), None) for index, each in enumerate(requests)]
            outcomes = await asyncio.gather(*calls) if together else [await call for call in calls]
        return _dumped(outcomes)

    async def soak(self, requests: list[Any], clients: int, seconds: float, seed: int) -> dict[str, Any]:
        """Run `clients` clients for `seconds`. Each sends random requests one after the other and cancels every third."""
        pool = [Request.model_validate(each) for each in requests]
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        outcomes: list[Outcome] = []

        async def client(number: int, home: AsyncHome) -> None:
            rng = random.Random(f"{seed} {number}")
            sent = number  # so that clients do not cancel at the same time
            while loop.time() < until:
                index = rng.randrange(len(pool))
                after = rng.randint(0, pool[index].max_tokens * 3 // 4) if sent % _CANCEL_EVERY == 0 else None
                outcomes.append(await _generate(home, index, pool[index], after))
                sent += 1

        async with AsyncExitStack() as stack:
            homes = [await stack.enter_async_context(await self.connected()) for _ in range(clients)]
            await asyncio.gather(*(client(number, home) for number, home in enumerate(homes)))
        return _dumped(outcomes)


def _dumped(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {"outcomes": [outcome.model_dump() for outcome in outcomes]}


async def _generate(home: AsyncHome, index: int, request: Request, cancel_after: int | None) -> Outcome:
    """Run one request. Cancel it after `cancel_after` tokens; 0: before the first token; None: never."""
    answer = home.generate(**request.model_dump(), timeout_seconds=_ANSWER_SECONDS)
    first, error = None, ""
    try:
        async with answer:
            if cancel_after == 0:
                waiting = asyncio.ensure_future(anext(answer))
                await asyncio.wait({waiting}, timeout=_BEFORE_FIRST_TOKEN_SECONDS)
                await answer.aclose()
                await asyncio.gather(waiting, return_exceptions=True)
            else:
                async for token in answer:
                    first = token.seconds if first is None else first
                    if len(answer.token_ids) == cancel_after:
                        break
    except HearthError as failure:
        error = str(failure)
    cancelled = cancel_after is not None and not error and answer.usage is None
    return Outcome(index=index, tokens=answer.token_ids, cancelled=cancelled, error=error, first_token_seconds=first)


if __name__ == "__main__":
    serve(sys.argv[1], Clients(Path(sys.argv[2]), sys.argv[3]))
