"""Deadlines and limits of the gateway's connections, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from datetime import datetime, timezone
from pathlib import Path
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


# ---- how many there may be --------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS_OF_ADDRESS", 8)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 12)
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.0)


def opened(port: int, count: int, address: str = "127.0.0.1") -> list[socket.socket]:
    """Connections from an address of the loopback network."""
    return [socket.create_connection(("127.0.0.1", port), LIMIT_SECONDS, (address, 0)) for _ in range(count)]


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def until_closed(held: list[socket.socket], closed: list[socket.socket]) -> None:
    """Wait until just these connections of those held are closed."""
    await until("the end of connections", lambda: [each for each in held if is_closed(each)] == closed, LIMIT_SECONDS)


@pytest.mark.usefixtures("few")
async def test_oldest_connection_without_a_request_makes_room() -> None:
    async with served(app) as port:
        of_one = opened(port, 20, "127.0.0.2")
        await until_closed(of_one, of_one[:12])
        others = [each for number in range(3, 9) for each in opened(port, 1, f"127.0.0.{number}")]
        await until_closed(of_one, of_one[:14])
        assert b"200 OK" in await received(port, REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        for each in (*of_one, *others):
            each.close()


@pytest.mark.usefixtures("few")
async def test_connection_has_a_second_for_its_request_before_another_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 3600.0)
    async with served(app) as port:
        of_one = opened(port, 20, "127.0.0.2")
        await until_closed(of_one, of_one[8:])
        assert b"200 OK" in await received(port, REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        for each in of_one:
            each.close()


@pytest.mark.usefixtures("few")
async def test_connection_that_is_being_answered_is_kept() -> None:
    GONE.clear()
    async with served(app) as port:
        busy = opened(port, 8)
        for each in busy:
            each.sendall(REQUEST.replace(b"/ ", b"/endless ", 1))
            await asyncio.to_thread(each.recv, 1)
        (late,) = opened(port, 1)
        await until_closed([late], [late])
        assert GONE == []
        for each in (*busy, late):
            each.close()


@pytest.mark.usefixtures("few")
async def test_tls_handshakes_count_and_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificates = pytest.importorskip("coordinator.http.certificates")
    made = certificates.own_certificate(tmp_path, ("127.0.0.1",), datetime.now(timezone.utc))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.chain)
    async with served(app, context) as port:
        silent = opened(port, 10)
        await until_closed(silent, silent[:2])
        trusting = ssl.create_default_context(cafile=str(made.authority))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.write(REQUEST)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\nok"), LIMIT_SECONDS)).startswith(b"HTTP/1.1 200")
        writer.close()
        for each in silent:
            each.close()
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.2)
    async with served(app, context) as port:
        silent = opened(port, 2)
        await until_closed(silent, silent)
