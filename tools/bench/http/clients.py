"""Client apps of the gateway and of the library: `python -m tools.bench.http.clients ipc://PATH KEY ADDRESS`, on the hub.

They speak the least of HTTP that is needed, so that their own work is not measured as the gateway's.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from hearth.client.home import AsyncHome, connect_async
from hearth.errors import HearthError
from hearth.platform.security import coordinator_access, load_credential, parse_token
from tools.bench.http.home import HOST, PORT
from tools.bench.processes import HomeClients, serve

_PATH = "/v1/chat/completions"
_DATA = b"data: "
_CONNECT_SECONDS = 30.0
_ANSWER_SECONDS = 300.0
_LOOK_SECONDS = 0.5  # between two new connections


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


class HttpClients(HomeClients):
    """Clients of one app. They speak TLS once they know the authority of the gateway's certificate."""

    tls: ssl.SSLContext | None = None

    async def trust(self, authority: str) -> None:
        """Speak TLS from now on. `authority`: the file with its certificate."""
        self.tls = ssl.create_default_context(cafile=authority)

    async def first_tokens(self, token: str, body: dict[str, Any], pairs: int) -> dict[str, Any]:
        """Ask the coordinator directly and over HTTP, in turn. Returns the seconds until the first text of each."""
        seconds: dict[str, list[float]] = {"http": [], "direct": []}
        streams = await asyncio.open_connection(HOST, PORT)
        async with await self._library(token) as home:
            for number in range(pairs):
                for way in ("http", "direct") if number % 2 else ("direct", "http"):
                    if way == "http":
                        seconds[way].append((await _chat(streams, token, body)).text_seconds)
                    else:
                        seconds[way].append((await _generated(home, body))[0])
        streams[1].close()
        return seconds

    async def streams(self, token: str, bodies: list[Any]) -> dict[str, Any]:
        """All chats at once, each over a connection of its own. Returns their texts and number of tokens."""
        chats = await asyncio.gather(*(self._chat(token, body) for body in bodies))
        tokens = sum(chat.usage["completion_tokens"] for chat in chats)
        return {"texts": [chat.text for chat in chats], "tokens": tokens}

    async def references(self, token: str, bodies: list[Any]) -> dict[str, Any]:
        """The texts of the same chats, from the coordinator, one after the other."""
        async with await self._library(token) as home:
            return {"texts": [(await _generated(home, body))[1] for body in bodies]}

    async def ask(self, token: str, body: dict[str, Any]) -> dict[str, Any]:
        """One streamed chat: the seconds until its first event, and its usage."""
        chat = await self._chat(token, body)
        return {"first_seconds": chat.event_seconds, "usage": chat.usage}

    async def keep_asking(self, token: str, seconds: float, max_tokens: int) -> dict[str, Any]:
        """Ask without pause for so long, with the library and over HTTP. Returns answers, tokens and errors.

        Twice a second a new connection asks whether the gateway is there: the longest time until it answered.
        """
        loop = asyncio.get_running_loop()
        end, counts, failed, waits = loop.time() + seconds, [0, 0], list[str](), [0.0]
        messages = [{"role": "user", "content": "Is it on?"}]
        body = {"model": "model", "messages": messages, "max_tokens": max_tokens}

        async def repeat(ask: Callable[[], Awaitable[int]], pause: float = 0.0) -> None:
            while loop.time() < end:
                try:
                    tokens = await ask()
                    counts[0] += tokens > 0
                    counts[1] += tokens
                except (HearthError, OSError, ValueError, asyncio.IncompleteReadError) as error:
                    failed.append(f"{type(error).__name__}: {error}"[:200])
                await asyncio.sleep(pause)

        async def over_http() -> int:
            return int((await self._chat(token, body)).usage["completion_tokens"])

        async def look() -> int:
            began = loop.time()
            reader, writer = await asyncio.open_connection(HOST, PORT, ssl=self.tls)
            writer.write(request_bytes("GET", "/health"))
            await reader.readuntil(b"\r\n\r\n")
            waits.append(loop.time() - began)
            writer.close()
            return 0

        async with await self._library(token) as home:

            async def with_library() -> int:
                async with home.generate(messages=messages, max_tokens=max_tokens) as answer:
                    return sum([1 async for _ in answer])

            began = loop.time()
            await asyncio.gather(repeat(over_http), repeat(with_library), repeat(look, _LOOK_SECONDS))
        return {
            "seconds": loop.time() - began, "answers": counts[0], "tokens": counts[1], "failed": failed,
            "connect_seconds": max(waits),
        }  # fmt: skip

    async def _chat(self, token: str, body: dict[str, Any]) -> _Chat:
        """A chat over a connection of its own."""
        streams = await asyncio.open_connection(HOST, PORT, ssl=self.tls)
        with closing(streams[1]):
            return await _chat(streams, token, body)

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


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _chat(streams: _Streams, token: str, body: dict[str, Any]) -> _Chat:
    """Ask, and read to the end. Raises ValueError for an error."""
    loop = asyncio.get_running_loop()
    began, event_seconds, text_seconds, text = loop.time(), 0.0, 0.0, ""
    usage: dict[str, Any] = {}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async for data in _events(streams, request_bytes("POST", _PATH, token, streamed)):
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


async def _events(streams: _Streams, request: bytes) -> AsyncIterator[bytes]:
    """The data of server-sent events as they arrive; the connection stays open. Raises ValueError unless the status is 200."""
    reader, writer = streams
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise ValueError((head + await reader.read(4096)).decode(errors="replace"))
    while num := int(await reader.readline(), 16):
        piece = await reader.readexactly(num + len(b"\r\n"))
        for event in piece[:num].split(b"\n\n"):
            if event.startswith(_DATA):
                yield event.removeprefix(_DATA)
    await reader.readline()


async def _generated(home: AsyncHome, body: dict[str, Any]) -> tuple[float, str]:
    """The same chat with the client library: seconds until its first text, and all of it."""
    loop = asyncio.get_running_loop()
    began, first, text = loop.time(), 0.0, ""
    settings = {name: body[name] for name in ("messages", "max_tokens", "temperature", "seed") if name in body}
    async with home.generate(**settings, timeout_seconds=_ANSWER_SECONDS, takes_parts=True) as answer:
        async for token in answer:
            if token.text and not first:
                first = loop.time() - began
            text += token.text
    return first, text


if __name__ == "__main__":
    serve(sys.argv[1], HttpClients(Path(sys.argv[2]), sys.argv[3]))
