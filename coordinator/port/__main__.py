"""Entry point of the process of the client port, `python -m coordinator.port`: reads its `PortStart` from stdin and serves."""

from __future__ import annotations

import logging
import os
import signal
import sys

from hearth.platform.child_main import die_with_parent


def main() -> None:
    """Serve until the coordinator stops it or ends."""
    # A terminal or systemd signals all processes; the coordinator stops this process once the last requests are answered.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(os.getppid())
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    from coordinator.port.process import PortProcess, prefer_as_victim
    from coordinator.port.protocol import PortStart

    text = sys.stdin.buffer.read()
    if not text:
        return  # the coordinator has stopped meanwhile
    start = PortStart.decode(text)
    prefer_as_victim()
    process = PortProcess(start)
    process.run()
    process.close()


if __name__ == "__main__":
    main()
