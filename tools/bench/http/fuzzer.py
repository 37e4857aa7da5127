"""Generated requests, idle connections and slow readers: `python -m tools.bench.http.fuzzer ipc://PATH`, on the hub."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

from tools.bench.child import AsyncTarget, serve
from tools.bench.http.home import HOST, PORT
from tools.bench.http.requests import Requests, Sent, fault_of
from tools.bench.http.wire import answers_in, request_bytes

_NICENESS = 10  # an attacker is another machine: it must not take the processor from the home
_ANSWER_SECONDS = 60.0  # for a request that has to be answered
_SILENCE_SECONDS = 0.5  # after which a request that is broken may stay without an answer
_MOST_FAULTS = 20  # that are told
_SLOW_SECONDS = 0.2  # between two bytes that a slow reader takes
_SLOW_BUFFER_BYTES = 4096  # of its socket


class HttpFuzzer(AsyncTarget):
    """One attacker with many connections."""

    def __init__(self) -> None:
        super().__init__()
        os.nice(_NICENESS)
        self._held: list[asyncio.Task[None]] = []

    async def attack(
        self, model: str, token: str, strangers: list[str], seed: int, count: int, connections: int
    ) -> dict[str, Any]:
        """Send `count` requests over new connections, some at once. Returns numbers by kind and status, and the faults."""
        chance = random.Random(seed)
        found = Found()
        left = iter(range(count))

        async def send_some() -> None:
            requests = Requests(model, token, strangers, random.Random(chance.random()))
            for _ in left:
                sent = requests.next()
                found.note(sent, await exchange(HOST, PORT, sent), token)

        await asyncio.gather(*(send_some() for _ in range(connections)))
        return found.as_json()

    async def hold(self, token: str, model: str, idle: int, slow: int) -> None:
        """Keep connections that say nothing, and clients that hardly read their answers, until this process ends."""
        body = {"model": model, "messages": [{"role": "user", "content": "Light?"}], "n": 4, "stream": True}
        data = request_bytes("POST", "/v1/chat/completions", token, body)
        self._held = [
            *(asyncio.create_task(self._idle()) for _ in range(idle)),
            *(asyncio.create_task(self._read_slowly(data)) for _ in range(slow)),
        ]

    async def _idle(self) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(HOST, PORT)
                try:
                    await reader.read(1)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(_SLOW_SECONDS)

    async def _read_slowly(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with socket.socket() as plain, suppress(OSError):
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)
                plain.setblocking(False)
                await loop.sock_connect(plain, (HOST, PORT))
                await loop.sock_sendall(plain, data)
                while await loop.sock_recv(plain, 1):
                    await asyncio.sleep(_SLOW_SECONDS)
            await asyncio.sleep(_SLOW_SECONDS)


class Found:
    """Counts of an attack."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []
        self.num_faults = 0

    def note(self, sent: Sent, received: bytes, token: str) -> None:
        """Count one request and the answers to it."""
        self.kinds[sent.kind] += 1
        self.statuses.update(answer.status for answer in answers_in(received)[:1] or ())
        if fault := fault_of(sent, received, token):
            self.num_faults += 1
            if len(self.faults) < _MOST_FAULTS:
                self.faults.append(f"{fault}: {sent.kind}: {sent.data[:400]!r} -> {received[:300]!r}")

    def as_json(self) -> dict[str, Any]:
        return {
            "kinds": self.kinds, "statuses": {str(status): num for status, num in self.statuses.items()},
            "faults": self.faults, "num_faults": self.num_faults,
        }  # fmt: skip


async def exchange(host: str, port: int, sent: Sent) -> bytes:
    """Send a request over a new connection, and receive until it is closed, or silent after a broken request."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return b""
    received = b""
    try:
        writer.write(sent.data)
        while True:
            piece = await asyncio.wait_for(reader.read(1 << 16), _ANSWER_SECONDS if sent.whole else _SILENCE_SECONDS)
            if not piece:
                return received
            received += piece
    except (OSError, asyncio.TimeoutError):
        return received
    finally:
        writer.transport.abort()


if __name__ == "__main__":
    serve(sys.argv[1], HttpFuzzer())
