"""Attacks on a home's sockets: `python -m tools.bench.fuzzer ipc://PATH KEY ADDRESS`, in the hub's namespace.

KEY is the home's key, from which the attacks take no more than their kind of attacker has.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from hearth.platform.curve import new_keypair, secure_client
from hearth.platform.security import (
    Access,
    HomeKey,
    admin_key,
    agent_access,
    coordinator_access,
    load_credential,
    parse_credential,
)
from hearth.wire.direct_socket import DirectSocket, direct_socket
from hearth.wire.messages import GetReadiness, decode, encode
from tools.bench.child import AsyncTarget, serve
from tools.bench.mutations import mutated
from tools.bench.results import REPOSITORY

_RECORDED = REPOSITORY / "tests" / "hearth" / "wire" / "golden_messages.json"  # one valid message of each type
_BATCH = 50  # frames after which other tasks run and the rate is checked
_NICENESS = 10  # an attacker is another machine: it must not take the processor from the home
_REPLY_SECONDS = 0.05  # for which a stranger waits before it knocks again
_RAW_WRITES = 20  # of one raw connection, at most
_RAW_FRAMES = 20  # of one write
_SOCKETS = 4  # connections with one key to one port: while one is being made again, others send
_UNREAD = 100  # answers that an attacker takes before it stops to read
_STUCK_SECONDS = 1.0  # without a message that could be sent, after which an attacker that does not read connects again
_SPIN_SECONDS = 0.001  # of processor time that are used in a row

_WITH_KEY = ("app", "app, answers unread", "app flood", "admin at agents")

Address = tuple[str, int]


class Counts:
    """What an attack did: frames that a socket took, answers received, connections that were refused or broken."""

    def __init__(self) -> None:
        self.frames = self.answers = self.errors = self.broken = 0
        self.cpu_seconds = 0.0  # of all threads of this process

    def as_json(self) -> dict[str, Any]:
        return vars(self)


class Fuzzer(AsyncTarget):
    """One attack at a time."""

    def __init__(self, key: Path, address: str) -> None:
        super().__init__()
        os.nice(_NICENESS)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        home = load_credential(key)
        assert isinstance(home, HomeKey)
        self._home = home
        self._valid = [bytes.fromhex(text) for text in json.loads(_RECORDED.read_text()).values()]
        self._context: zmq.Context[Any] = zmq.Context()

    async def attack(
        self,
        kind: str,
        targets: list[Address],
        seconds: float,
        rate: float,
        seed: int,
        app: str,
        many: int,
        cores: float,
    ) -> dict[str, Any]:
        """Attack for some seconds with at most `rate` frames a second (0: any). `targets`: hosts and ports.

        `app`: an app's key. `many`: idle connections per target. `cores`: processor cores that "processor only" uses. Returns
        the counts.
        """
        chance, counts = random.Random(seed), Counts()
        of_app = coordinator_access(parse_credential(app, "fuzzer"))
        attacks: dict[str, Callable[[Address, random.Random, _Pace, Counts], Awaitable[None]]] = {
            "raw": self._raw,
            "stranger": self._stranger,
            "app": partial(self._with_key, of_app),
            "app, answers unread": partial(self._with_key, of_app, reads=False),
            "app flood": partial(self._with_key, of_app, flood=True),
            "admin at agents": partial(self._with_key, agent_access(admin_key(self._home))),
            "idle connections": partial(self._hold, many),
        }
        began = time.process_time()
        if kind in attacks:
            senders = [target for target in targets for _ in range(_SOCKETS if kind in _WITH_KEY else 1)]
            pace = _Pace(rate / len(senders), seconds)
            await asyncio.gather(
                *(attacks[kind](target, random.Random(chance.random()), pace, counts) for target in senders)
            )
        elif cores:
            await _spin(cores, seconds)
        else:  # the attacker is another process
            await asyncio.sleep(seconds)
        counts.cpu_seconds = time.process_time() - began
        return counts.as_json()

    async def _raw(self, target: Address, chance: random.Random, pace: _Pace, counts: Counts) -> None:
        """Plain TCP: noise, and damaged greetings of ZeroMQ's protocol."""
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(54, b"\0")
        while pace.goes_on():
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(*target), 2.0)
            except (OSError, asyncio.TimeoutError):
                counts.broken += 1
                await asyncio.sleep(_REPLY_SECONDS)
                continue
            with suppress(OSError):
                for _ in range(chance.randrange(1, _RAW_WRITES)):
                    noise = [mutated(self._valid, chance) for _ in range(_RAW_FRAMES)]
                    writer.write(b"".join((greeting[: chance.randrange(len(greeting) + 1)], *noise)))
                    await writer.drain()
                    counts.frames += _RAW_FRAMES
                    await pace.step(_RAW_FRAMES)
            writer.transport.abort()

    async def _stranger(self, target: Address, chance: random.Random, pace: _Pace, counts: Counts) -> None:
        """ZeroMQ with a key that nobody admitted, or without any."""
        server = coordinator_access(self._home).server_public
        while pace.goes_on():
            access = Access(new_keypair(), server) if chance.random() < 0.8 else None
            socket = self._connected(access, target)
            for _ in range(10):
                with suppress(zmq.Again):
                    socket.send_frames(self._frames(chance))
                    counts.frames += 1
            await asyncio.sleep(_REPLY_SECONDS)
            socket.close(linger=0)
            await pace.step(10)

    async def _with_key(
        self,
        access: Access,
        target: Address,
        chance: random.Random,
        pace: _Pace,
        counts: Counts,
        *,
        reads: bool = True,
        flood: bool = False,
    ) -> None:
        """Damaged messages over an admitted connection; with `flood`, valid ones."""
        socket, readiness = self._connected(access, target, reads), encode(GetReadiness())
        taken_at = time.monotonic()
        while pace.goes_on():
            before = counts.frames
            for _ in range(_BATCH):
                frames = [counts.frames.to_bytes(8, "big"), readiness] if flood else self._frames(chance)
                try:
                    socket.send_frames(frames)
                except zmq.Again:  # the home does not read, or has closed the connection
                    counts.broken += 1
                    await asyncio.sleep(0.01)
                    break
                counts.frames += 1
                taken_at = time.monotonic()
            if reads:
                _read(socket, counts)
            elif time.monotonic() - taken_at > _STUCK_SECONDS:
                socket.close(linger=0)
                socket, taken_at = self._connected(access, target, reads), time.monotonic()
            await pace.step(max(counts.frames - before, 1))
        socket.close(linger=0)

    async def _hold(self, many: int, target: Address, chance: random.Random, pace: _Pace, counts: Counts) -> None:
        """Keep TCP connections open that say nothing; broken ones are renewed."""
        held: list[asyncio.Transport] = []
        while pace.goes_on():
            held = [transport for transport in held if not transport.is_closing()]
            while len(held) < many and pace.goes_on():
                try:
                    held.append(await asyncio.wait_for(_open_idle(target), 2.0))
                    counts.frames += 1
                except (OSError, asyncio.TimeoutError):
                    counts.broken += 1
                    await asyncio.sleep(_REPLY_SECONDS)
            await asyncio.sleep(_REPLY_SECONDS)
        for transport in held:
            transport.abort()

    def _connected(self, access: Access | None, target: Address, reads: bool = True) -> DirectSocket:
        socket = direct_socket(self._context, zmq.DEALER)
        socket.linger = 0
        if access is not None:
            secure_client(socket, access.own, access.server_public)
        if not reads:
            socket.rcvhwm = _UNREAD
            socket.setsockopt(zmq.HEARTBEAT_IVL, 0)  # with heartbeats, libzmq would end this process: see `harden`
        socket.connect(f"tcp://{target[0]}:{target[1]}")
        return socket

    def _frames(self, chance: random.Random) -> list[bytes]:
        """A request with a damaged message, often with payload, sometimes with a wrong envelope."""
        frames = [chance.randbytes(8), mutated(self._valid, chance)]
        frames += [chance.randbytes(chance.randrange(64)) for _ in range(chance.choice((0, 0, 1, 2, 5)))]
        if chance.random() < 0.05:
            frames[0] = chance.randbytes(chance.randrange(20))
        return frames if chance.random() < 0.98 else frames[:1]


class _Pace:
    """Bounds the rate and the duration of an attack, for each target."""

    def __init__(self, rate: float, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._rate, self._end = rate, self._loop.time() + seconds

    def goes_on(self) -> bool:
        return self._loop.time() < self._end

    async def step(self, num_frames: int) -> None:
        """Let other tasks run, for as long as so many frames may take."""
        await asyncio.sleep(num_frames / self._rate if self._rate else 0)


async def _open_idle(target: Address) -> asyncio.Transport:
    """A connection that says nothing, reads what comes, and is closed when the other end closes it."""
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, *target)
    return transport


def _read(socket: DirectSocket, counts: Counts) -> None:
    """Take the answers that have come."""
    while (frames := socket.receive_frames()) is not None:
        counts.answers += 1
        with suppress(Exception):
            counts.errors += type(decode(frames[1].buffer)).__name__ == "Failed"


async def _spin(cores: float, seconds: float) -> None:
    """Use so many processor cores, at most one, as an attack does, and attack nothing."""
    end, began, began_cpu = time.monotonic() + seconds, time.monotonic(), time.process_time()
    while (now := time.monotonic()) < end:
        if time.process_time() - began_cpu >= cores * (now - began):
            await asyncio.sleep(_SPIN_SECONDS)
            continue
        until = time.process_time() + _SPIN_SECONDS
        while time.process_time() < until:
            pass


if __name__ == "__main__":
    serve(sys.argv[1], Fuzzer(Path(sys.argv[2]), sys.argv[3]))
