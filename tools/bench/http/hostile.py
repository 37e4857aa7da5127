"""Hostile apps of a home: `python -m tools.bench.http.hostile ipc://PATH KEY ADDRESS`, on the hub.

Each has one valid key, and does one thing as often as it can.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

from hearth.client.home import AsyncHome
from hearth.errors import HearthError
from hearth.platform.asyncio_tools import cancel_all, with_timeout
from tools.bench.http.clients import HttpClients, request_bytes
from tools.bench.http.home import HOST, PORT
from tools.bench.processes import serve

_LONG = 400  # tokens of a long answer or prompt
_BODY_BYTES = 8 << 20
_NUM_KEPT = 16  # of bodies, which take milliseconds to make
_HELD_SECONDS = 60.0  # for which a connection is held open, unless the gateway ends it
_PAUSE_SECONDS = 0.05  # after an error
_ADDRESS = "127.0.0.2"  # another one than that of the good app
_NICENESS = 10  # these apps stand for other machines, whose work takes nothing from the home's processors


class Hostile(HttpClients):
    """`begin` starts one of `ATTACKS`, until `end`."""

    def __init__(self, key: Path, address: str) -> None:
        super().__init__(key, address)
        os.nice(_NICENESS)
        self._tasks: list[asyncio.Task[None]] = []
        self._done = 0
        self._errors: Counter[str] = Counter()
        self._num_bodies = 0

    async def begin(self, attack: str, tokens: list[str], count: int) -> None:
        """Start `count` tasks that do the same again and again, with these tokens in turn."""
        self._done, self._errors = 0, Counter()
        turns = cycle(tokens)
        self._tasks = [asyncio.create_task(self._repeat(ATTACKS[attack], turns)) for _ in range(count)]

    async def end(self) -> dict[str, Any]:
        """Returns how often it was done, and the number of errors by their names."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return {"done": self._done, "errors": dict(self._errors)}

    async def _repeat(self, act: Callable[[Hostile, str], Awaitable[None]], tokens: Iterator[str]) -> None:
        while True:
            try:
                await act(self, next(tokens))
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
        with closing(writer):
            writer.write(request_bytes("POST", "/v1/chat/completions", token, {**_chat(_LONG), "stream": True}))
            await asyncio.sleep(_HELD_SECONDS)

    async def idle_connections(self, token: str) -> None:
        reader, writer = await _connection()
        with closing(writer):
            await with_timeout(_HELD_SECONDS, reader.read(1))

    async def large_bodies(self, token: str, num_different: int) -> None:
        self._num_bodies += 1
        path, body = generated_body(self._num_bodies % num_different)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        with socket.create_connection((HOST, PORT), source_address=(_ADDRESS, 0)) as connection:
            connection.setblocking(False)
            await loop.sock_sendall(connection, head.encode())
            sending = asyncio.create_task(loop.sock_sendall(connection, body))  # a stream would copy it
            try:
                await with_timeout(_HELD_SECONDS, loop.sock_recv(connection, 1 << 16))
            finally:
                await cancel_all([sending])


ONE_AFTER_THE_OTHER = "HTTP bodies of 8 MiB, one after the other, of many apps"  # so that none is refused unread
# What an app does, as often as it can.
ATTACKS: dict[str, Callable[[Hostile, str], Awaitable[None]]] = {
    "long answers": partial(Hostile.generations, num_prompt_tokens=12, max_tokens=_LONG),
    "long prompts": partial(Hostile.generations, num_prompt_tokens=_LONG, max_tokens=1),
    "requests that it cancels": Hostile.cancelled,
    "connections that it ends": Hostile.reconnecting,
    "chats over HTTP": Hostile.chats,
    "chats over HTTP that it does not read": Hostile.unread_chats,
    "idle HTTP connections": Hostile.idle_connections,
    "HTTP bodies of 8 MiB": partial(Hostile.large_bodies, num_different=_NUM_KEPT),
    ONE_AFTER_THE_OTHER: partial(Hostile.large_bodies, num_different=1000),
}


async def _connection(limit: int = 1 << 16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the gateway."""
    return await asyncio.open_connection(HOST, PORT, limit=limit, local_addr=(_ADDRESS, 0))


@lru_cache(_NUM_KEPT)
def generated_body(number: int) -> tuple[str, bytes]:
    """A path and a body of `_BODY_BYTES`: a field with the same random value again and again, often not quite JSON."""
    rng = random.Random(number)
    path, field = rng.choice(_FIELDS)
    value = json.dumps(_value(rng, 3), ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.3:
        at = rng.randrange(len(value))
        value = value[:at] + rng.choice('[]{}",:\\0') + value[at + 1 :]
    begin, end = rng.choice([("[", "]"), ("[", "]"), ("", ""), ('"', '"'), ('{"a":', "}"), ("[[[[", "]]]]")])
    repeated = (value + rng.choice([",", ",", ", ", "", "\n", ":"])).encode(errors="surrogatepass")
    head, tail = f'{{"model": "model", "{field}": {begin}'.encode(), f"{value}{end}}}".encode(errors="surrogatepass")
    return path, head + repeated * ((_BODY_BYTES - len(head) - len(tail)) // len(repeated)) + tail


_FIELDS = (
    ("/v1/embeddings", "input"), ("/v1/chat/completions", "messages"), ("/v1/chat/completions", "tools"),
    ("/v1/completions", "prompt"), ("/v1/completions", "stop"), ("/v1/responses", "input"), ("/api/chat", "messages"),
    ("/api/generate", "prompt"), ("/api/embed", "input"), ("/v1/chat/completions", "logit_bias"),
)  # fmt: skip


def _value(rng: random.Random, depth: int) -> object:
    """A random JSON value."""
    if depth and rng.random() < 0.5:
        values = [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
        return values if rng.random() < 0.5 else {rng.choice(("role", "content", "a", "")): each for each in values}
    return rng.choice(
        [None, True, 0, -1.5e300, 10**30, "", "user", '"\\"', "\ud800", "\u00e9" * 40, "x" * 5000, "word " * 400]
    )


def _chat(max_tokens: int) -> dict[str, Any]:
    return {"model": "model", "messages": [{"role": "user", "content": "Tell me all."}], "max_tokens": max_tokens}


def _generation(home: AsyncHome, num_prompt_tokens: int, max_tokens: int) -> Any:
    """A request with a prompt of its own, so that no KV cache has it."""
    prompt = [random.randrange(3, 1000) for _ in range(num_prompt_tokens)]
    return home.generate(token_ids=prompt, max_tokens=max_tokens, timeout_seconds=_HELD_SECONDS)


if __name__ == "__main__":
    serve(sys.argv[1], Hostile(Path(sys.argv[2]), sys.argv[3]))
