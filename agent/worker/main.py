"""The worker process: `python -m agent.worker.main SOCKET LOG_LEVEL STORE`, started by the daemon, one per deployment.

Two threads: the control thread exchanges messages with the daemon; the main thread loads, connects and computes. The worker
ends when the daemon ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agent.worker import sandbox
from agent.worker.runtime import Runtime, create_runtime
from agent.worker.server import WorkerServer, failed_message
from hearth.errors import StepFailed
from hearth.wire.messages import Abort, ConnectPeers, Done, Message, Start, WorkerProgress

log = logging.getLogger("hearth.worker")

_OOM_SCORE_ADJUST = "500"  # so that the kernel kills the worker, not the daemon, when memory runs out
_PR_SET_PDEATHSIG = 1  # prctl option, from <linux/prctl.h>

_M = TypeVar("_M", bound=Message)


class Worker:
    """The main loop of a worker: load, connect, run. The first two wait for a request of the daemon."""

    def __init__(self, endpoint: str) -> None:
        self._server = WorkerServer(endpoint, self._receive, self._progress)
        self._runtime: Runtime | None = None
        self._requests: queue.SimpleQueue[tuple[bytes, Message]] = queue.SimpleQueue()
        self._ready = False
        self._ready_lock = threading.Lock()

    def run(self) -> None:
        """Handle the daemon's requests until the process ends."""
        self._server.start()
        self._serve_until(Start, self._load)
        assert self._runtime is not None
        self._serve_until(ConnectPeers, self._connect)
        try:
            self._runtime.run()
        finally:
            self._runtime.close()

    def _receive(self, request: bytes, message: Message, payload: list[bytes]) -> None:
        """Take a request, in the control thread."""
        if isinstance(message, Abort):
            if self._ready and self._runtime is not None:
                self._runtime.abort(message.step, message.reason)
            self._server.answer(request, Done())
            return
        with self._ready_lock:
            if not self._ready:
                self._requests.put((request, message))
                return
        assert self._runtime is not None
        self._runtime.handle(request, message, payload)

    def _progress(self) -> WorkerProgress:
        """What the main thread computes; called in the control thread."""
        return self._runtime.progress() if self._ready and self._runtime is not None else WorkerProgress()

    def _serve_until(self, expected: type[_M], action: Callable[[_M], Message]) -> None:
        """Answer requests until one of the expected type has succeeded."""
        while True:
            request, message = self._requests.get()
            try:
                answer = action(_checked(message, expected))
            except Exception as error:
                self._server.answer(request, failed_message(type(message).__name__, error))
            else:
                self._server.answer(request, answer)
                return

    def _load(self, start: Start) -> Message:
        self._runtime = create_runtime(start, self._server.answer)
        return self._runtime.load()

    def _connect(self, request: ConnectPeers) -> Message:
        assert self._runtime is not None
        self._runtime.connect(request)
        with self._ready_lock:  # from here on, requests go to the runtime
            self._ready = True
            while not self._requests.empty():
                early, message = self._requests.get()
                self._server.answer(early, failed_message(type(message).__name__, _not_ready(message)))
        return Done()


def _checked(message: Message, expected: type[_M]) -> _M:
    if not isinstance(message, expected):
        raise _not_ready(message)
    return message


def _not_ready(message: Message) -> StepFailed:
    return StepFailed(device="this device", reason=f"it is not ready for {type(message).__name__}")


def _set_up_process(endpoint: str, log_level: str, store: str) -> None:
    """Set up the process: end with the daemon, ignore Ctrl-C, raise the OOM score, configure logging, confine its files."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon stops its workers itself
    logging.basicConfig(level=log_level, format="%(name)s %(levelname)s %(message)s")
    try:
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJUST)
    except OSError as error:
        log.info("oom_score_adj was not raised: %s", error)
    folder = Path(endpoint.removeprefix("ipc://")).parent
    tempfile.tempdir = str(folder)
    compiled_kernels = Path.home() / ".nv"  # of CUDA
    sandbox.confine(readable=(), writable=(Path(store), folder, compiled_kernels))


def _die_with_parent() -> None:
    """Have Linux send SIGKILL when the parent dies. If it has died already, exit at once."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    _set_up_process(*sys.argv[1:])
    Worker(sys.argv[1]).run()
