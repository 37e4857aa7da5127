"""Client apps of the gateway and of the library: `python -m tools.bench.http.clients ipc://PATH KEY ADDRESS`, on the hub."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hearth.client.home import AsyncHome, connect_async
from hearth.platform.security import coordinator_access, load_credential, parse_token
from tools.bench.child import serve
from tools.bench.clients import HomeClients
from tools.bench.http.home import HOST, PORT
from tools.bench.http.wire import Connection

_PATH = "/v1/chat/completions"
_CONNECT_SECONDS = 30.0
_ANSWER_SECONDS = 300.0


class HttpClients(HomeClients):
    """Clients of one app."""

    async def first_tokens(self, token: str, body: dict[str, Any], pairs: int) -> dict[str, Any]:
        """Ask the coordinator directly and over HTTP, in turn. Returns the seconds until the first text of each."""
        http, direct, texts = [], [], set()
        connection = Connection(HOST, PORT, token)
        async with await self._library(token) as home:
            for number in range(pairs):
                for way in ("http", "direct") if number % 2 else ("direct", "http"):
                    if way == "http":
                        seconds, text = await _streamed(connection, body)
                        http.append(seconds)
                    else:
                        seconds, text = await _generated(home, body)
                        direct.append(seconds)
                    texts.add(text)
        connection.close()
        return {"http": http, "direct": direct, "texts": len(texts)}

    async def streams(self, token: str, bodies: list[Any]) -> dict[str, Any]:
        """All chats at once, each over a connection of its own. Returns their texts and numbers of tokens."""
        connections = [Connection(HOST, PORT, token) for _ in bodies]
        answers = await asyncio.gather(*map(_whole, connections, bodies))
        for connection in connections:
            connection.close()
        return {
            "texts": [text for text, _ in answers],
            "tokens": sum(usage["completion_tokens"] for _, usage in answers),
        }

    async def references(self, token: str, bodies: list[Any]) -> dict[str, Any]:
        """The texts of the same chats, from the coordinator, one after the other."""
        async with await self._library(token) as home:
            return {"texts": [(await _generated(home, body))[1] for body in bodies]}

    async def ask(self, token: str, body: dict[str, Any]) -> dict[str, Any]:
        """One streamed chat: the seconds until its first event with a part of the answer, and its usage."""
        loop = asyncio.get_running_loop()
        usage: dict[str, Any] = {}
        connection, began, first = Connection(HOST, PORT, token), loop.time(), 0.0
        async for data in connection.events(_PATH, {**body, "stream": True, "stream_options": {"include_usage": True}}):
            first = first or loop.time() - began
            if data != b"[DONE]":
                usage = json.loads(data).get("usage") or usage
        connection.close()
        return {"first_seconds": first, "usage": usage}

    async def steady(self, token: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Chat after chat for some seconds. Returns the seconds that each took, and what failed."""
        loop = asyncio.get_running_loop()
        took, failed, end = [], [], loop.time() + seconds
        while (began := loop.time()) < end:
            connection = Connection(HOST, PORT, token)
            try:
                await asyncio.wait_for(_whole(connection, body), _ANSWER_SECONDS)
                took.append(loop.time() - began)
            except (OSError, ValueError, EOFError, asyncio.TimeoutError) as error:
                failed.append(f"{type(error).__name__}: {error}"[:300])
            connection.close()
        return {"seconds": took, "failed": failed}

    async def _library(self, token: str) -> AsyncHome:
        """A connection of the client library as the app of this token."""
        coordinator = coordinator_access(load_credential(self._key)).server_public
        return await connect_async(self._address, parse_token(token, coordinator), _CONNECT_SECONDS)


async def _streamed(connection: Connection, body: dict[str, Any]) -> tuple[float, str]:
    loop = asyncio.get_running_loop()
    began, first, text = loop.time(), 0.0, ""
    async for data in connection.events(_PATH, {**body, "stream": True}):
        said = _said(data)
        if said and not first:
            first = loop.time() - began
        text += said
    return first, text


async def _generated(home: AsyncHome, body: dict[str, Any]) -> tuple[float, str]:
    loop = asyncio.get_running_loop()
    began, first, text = loop.time(), 0.0, ""
    settings = {name: body[name] for name in ("messages", "max_tokens", "temperature", "seed") if name in body}
    answer = home.generate(**settings, timeout_seconds=_ANSWER_SECONDS, takes_parts=True)
    async with answer:
        async for token in answer:
            if token.text and not first:
                first = loop.time() - began
            text += token.text
    return first, text


async def _whole(connection: Connection, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    text = ""
    usage: dict[str, Any] = {}
    async for data in connection.events(_PATH, {**body, "stream": True, "stream_options": {"include_usage": True}}):
        text += _said(data)
        if data != b"[DONE]":
            usage = json.loads(data).get("usage") or usage
    return text, usage


def _said(data: bytes) -> str:
    """The text of an event. Raises ValueError for an error."""
    if data == b"[DONE]":
        return ""
    event = json.loads(data)
    if "error" in event:
        raise ValueError(event["error"]["message"])
    choices: Sequence[Any] = event["choices"]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


if __name__ == "__main__":
    serve(sys.argv[1], HttpClients(Path(sys.argv[2]), sys.argv[3]))
