"""Client apps that request generation: `python -m tools.bench.clients ipc://PATH KEY ADDRESS`, in the hub's namespace.

Each client has its own connection and uses the client library like any app.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from hearth.client.home import AsyncHome, connect_async
from hearth.errors import HearthError
from tools.bench.child import serve

_CALL_SECONDS = 1800.0  # timeout of a call from the parent
_ANSWER_SECONDS = 300.0  # timeout of a request
_CANCEL_EVERY = 3  # each client cancels one request in this many
_BEFORE_FIRST_TOKEN_SECONDS = 0.05  # after which to cancel a request before its first token

_T = TypeVar("_T")


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


class Clients:
    """Executes one call at a time, in an event loop on a separate thread."""

    def __init__(self, key: Path, address: str) -> None:
        self._key, self._address = key, address
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def wait_ready(self, within_seconds: float) -> dict[str, Any]:
        """Wait until the coordinator serves; returns its status. Raises the errors of the client library."""
        return self._run(self._wait_ready(within_seconds))

    def status(self) -> dict[str, Any]:
        return self._run(self._status())

    def ask(self, asks: list[Any], together: bool) -> dict[str, Any]:
        """Send all requests, concurrently (`together`) or one after the other."""
        return {"outcomes": self._run(self._ask([Ask.model_validate(each) for each in asks], together))}

    def soak(self, asks: list[Any], clients: int, seconds: float, seed: int) -> dict[str, Any]:
        """Run `clients` clients for `seconds`. Each sends random requests one after the other and cancels every third."""
        pool = [Ask.model_validate(each) for each in asks]
        return {"outcomes": self._run(self._soak(pool, clients, seconds, seed))}

    def _run(self, call: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(_CALL_SECONDS)

    async def _connected(self, seconds: float = 30.0) -> AsyncHome:
        return await connect_async(self._address, self._key, seconds)

    async def _wait_ready(self, seconds: float) -> dict[str, Any]:
        async with await self._connected(seconds) as home:
            await home.wait_ready(seconds)
            return (await home.status()).model_dump(mode="json")

    async def _status(self) -> dict[str, Any]:
        async with await self._connected() as home:
            return (await home.status()).model_dump(mode="json")

    async def _ask(self, asks: Sequence[Ask], together: bool) -> list[dict[str, Any]]:
        async with await self._connected() as home:
            calls = [_answered(home, index, each, None) for index, each in enumerate(asks)]
            outcomes = await asyncio.gather(*calls) if together else [await call for call in calls]
        return [outcome.model_dump() for outcome in outcomes]

    async def _soak(self, pool: Sequence[Ask], clients: int, seconds: float, seed: int) -> list[dict[str, Any]]:
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
            homes = [await stack.enter_async_context(await self._connected()) for _ in range(clients)]
            await asyncio.gather(*(client(number, home) for number, home in enumerate(homes)))
        return [outcome.model_dump() for outcome in outcomes]


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
