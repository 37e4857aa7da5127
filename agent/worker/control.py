"""What every worker process has in common: the control thread that speaks with the daemon, and its manners as a child.

A worker is started with the address of a private ipc socket, and the level of what it logs. Its control thread takes
requests off that socket into a queue for the main thread and hands answers back. When the daemon goes away, so does the
worker.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from hearth.wire.messages import Message, decode, encode

log = logging.getLogger("hearth.worker")

_OOM_SCORE_ADJUST = "500"  # when memory runs out the kernel takes the worker, never the daemon
_PR_SET_PDEATHSIG = 1


class Control:
    """The control thread: requests from the daemon into a queue, answers from any thread back to the daemon."""

    def __init__(self, address: str) -> None:
        self.requests: queue.SimpleQueue[tuple[bytes, Message, list[bytes]]] = queue.SimpleQueue()
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._answers = self._context.socket(zmq.PAIR)
        self._answers.sndhwm = 0  # an answer from the control thread itself must not wait for it
        self._answers.bind("inproc://answers")
        self._answering = threading.Lock()
        self._address = address
        threading.Thread(target=self._loop, name="control", daemon=True).start()

    def urgent(self, request_id: bytes, message: Message, payload: list[bytes]) -> bool:
        """Deal with a message in the control thread, while the main thread computes; whether that was done."""
        return False

    def answer(self, request_id: bytes, message: Message, payload: Sequence[Any]) -> None:
        with self._answering:
            self._answers.send_multipart([request_id, encode(message), *payload])

    def _loop(self) -> None:
        daemon = self._context.socket(zmq.PAIR)
        daemon.connect(self._address)
        answers = self._context.socket(zmq.PAIR)
        answers.rcvhwm = 0
        answers.connect("inproc://answers")
        poller = zmq.Poller()
        poller.register(daemon, zmq.POLLIN)
        poller.register(answers, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if answers in ready:
                daemon.send_multipart(answers.recv_multipart())
            if daemon in ready:
                request_id, body, *payload = daemon.recv_multipart()
                message = decode(body)
                if not self.urgent(request_id, message, payload):
                    self.requests.put((request_id, message, payload))


def become_a_worker() -> None:
    """Die with the daemon, before it when memory runs out, and not by Ctrl-C, which goes to the daemon; log plainly."""
    _die_with_the_daemon()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon ends us in order
    level = sys.argv[2] if len(sys.argv) > 2 else "INFO"  # the daemon's
    logging.basicConfig(level=level, format="%(name)s %(levelname)s %(message)s")
    try:
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJUST)
    except OSError as error:
        log.info("oom_score_adj was not raised: %s", error)


def _die_with_the_daemon() -> None:
    """Linux sends SIGKILL when the parent dies; if it died before we asked, leave at once."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
