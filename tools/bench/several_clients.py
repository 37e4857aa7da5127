"""Client apps of several models at once: `python -m tools.bench.several_clients ipc://PATH KEY ADDRESS`, on the hub.

Answers are compared with those of each model when it was the only one of the home: the same process asks for them first.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from hearth.client.home import AsyncHome
from hearth.errors import HearthError
from tools.bench.child import serve
from tools.bench.clients import HomeClients
from tools.bench.load_clients import POOL_SIZE, Work, work_of
from tools.bench.several_rows import Asked

_FAILURE_PAUSE_SECONDS = 0.1  # so that a client does not flood a home that refuses at once


class SeveralClients(HomeClients):
    """Some clients of each model, each with a connection of its own. Requests name no model: each model is of another kind."""

    def __init__(self, key: Path, address: str) -> None:
        super().__init__(key, address)
        self._works: dict[str, Work] = {}
        self._references: dict[str, list[Any]] = {}
        self._asked: dict[str, Asked] = {}
        self._asking: list[asyncio.Task[None]] = []
        self._ends = False

    async def remember(self, load: str, **fields: Any) -> None:
        """Ask for the references of a model. `load`, `fields`: arguments of `work_of`."""
        work = self._works[load] = work_of(load, **fields)
        async with await self.connected() as home:
            await work.prepare(home)
            self._references[load] = [await work.answer(home, item, lambda: None) for item in range(POOL_SIZE)]

    async def models(self) -> dict[str, Any]:
        """What the home serves."""
        async with await self.connected() as home:
            return {"models": [each.model_dump(mode="json") for each in await home.models()]}

    async def begin(self, loads: list[str], num_clients: int) -> None:
        """Start the clients of these models: each sends one request after the other."""
        homes = [(load, await self.connected()) for load in loads for _ in range(num_clients)]
        self._ends, self._asked = False, {load: Asked() for load in loads}
        self._asking = [asyncio.create_task(self._ask(load, number, home)) for number, (load, home) in enumerate(homes)]

    def counts(self) -> dict[str, int]:
        """By model, the correct answers since `begin`."""
        return {load: asked.answers for load, asked in self._asked.items()}

    async def end(self) -> dict[str, Any]:
        """Send no more requests, and wait for the answers to those that were sent. Returns an `Asked` by model."""
        self._ends = True
        await asyncio.gather(*self._asking)
        return {load: asked.model_dump() for load, asked in self._asked.items()}

    async def _ask(self, load: str, number: int, home: AsyncHome) -> None:
        loop, work, asked = asyncio.get_running_loop(), self._works[load], self._asked[load]
        item, count, began = number, 0, loop.time()
        async with home:
            while not self._ends:
                item, sent = (item + 1) % POOL_SIZE, loop.time()
                try:
                    answer = await work.answer(home, item, lambda: None)
                except HearthError as error:
                    asked.failed.append(f"{type(error).__name__}: {error}"[:300])
                    await asyncio.sleep(_FAILURE_PAUSE_SECONDS)
                    continue
                finally:
                    asked.longest_seconds = max(asked.longest_seconds, loop.time() - sent)
                if wrong := work.difference(answer, self._references[load][item]):
                    asked.wrong.append(wrong)
                else:
                    asked.answers += 1
                    count += 1
            asked.per_second += count / (loop.time() - began)


if __name__ == "__main__":
    serve(sys.argv[1], SeveralClients(Path(sys.argv[2]), sys.argv[3]))
