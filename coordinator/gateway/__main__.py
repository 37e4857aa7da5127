"""Entry point of the gateway process, `python -m coordinator.gateway`: reads its `GatewayStart` from stdin and serves."""

from __future__ import annotations

import logging
import os
import signal
import sys

from hearth.platform.parent_death import die_with_parent


def main() -> None:
    """Run the gateway until the coordinator stops it or ends."""
    # A terminal or systemd signals all processes; the coordinator stops its gateway once the last requests are answered.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(os.getppid())
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    from coordinator.gateway.link import GatewayStart
    from coordinator.gateway.process import Gateway, prefer_as_victim

    text = sys.stdin.buffer.read()
    if not text:
        return  # the coordinator has stopped meanwhile
    start = GatewayStart.decode(text)
    prefer_as_victim()
    gateway = Gateway(start)
    gateway.run()
    gateway.close()


if __name__ == "__main__":
    main()
