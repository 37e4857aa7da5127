"""The thread of a malicious worker: damaged copies at a bounded rate, over connections of their own."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("psutil")

from support.waiting import wait_for

from hearth.platform.curve import new_keypair
from hearth.transport.sockets import SocketTransport
from tools.bench.damaged_copies import DamagedCopies, Order

TRUE = [b"header of a tile", bytes(50_000)]


class Peer(NamedTuple):
    rank: int
    port: int
    public_key: str
    host: str = "127.0.0.1"
    bytes_per_second: float = 1e9


class Pair:
    """Two connected workers, of which the first is malicious."""

    def __init__(self, folder: Path, encrypted: bool) -> None:
        keys = [new_keypair() if encrypted else None for _ in range(2)]
        self.good: SocketTransport
        self.bad, self.good = (SocketTransport(rank, 2, "127.0.0.1", (0, 0), keys[rank]) for rank in range(2))
        bad, good = (Peer(each.rank, each.port, each.public_key) for each in (self.bad, self.good))
        self.bad.connect([good])
        self.good.connect([bad])
        self.order, self.reports = folder / "malicious", folder / "reports"
        self.report = os.open(self.reports, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.copies = DamagedCopies(self.order, self.report, 0, keys[0], [good])

    def begin(self, order: Order) -> None:
        part = self.order.with_suffix(".part")
        part.write_text(json.dumps(order._asdict()))
        part.replace(self.order)
        wait_for("a report", lambda: self.reports.read_text())

    def done(self, name: str) -> float:
        return sum(json.loads(line)[name] for line in self.reports.read_text().splitlines())

    def close(self) -> None:
        self.copies.stop()
        self.copies._thread.join(10)
        os.close(self.report)
        for each in (self.bad, self.good):
            each.close()
            each.release()


@pytest.fixture(params=[True, False], ids=["encrypted", "unencrypted"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        made = Pair(Path(folder), request.param)
        stack.callback(made.close)
        yield made


def received(pair: Pair, seconds: float) -> list[list[bytes]]:
    found: list[list[bytes]] = []
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if (message := pair.good.receive(left)) is not None:
            found.append([bytes(frame) for frame in message.frames])
    return found


def test_copies_are_damaged_and_follow_the_order(pair: Pair) -> None:
    pair.begin(Order(rate=500))
    pair.copies.see(1, TRUE)
    pair.bad.send(1, TRUE)
    messages = received(pair, 1.0)
    assert messages.count(TRUE) == 1
    damaged = [message for message in messages if message != TRUE]
    assert 50 < len(damaged) < 700
    assert {len(message) for message in damaged} >= {1, 2, 3}
    assert sum(len(message) > 1 and len(message[1]) > 40_000 for message in damaged) < len(damaged) / 4
    pair.order.unlink()
    wait_for("the report of all copies", lambda: pair.done("frames") >= len(damaged))
    assert pair.done("cpu_seconds") > 0
    received(pair, 0.3)
    assert received(pair, 0.2) == []


@pytest.mark.parametrize("pair", [True], indirect=True)
def test_control_uses_the_processor_and_sends_nothing(pair: Pair) -> None:
    began = time.monotonic()
    pair.begin(Order(cores=0.2))
    pair.copies.see(1, TRUE)
    assert received(pair, 1.0) == []
    pair.order.unlink()
    wait_for("the processor time", lambda: pair.done("cpu_seconds") > 0.05)
    assert pair.done("frames") == 0
    assert pair.done("cpu_seconds") < 0.2 * (time.monotonic() - began) + 0.1


def test_nothing_is_sent_without_an_order(pair: Pair) -> None:
    pair.copies.see(1, TRUE)
    assert received(pair, 0.2) == []
    assert not pair.reports.read_text()
