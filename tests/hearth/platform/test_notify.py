"""sd_notify."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import until

from hearth.platform.notify import Notifier


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket of systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        yield listener


def test_ready_is_sent_to_the_systemd_socket(listener: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": "3000000"})
    notifier.send("READY=1", "STATUS=fine")
    assert listener.recv(100) == b"READY=1\nSTATUS=fine"
    assert notifier.watchdog_seconds == 3.0
    Notifier({}).send("READY=1")


async def test_watchdog_is_not_fed_while_a_part_hangs(listener: socket.socket) -> None:
    works = [True, True, False, False]
    notifier = Notifier({"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": "60000"})
    task = asyncio.create_task(notifier.keep_alive(lambda: "fine", {"the port": lambda: works.pop()}))
    await until("all looks at the part", lambda: not works)
    task.cancel()
    received = [listener.recv(100) for _ in range(4)]
    assert received == [b"STATUS=fine", b"STATUS=fine", b"WATCHDOG=1\nSTATUS=fine", b"WATCHDOG=1\nSTATUS=fine"]
