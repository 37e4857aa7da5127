"""Makes a device's workers malicious: with this folder on PYTHONPATH, they send damaged copies of all that they send.

Only while the file exists that $MALICIOUS_FLAG names. It must be in the store, which a worker may read.
"""

import os
import random
import sys

_COPIES = 20  # of each message

if any(argument.startswith("agent.worker") for argument in sys.orig_argv):
    from collections.abc import Sequence
    from typing import Any

    from hearth.transport.sockets import SocketTransport
    from tools.bench.mutations import with_changed_bytes

    _flag = os.environ.get("MALICIOUS_FLAG", "")
    _send = SocketTransport.send
    _chance = random.Random(1)

    def _send_damaged(self: SocketTransport, target: int, frames: Sequence[Any], background: bool = False) -> None:
        for _ in range(_COPIES if os.path.exists(_flag) else 0):
            damaged = [with_changed_bytes(bytes(frame), _chance) for frame in frames]
            _send(self, target, damaged[: _chance.randrange(1, len(damaged) + 1)] + damaged[: _chance.randrange(2)])
        _send(self, target, frames, background)

    SocketTransport.send = _send_damaged  # type: ignore[method-assign]
