"""The worker process, one per deployment: `python -m agent.worker.main SOCKET REQUEST`, or a fork of the fork server.

Two threads: the control thread exchanges messages with the daemon; the main thread loads, connects and computes. A deployment
may change its plan: the same process then loads its rank of the new plan, and keeps what both plans need. The worker ends when
the daemon ends.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

from agent.worker.runtime import LoadGivenUp, Runtime
from agent.worker.server import SendAnswer, WorkerServer, failed_message
from hearth.errors import StepFailed
from hearth.files import file_beside
from hearth.platform.child_main import die_with_parent
from hearth.platform.confine import COMPILED_KERNELS, confine
from hearth.platform.system_calls import refuse_system_calls
from hearth.wire import messages as wire

log = logging.getLogger("hearth.worker")

_OOM_SCORE_ADJUST = "500"  # so that the kernel kills the worker, not the daemon, when memory runs out

# From `Start` of another plan until the process gives up and ends, because a step does not: longer than the longest step
# without a tile to wait for, and short enough for a new process to begin within the coordinator's patience.
_END_SECONDS = 5.0
# The same from `Cancel` of a `Start` that is being loaded: an SD card reads a chunk in less. A session of onnxruntime may take
# longer; then a new process loads sooner.
_GIVE_UP_SECONDS = 2.0


def create_runtime(start: wire.Start, answer: SendAnswer, previous: Runtime | None) -> Runtime:
    """The runtime for the plan's kind of model. Imports only that kind's libraries.

    `previous` is that of the plan which this process ran before; the daemon keeps a process for one model.
    """
    if isinstance(start.load.parts, wire.SegmentParts):
        from agent.worker.graph.runtime import GraphRuntime

        assert previous is None or isinstance(previous, GraphRuntime)
        return GraphRuntime(start, answer, previous)
    from agent.worker.transformer.runtime import TransformerRuntime

    assert previous is None or isinstance(previous, TransformerRuntime)
    return TransformerRuntime(start, answer, previous)


class Worker:
    """The main loop of a worker: load, connect, run until the daemon sends the next plan."""

    def __init__(self, endpoint: str, listener: int = -1, daemon: int = 0) -> None:
        """`listener` is the descriptor of a socket that listens at `endpoint`; see `WorkerServer`."""
        self._server = WorkerServer(endpoint, self._receive, self._progress, listener, daemon)
        self._runtime: Runtime | None = None
        self._requests: queue.SimpleQueue[tuple[bytes, wire.Message]] = queue.SimpleQueue()
        self._ready = False  # requests go to the runtime, which runs
        self._ready_lock = threading.Lock()
        self._runs = False  # the runtime is connected, and the main thread is in `run` or about to call it
        self._has_ended = threading.Event()  # the runtime's `run` has returned
        self._loading: tuple[bytes, threading.Event] | None = None  # the id of a `Start`; whether its load has ended
        self._given_up: set[bytes] = set()  # ids of `Start`s that were cancelled

    def run(self) -> None:
        """Handle the daemon's requests until the process ends."""
        self._server.start()
        while True:
            request, message = self._requests.get()
            try:
                answer = self._prepare(request, message)
            except Exception as error:
                self._server.answer(request, failed_message(type(message).__name__, error))
                continue
            self._server.answer(request, answer)
            if self._runs and self._runtime is not None:
                self._runtime.run()
                self._runs = False
                self._has_ended.set()

    def _receive(self, request: bytes, message: wire.Message, payload: list[bytes]) -> None:
        """Take a request, in the control thread."""
        if isinstance(message, wire.Abort):
            if self._ready and self._runtime is not None:
                self._runtime.abort(message.step, message.reason)
            self._server.answer(request, wire.Done())
            return
        with self._ready_lock:
            if self._ready and isinstance(message, wire.Start):
                self._end_plan()
            if not self._ready:
                if isinstance(message, wire.Cancel):
                    self._give_up(request)
                else:
                    self._requests.put((request, message))
                return
        assert self._runtime is not None
        self._runtime.handle(request, message, payload)

    def _progress(self) -> wire.WorkerProgress:
        """What the main thread computes, and what was sent; called in the control thread."""
        if not self._ready or self._runtime is None:
            return wire.WorkerProgress()
        return self._runtime.progress().model_copy(update={"sent_bytes": self._runtime.sent_bytes})

    def _end_plan(self) -> None:
        """End the running plan, so that the main thread loads the next one. If it does not, the process ends."""
        assert self._runtime is not None
        self._ready = False
        self._has_ended.clear()
        self._runtime.end()
        threading.Thread(target=self._end_if_stuck, name="end", daemon=True).start()

    def _end_if_stuck(self) -> None:
        if not self._has_ended.wait(_END_SECONDS):
            log.error("a step did not end within %g s of the plan's end; this process ends instead", _END_SECONDS)
            os._exit(1)

    def _give_up(self, start: bytes) -> None:
        """End the load of this `Start`. If it does not end, the process does."""
        self._given_up.add(start)
        if (loading := self._loading) is not None and loading[0] == start:
            threading.Thread(target=self._end_if_loading, args=loading[1:], name="end", daemon=True).start()

    def _end_if_loading(self, has_ended: threading.Event) -> None:
        if not has_ended.wait(_GIVE_UP_SECONDS):
            log.warning("a load did not end within %g s of being given up; this process ends instead", _GIVE_UP_SECONDS)
            os._exit(1)

    def _load(self, request: bytes, message: wire.Start) -> wire.Message:
        previous, self._runtime = self._runtime, None
        runtime = create_runtime(message, self._server.answer, previous)
        has_ended = threading.Event()
        self._loading = request, has_ended
        try:
            bound = runtime.load(lambda: request in self._given_up)
        except LoadGivenUp:
            self._runtime = runtime  # the next one takes over what it has
            raise StepFailed(device="this device", reason="its plan has been replaced") from None
        finally:
            self._loading = None
            has_ended.set()
        self._runtime = runtime
        return bound

    def _prepare(self, request: bytes, message: wire.Message) -> wire.Message:
        """Load a plan, or connect to its peers."""
        if isinstance(message, wire.Start):
            return self._load(request, message)
        if not isinstance(message, wire.ConnectPeers) or self._runtime is None:
            raise _not_ready(message)
        self._runtime.connect(message)
        with self._ready_lock:  # from here on, requests go to the runtime
            waiting = [self._requests.get() for _ in range(self._requests.qsize())]
            self._ready = self._runs = not any(isinstance(other, wire.Start) for _, other in waiting)
            for early, other in waiting:
                if isinstance(other, wire.Start):
                    self._requests.put((early, other))
                else:
                    self._server.answer(early, failed_message(type(other).__name__, _not_ready(other)))
        return wire.Done()


def _not_ready(message: wire.Message) -> StepFailed:
    return StepFailed(device="this device", reason=f"it is not ready for {type(message).__name__}")


def set_up_process(request: wire.ForkWorker) -> int:
    """Set up a worker's process: ignore Ctrl-C, raise the OOM score, configure logging, open its socket, and confine it.

    Returns the descriptor of the socket, which listens at the request's endpoint.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon stops its workers itself
    faulthandler.register(signal.SIGUSR1)  # the daemon asks where the threads of a process are that hangs
    logging.basicConfig(level=request.log_level, format="%(name)s %(levelname)s %(message)s")
    try:
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJUST)
    except OSError as error:
        log.info("oom_score_adj was not raised: %s", error)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(request.endpoint.removeprefix("ipc://"))
    listener.listen()
    tempfile.tempdir = request.scratch
    scratch = Path(request.scratch)
    writable = (scratch, file_beside(scratch), COMPILED_KERNELS)
    confine([Path(request.store)], writable, bind_ports=[request.bind_ports], connect_ports=request.connect_ports)
    refuse_system_calls(unix_sockets=request.compute_device == "cuda")  # whose drivers may use some
    return listener.detach()


if __name__ == "__main__":
    die_with_parent(daemon := os.getppid())
    request = wire.ForkWorker.model_validate_json(sys.argv[2])
    Worker(request.endpoint, set_up_process(request), daemon).run()
