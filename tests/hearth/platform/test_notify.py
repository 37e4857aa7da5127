"""sd_notify."""

from __future__ import annotations

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
