"""Makes a device's workers malicious: with this folder on PYTHONPATH, they send damaged copies of what they send.

The file that $MALICIOUS_ORDER names is their order; it must be in the store, which a worker may read.
"""

import os
import sys

if any(argument.startswith("agent.worker") for argument in sys.orig_argv):
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from hearth.transport.base import PeerAddress
    from hearth.transport.sockets import SocketTransport
    from tools.bench.damaged_copies import DamagedCopies

    _order = Path(os.environ["MALICIOUS_ORDER"])
    # Opened before the worker is confined to reading.
    _report = os.open(_order.with_suffix(".report"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    _connect, _send = SocketTransport.connect, SocketTransport.send
    _copies: list[DamagedCopies] = []  # of the newest plan

    def _connect_twice(self: SocketTransport, peers: Sequence[PeerAddress]) -> None:
        _connect(self, peers)
        while _copies:
            _copies.pop().stop()
        _copies.append(DamagedCopies(_order, _report, self.rank, self._keypair, peers))

    def _send_seen(self: SocketTransport, target: int, frames: Sequence[Any], background: bool = False) -> None:
        _send(self, target, frames, background)
        if _copies:
            _copies[0].see(target, frames)

    SocketTransport.connect = _connect_twice  # type: ignore[method-assign]
    SocketTransport.send = _send_seen  # type: ignore[method-assign]
