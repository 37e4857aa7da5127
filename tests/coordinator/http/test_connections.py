"""Deadlines of the gateway's connections, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from support.waiting import until

pytest.importorskip("uvicorn")

from support.http_servers import served

from coordinator.http import server

LIMIT_SECONDS = 30.0  # that only failures reach
GONE: list[str] = []  # how endless answers ended
REQUEST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers "ok" once the body is there; at /endless, until the client is gone."""
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.disconnect":
        return
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")] * (scope["path"] == "/")}
    )
    if scope["path"] == "/endless":
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        GONE.append(gone.result()["type"])
        return
    await send({"type": "http.response.body", "body": b"ok"})


async def received(port: int, *pieces: bytes) -> bytes:
    """What a connection receives until it is closed by the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), LIMIT_SECONDS)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("pieces", "num_answers"),
    [((), 0), ((b"POST / HT",), 0), ((REQUEST[:-2],), 0), ((REQUEST, REQUEST[:30]), 1), ((REQUEST, REQUEST[:-1]), 1)],
)
async def test_request_that_does_not_arrive_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...], num_answers: int
) -> None:
    monkeypatch.setattr(server, "ARRIVAL_SECONDS", 0.2)

    async with served(app) as port:
        assert (await received(port, *pieces)).count(b"200 OK") == num_answers


async def test_slow_but_whole_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ARRIVAL_SECONDS", LIMIT_SECONDS)

    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            for byte in REQUEST:
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_answer_that_nobody_reads_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UNREAD_SECONDS", 0.2)
    GONE.clear()

    async with served(app) as port:
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(REQUEST.replace(b"/ ", b"/endless ", 1))
            await until("the end of the answer", lambda: GONE, LIMIT_SECONDS)
    assert GONE == ["http.disconnect"]
