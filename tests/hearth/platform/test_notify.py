"""sd_notify."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from hearth.platform.notify import Notifier


def test_ready_is_sent_to_the_systemd_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"})
        notifier.send("READY=1", "STATUS=fine")
        assert listener.recv(100) == b"READY=1\nSTATUS=fine"
        assert notifier.watchdog_seconds == 3.0
    Notifier({}).send("READY=1")


def test_watchdog_is_not_fed_while_a_part_hangs(tmp_path: Path) -> None:
    works = [True, True, False, False]

    async def notify(notifier: Notifier) -> None:
        task = asyncio.create_task(notifier.keep_alive(lambda: "fine", {"the port": lambda: works.pop()}))
        while works:
            await asyncio.sleep(0.01)
        task.cancel()

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        asyncio.run(notify(Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "60000"})))
        received = [listener.recv(100) for _ in range(4)]
    assert received == [b"STATUS=fine", b"STATUS=fine", b"WATCHDOG=1\nSTATUS=fine", b"WATCHDOG=1\nSTATUS=fine"]
