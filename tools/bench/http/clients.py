"""Client apps of the gateway and of the library: `python -m tools.bench.http.clients ipc://PATH KEY ADDRESS`, on the hub."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

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
                        chat = await _chat(connection, body)
                        http.append(chat.text_seconds)
                        texts.add(chat.text)
                    else:
                        seconds, text = await _generated(home, body)
                        direct.append(seconds)
                        texts.add(text)
        connection.close()
        return {"http": http, "direct": direct, "texts": len(texts)}

    async def streams(self, token: str, bodies: list[Any]) -> dict[str, Any]:
        """All chats at once, each over a connection of its own. Returns their texts and numbers of tokens."""
        connections = [Connection(HOST, PORT, token) for _ in bodies]
        chats = await asyncio.gather(*map(_chat, connections, bodies))
        for connection in connections:
            connection.close()
        return {
            "texts": [chat.text for chat in chats],
            "tokens": sum(chat.usage["completion_tokens"] for chat in chats),
        }

    async def references(self, token: str, bodies: list[Any]) -> dict[str, Any]:
        """The texts of the same chats, from the coordinator, one after the other."""
        async with await self._library(token) as home:
            return {"texts": [(await _generated(home, body))[1] for body in bodies]}

    async def ask(self, token: str, body: dict[str, Any]) -> dict[str, Any]:
        """One streamed chat: the seconds until its first event, and its usage."""
        connection = Connection(HOST, PORT, token)
        chat = await _chat(connection, body)
        connection.close()
        return {"first_seconds": chat.event_seconds, "usage": chat.usage}

    async def steady(self, token: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Chat after chat for some seconds. Returns the seconds that each took, and what failed."""
        loop = asyncio.get_running_loop()
        took, failed, end = [], [], loop.time() + seconds
        while (began := loop.time()) < end:
            connection = Connection(HOST, PORT, token)
            try:
                await asyncio.wait_for(_chat(connection, body), _ANSWER_SECONDS)
                took.append(loop.time() - began)
            except (OSError, ValueError, EOFError, asyncio.TimeoutError) as error:
                failed.append(f"{type(error).__name__}: {error}"[:300])
            connection.close()
        return {"seconds": took, "failed": failed}

    async def _library(self, token: str) -> AsyncHome:
        """A connection of the client library as the app of this token."""
        coordinator = coordinator_access(load_credential(self._key)).server_public
        return await connect_async(self._address, parse_token(token, coordinator), _CONNECT_SECONDS)


class _Chat(NamedTuple):
    """One streamed chat over HTTP. Seconds: until its first event, and until its first text; 0 if there was none."""

    event_seconds: float
    text_seconds: float
    text: str
    usage: dict[str, Any]


async def _chat(connection: Connection, body: dict[str, Any]) -> _Chat:
    """Ask, and read to the end. Raises ValueError for an error."""
    loop = asyncio.get_running_loop()
    began, event_seconds, text_seconds, text = loop.time(), 0.0, 0.0, ""
    usage: dict[str, Any] = {}
    async for data in connection.events(_PATH, {**body, "stream": True, "stream_options": {"include_usage": True}}):
        seconds = loop.time() - began
        event_seconds = event_seconds or seconds
        if data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise ValueError(event["error"]["message"])
        said = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if said:
            text_seconds = text_seconds or seconds
        text += said
        usage = event.get("usage") or usage
    return _Chat(event_seconds, text_seconds, text, usage)


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


if __name__ == "__main__":
    serve(sys.argv[1], HttpClients(Path(sys.argv[2]), sys.argv[3]))
