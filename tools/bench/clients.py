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
_ANSWER_SECONDS = 300.0  # timeout of a request
_CANCEL_EVERY = 3  # each client cancels one request in this many
_BEFORE_FIRST_TOKEN_SECONDS = 0.05  # after which to cancel a request before its first token


class Ask(BaseModel):
    """A request to generate."""

    model_config = ConfigDict(frozen=True)

    prompt: list[int]
    max_tokens: int
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None


class Outcome(BaseModel):
    """The outcome of a request; `ask` is its index in the list."""

    model_config = ConfigDict(frozen=True)

    ask: int
    tokens: list[int]
    cancelled: bool = False
    error: str = ""
    first_token_seconds: float | None = None


class HomeClients(AsyncTarget):
    """Apps of one home, on the client library. Subclasses add their requests."""

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

    async def ask(self, asks: list[Any], together: bool) -> dict[str, Any]:
        """Send all requests, concurrently (`together`) or one after the other."""
        async with await self.connected() as home:
            calls = [_answered(home, index, Ask.model_validate(each), None) for index, each in enumerate(asks)]
            outcomes = await asyncio.gather(*calls) if together else [await call for call in calls]
        return _dumped(outcomes)

    async def soak(self, asks: list[Any], clients: int, seconds: float, seed: int) -> dict[str, Any]:
        """Run `clients` clients for `seconds`. Each sends random requests one after the other and cancels every third."""
        pool = [Ask.model_validate(each) for each in asks]
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        outcomes: list[Outcome] = []

        async def client(number: int, home: AsyncHome) -> None:
            chance = random.Random(f"{seed} {number}")
            asked = number  # so that clients do not cancel at the same time
            while loop.time() < until:
                index = chance.randrange(len(pool))
                after = chance.randint(0, pool[index].max_tokens * 3 // 4) if asked % _CANCEL_EVERY == 0 else None
                outcomes.append(await _answered(home, index, pool[index], after))
                asked += 1

        async with AsyncExitStack() as stack:
            homes = [await stack.enter_async_context(await self.connected()) for _ in range(clients)]
            await asyncio.gather(*(client(number, home) for number, home in enumerate(homes)))
        return _dumped(outcomes)


def _dumped(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {"outcomes": [outcome.model_dump() for outcome in outcomes]}


async def _answered(home: AsyncHome, index: int, ask: Ask, cancel_after: int | None) -> Outcome:
    """Run one request. Cancel it after `cancel_after` tokens; 0: before the first token; None: never."""
    answer = home.generate(
        token_ids=ask.prompt, max_tokens=ask.max_tokens, temperature=ask.temperature, top_k=ask.top_k,
        top_p=ask.top_p, seed=ask.seed, timeout_seconds=_ANSWER_SECONDS,
    )  # fmt: skip
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
    return Outcome(ask=index, tokens=answer.token_ids, cancelled=cancelled, error=error, first_token_seconds=first)


if __name__ == "__main__":
    serve(sys.argv[1], Clients(Path(sys.argv[2]), sys.argv[3]))
