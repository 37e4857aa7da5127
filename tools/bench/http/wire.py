"""The least of HTTP that a client of the gateway needs, so that its own work is not measured as the gateway's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

_DATA = b"data: "


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


class Answer(NamedTuple):
    """One whole answer."""

    status: int
    body: bytes


def answers_in(received: bytes) -> list[Answer]:
    """The answers in what a connection has received; an unfinished one at the end is left out."""
    found = []
    while (answer := _first_answer(received)) is not None:
        found.append(answer[0])
        received = answer[1]
    return found


def _first_answer(received: bytes) -> tuple[Answer, bytes] | None:
    head, separator, rest = received.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    if not separator or not first.startswith(b"HTTP/1.1 "):
        return None
    status = int(first[9:12])
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if status < 200:
        return _first_answer(rest)
    if fields.get(b"transfer-encoding") == b"chunked":
        body = b""
        while True:
            size, separator, rest = rest.partition(b"\r\n")
            num = int(size, 16) if separator else 0
            if not separator or len(rest) < num + 2:
                return None
            body, rest = body + rest[:num], rest[num + 2 :]
            if not num:
                return Answer(status, body), rest
    length = int(fields.get(b"content-length", len(rest)))  # without a length, all until the end
    return (Answer(status, rest[:length]), rest[length:]) if len(rest) >= length else None


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
