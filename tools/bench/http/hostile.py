"""Hostile apps of a home: `python -m tools.bench.http.hostile ipc://PATH KEY ADDRESS`, on the hub.

Each has one valid key, and does one thing as often as it can.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from hearth.client.home import AsyncHome
from hearth.errors import HearthError
from hearth.platform.asyncio_tools import with_timeout
from tools.bench.child import serve
from tools.bench.http.clients import HttpClients, request_bytes
from tools.bench.http.home import HOST, PORT

_LONG = 400  # tokens of a long answer or prompt
_BODY_BYTES = 8 << 20
_HELD_SECONDS = 60.0  # for which a connection is held open, unless the gateway ends it
_PAUSE_SECONDS = 0.05  # after an error
_NICENESS = 10  # these apps stand for other machines, whose work takes nothing from the home's processors


class Hostile(HttpClients):
    """`begin` starts one of `ATTACKS`, until `end`."""

    def __init__(self, key: Path, address: str) -> None:
        super().__init__(key, address)
        os.nice(_NICENESS)
        self._tasks: list[asyncio.Task[None]] = []
        self._done = 0
        self._errors: Counter[str] = Counter()

    async def begin(self, attack: str, token: str, count: int) -> None:
        """Start `count` tasks that do the same again and again."""
        self._done, self._errors = 0, Counter()
        self._tasks = [asyncio.create_task(self._repeat(ATTACKS[attack], token)) for _ in range(count)]

    async def end(self) -> dict[str, Any]:
        """Returns how often it was done, and the number of errors by their names."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return {"done": self._done, "errors": dict(self._errors)}

    async def _repeat(self, act: Callable[[Hostile, str], Awaitable[None]], token: str) -> None:
        while True:
            try:
                await act(self, token)
                self._done += 1
            except (HearthError, OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
                self._errors[type(error).__name__] += 1
                await asyncio.sleep(_PAUSE_SECONDS)

    async def generations(self, token: str, num_prompt_tokens: int, max_tokens: int) -> None:
        async with await self._library(token) as home:
            while True:
                async with _generation(home, num_prompt_tokens, max_tokens) as answer:
                    async for _ in answer:
                        pass
                self._done += 1

    async def cancelled(self, token: str) -> None:
        async with await self._library(token) as home:
            while True:
                async with _generation(home, 100, _LONG) as answer:
                    if random.random() < 0.5:
                        await anext(aiter(answer))
                self._done += 1

    async def reconnecting(self, token: str) -> None:
        async with await self._library(token) as home, _generation(home, 12, _LONG) as answer:
            await anext(aiter(answer))

    async def chats(self, token: str) -> None:
        await self.ask(token, _chat(_LONG))

    async def unread_chats(self, token: str) -> None:
        _, writer = await _connection(limit=1)  # bytes that it reads
        try:
            writer.write(request_bytes("POST", "/v1/chat/completions", token, {**_chat(_LONG), "stream": True}))
            await asyncio.sleep(_HELD_SECONDS)
        finally:
            writer.close()

    async def idle_connections(self, token: str) -> None:
        reader, writer = await _connection()
        try:
            writer.write(b"GET /health HTTP/1.1\r\n")
            await with_timeout(_HELD_SECONDS, reader.read(1))
        finally:
            writer.close()

    async def large_bodies(self, token: str) -> None:
        body = _large_body(random.choice(["[]", "[[]]", '""', "0", "{}", '{"a":[]}', "null", '"\\ud800"', "1e999"]))
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        reader, writer = await _connection()
        try:
            writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            writer.write(body)
            await with_timeout(_HELD_SECONDS, reader.readuntil(b"\r\n\r\n"))
        finally:
            writer.close()


# What an app does, as often as it can.
ATTACKS: dict[str, Callable[[Hostile, str], Awaitable[None]]] = {
    "long answers": partial(Hostile.generations, num_prompt_tokens=12, max_tokens=_LONG),
    "long prompts": partial(Hostile.generations, num_prompt_tokens=_LONG, max_tokens=1),
    "requests that it cancels": Hostile.cancelled,
    "connections that it ends": Hostile.reconnecting,
    "chats over HTTP": Hostile.chats,
    "chats over HTTP that it does not read": Hostile.unread_chats,
    "idle HTTP connections": Hostile.idle_connections,
    "HTTP bodies of 8 MiB": Hostile.large_bodies,
}


async def _connection(limit: int = 1 << 16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the gateway from another address than that of the good app."""
    return await asyncio.open_connection(HOST, PORT, limit=limit, local_addr=("127.0.0.2", 0))


@cache
def _large_body(value: str) -> bytes:
    """JSON with a list of nothing but this value."""
    return b'{"input": [' + b",".join([value.encode()] * (_BODY_BYTES // (len(value) + 1) - 8)) + b"]}"


def _chat(max_tokens: int) -> dict[str, Any]:
    return {"model": "model", "messages": [{"role": "user", "content": "Tell me all."}], "max_tokens": max_tokens}


def _generation(home: AsyncHome, num_prompt_tokens: int, max_tokens: int) -> Any:
    """A request with a prompt of its own, so that no KV cache has it."""
    prompt = [random.randrange(3, 1000) for _ in range(num_prompt_tokens)]
    return home.generate(token_ids=prompt, max_tokens=max_tokens, timeout_seconds=_HELD_SECONDS)


if __name__ == "__main__":
    serve(sys.argv[1], Hostile(Path(sys.argv[2]), sys.argv[3]))
