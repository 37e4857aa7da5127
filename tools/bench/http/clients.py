"""Client apps of the gateway and of the library: `python -m tools.bench.http.clients ipc://PATH KEY ADDRESS`, on the hub.

They speak the least of HTTP that is needed, so that their own work is not measured as the gateway's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hearth.client.home import AsyncHome, connect_async
from hearth.platform.security import coordinator_access, load_credential, parse_token
from tools.bench.child import HomeClients, serve
from tools.bench.http.home import HOST, PORT

_PATH = "/v1/chat/completions"
_DATA = b"data: "
_CONNECT_SECONDS = 30.0
_ANSWER_SECONDS = 300.0


def request_bytes(
    method: str, path: str, token: str | None = None, body: object = None, headers: Mapping[str, str] = {}
) -> bytes:
    """One request of HTTP/1.1, with its body as JSON."""
    content = b"" if body is None else json.dumps(body).encode()
    fields = {
        "Host": "localhost",
        **({"Authorization": f"Bearer {token}"} if token is not None else {}),
        **({"Content-Type": "application/json", "Content-Length": str(len(content))} if body is not None else {}),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content


class Connection:
    """A connection that stays open, for answers that are streams of server-sent events."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._address, self._token = (host, port), token
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def events(self, path: str, body: object) -> AsyncIterator[bytes]:
        """Post a request; the data of its events as they arrive. Raises ValueError for another status than 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        writer.write(request_bytes("POST", path, self._token, body))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ValueError((head + await reader.read(4096)).decode(errors="replace"))
        while True:
            num = int(await reader.readline(), 16)
            piece = (await reader.readexactly(num + 2))[:-2]
            if not num:
                return
            for event in piece.split(b"\n\n"):
                if event.startswith(_DATA):
                    yield event.removeprefix(_DATA)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


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
