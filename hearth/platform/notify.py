"""Notifications to systemd (sd_notify): readiness, status line, watchdog. Does nothing without systemd."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

_STATUS_CHARACTERS = 200  # length at which the status line is cut, so that `systemctl status` stays readable


class Notifier:
    """Sends notifications. `environ` is the process environment, in which systemd sets its socket and watchdog interval."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_seconds = int(environ.get("WATCHDOG_USEC", "0")) / 1e6  # 0: no watchdog

    def send(self, *assignments: str) -> None:
        """Send lines such as `READY=1`, `STATUS=...`, `WATCHDOG=1`, `STOPPING=1`."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto("\n".join(assignments).encode(), address)

    async def keep_alive(self, status: Callable[[], str], proofs: Mapping[str, Callable[[], bool]]) -> None:
        """Send watchdog and status notifications until cancelled: three per watchdog interval, or one every 10 s.

        `proofs` names the parts that must work. Each function says whether its part has worked since its last call; while one
        has not, no watchdog notification is sent, and systemd restarts the process when the interval ends.
        """
        while self._address:
            hung = [part for part, has_worked in proofs.items() if not has_worked()]
            if hung:
                log.error("%s has not worked since the last watchdog notification", ", ".join(hung))
            self.send(*([] if hung else ["WATCHDOG=1"]), f"STATUS={status()}"[:_STATUS_CHARACTERS])
            await asyncio.sleep(self.watchdog_seconds / 3 or 10.0)
        await asyncio.Event().wait()  # there is no systemd to notify
