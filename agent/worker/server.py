"""The worker's end of its private socket to the daemon: the protocol of `hearth.wire.rpc`, without an event loop."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from hearth.errors import HearthError, InternalError, StepFailed
from hearth.protocol import WORKER_STEP_SIGN_SECONDS
from hearth.wire.messages import Cancel, Failed, Message, ReportProgress, WorkerProgress, decode, encode

log = logging.getLogger("hearth.worker")

Handler = Callable[[bytes, Message, list[bytes]], None]
Progress = Callable[[], WorkerProgress]
SendAnswer = Callable[[bytes, Message, Sequence[Any]], None]


class WorkerServer:
    """Receives the daemon's requests and sends answers. The socket is a DEALER, since the daemon is the only client.

    The control thread calls `handler(request, message, payload)`, which must return at once; any thread may call `answer`
    later. An error that the handler raises is sent as the answer. `request` is the request's id; for a `Cancel`, it is the id
    of the request to cancel.

    From `ReportProgress` on, the control thread calls `progress` and sends the result, again and again: as long as it runs, the
    daemon knows that the process lives.
    """

    def __init__(
        self, endpoint: str, handler: Handler, progress: Progress, listener: int = -1, daemon: int = 0
    ) -> None:
        """`listener` is the descriptor of a socket that listens at `endpoint` (-1: there is none yet).

        Only the process `daemon` may connect then.
        """
        self._endpoint, self._listener, self._daemon = endpoint, listener, daemon
        self._handler = handler
        self._progress = progress
        self._report: tuple[bytes, float] | None = None  # id and interval of the daemon's `ReportProgress`
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._answers = self._context.socket(zmq.PAIR)
        self._answers.sndhwm = 0  # unlimited: the control thread also answers, and must not wait for itself
        self._answers.bind("inproc://answers")
        self._answer_lock = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._loop, name="control", daemon=True).start()

    def answer(self, request: bytes, message: Message, payload: Sequence[Any] = ()) -> None:
        """Send an answer. Thread-safe. A stream is several answers to one request."""
        with self._answer_lock:
            self._answers.send_multipart([request, encode(message), *payload])

    def _loop(self) -> None:
        daemon = self._context.socket(zmq.DEALER)
        daemon.sndhwm = 0
        if self._listener >= 0:
            daemon.setsockopt(zmq.USE_FD, self._listener)
            daemon.setsockopt(zmq.IPC_FILTER_PID, self._daemon)  # no other worker
        daemon.bind(self._endpoint)
        answers = self._context.socket(zmq.PAIR)
        answers.rcvhwm = 0
        answers.connect("inproc://answers")
        poller = zmq.Poller()
        poller.register(daemon, zmq.POLLIN)
        poller.register(answers, zmq.POLLIN)
        next_report = 0.0
        while True:
            ready = dict(poller.poll(self._milliseconds_until(next_report)))
            if self._report is not None and (now := time.monotonic()) >= next_report:
                request, interval = self._report
                progress = self._progress()
                daemon.send_multipart([request, encode(progress)])
                next_report = now + (interval if progress.step is None else min(interval, WORKER_STEP_SIGN_SECONDS))
            if answers in ready:
                daemon.send_multipart(answers.recv_multipart())
            if daemon in ready:
                request, body, *payload = daemon.recv_multipart()
                self._dispatch(request, body, payload)

    def _milliseconds_until(self, next_report: float) -> int | None:
        """How long to wait for a message; None: without limit, because no reports were asked for."""
        return None if self._report is None else math.ceil(max(next_report - time.monotonic(), 0.0) * 1000)

    def _dispatch(self, request: bytes, body: bytes, payload: list[bytes]) -> None:
        name = "a message"
        try:
            message = decode(body)
            name = type(message).__name__
            if isinstance(message, ReportProgress):
                self._report = (request, message.interval_seconds)
                return
            self._handler(message.request if isinstance(message, Cancel) else request, message, payload)
        except Exception as error:
            self.answer(request, failed_message(name, error))


def failed_message(name: str, error: Exception) -> Failed:
    """The answer to a request that raised `error`. `name` is the request's type, for the log."""
    if isinstance(error, HearthError):
        return Failed.of(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter: torch, on a GPU
        return Failed.of(StepFailed(device="this device", reason=f"out of memory: {error}"))
    log.error("%s failed", name, exc_info=error)
    return Failed.of(InternalError(where="the worker", reason=f"{type(error).__name__}: {error}"))
