"""A process that has imported the worker's libraries and forks a worker on request.

`python -m agent.worker.fork_server FD LEVEL LIBRARY`.

Importing torch takes seconds, on a Raspberry Pi about 20, and onnxruntime 0.6 s on a PC; a fork takes milliseconds and shares
the libraries' memory. FD is a socket to the daemon (SOCK_SEQPACKET, one message each), LIBRARY is torch or onnxruntime. The
fork server sends `Done` once it can fork. It has no threads that a worker needs, no ZeroMQ context and no CUDA context, because
none of these survives a fork. The daemon adopts the workers, which outlive the fork server; all end with the daemon.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import cast

from agent.worker.main import Worker, set_up_process
from hearth.platform.child_main import die_with_parent
from hearth.wire.messages import Done, ForkWorker, WorkerForked, WorkerLibrary, decode, encode

log = logging.getLogger("hearth.worker")

_MAX_REQUEST_BYTES = 1 << 14  # three paths, a log level, and ranges of ports
# Of /proc/self/stat, counted after the command's name: begin and end of the arguments in memory; see proc(5).
_ARGUMENTS_FIELD = 45
# Threads after the imports. onnxruntime starts one that sleeps; sessions have their own, and work without it.
_NUM_THREADS = {"torch": 1, "onnxruntime": 2}
_POLL_SECONDS = 0.001  # interval at which a new worker checks whether the daemon has adopted it
_ADOPTION_SECONDS = 2.0  # longest wait for that, which takes milliseconds; the daemon waits no longer for the worker


class ForkServer:
    """Forks workers for its parent, the daemon."""

    def __init__(self, channel: socket.socket, library: WorkerLibrary) -> None:
        self._channel = channel
        self._library = library
        self._daemon = os.getppid()

    def run(self) -> None:
        """Serve requests until the daemon closes the channel."""
        _import_library(self._library)
        gc.collect()
        gc.freeze()  # a collection in a worker then writes to none of the shared pages
        if (num_threads := len(os.listdir("/proc/self/task"))) > _NUM_THREADS[self._library]:
            log.warning("%d threads run before a fork: a library has started some of them", num_threads)
        self._channel.send(encode(Done()))
        while data := self._channel.recv(_MAX_REQUEST_BYTES):
            request = decode(data)
            assert isinstance(request, ForkWorker)
            self._fork(request)

    def _fork(self, request: ForkWorker) -> None:
        """Fork a worker. Its parent is a second process, which ends at once, so that the daemon adopts it. Raises OSError."""
        if (parent := os.fork()) == 0:
            try:
                if os.fork() == 0:
                    self._become_worker(request)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(parent, 0)[1] != 0:
            raise OSError("no worker was forked")

    def _become_worker(self, request: ForkWorker) -> None:
        """Run the worker in the child; never returns into the server's loop."""
        code = 1
        try:
            deadline = time.monotonic() + _ADOPTION_SECONDS
            while os.getppid() != self._daemon and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            die_with_parent(self._daemon)
            _rename_process()
            self._channel.send(encode(WorkerForked(pid=os.getpid())))
            self._channel.close()
            Worker(request.endpoint, set_up_process(request), self._daemon).run()
            code = 0
        except BaseException:
            log.exception("the worker failed")
        finally:
            logging.shutdown()
            os._exit(code)


def _import_library(library: WorkerLibrary) -> None:
    """Import what the worker of a Transformer (torch) or of a graph (onnxruntime) imports."""
    if library == "torch":
        import torch

        # While modules are imported, some compute: the threads of OpenMP that this would start do not survive a fork, and a
        # worker would wait for them for ever in its first computation with several threads.
        torch.set_num_threads(1)
        import agent.worker.transformer.runtime
    else:
        import agent.worker.graph.runtime  # noqa: F401


def _rename_process() -> None:
    """Show the process as a worker in `ps` and /proc/PID/cmdline, which read its arguments from its memory."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[_ARGUMENTS_FIELD]), int(fields[_ARGUMENTS_FIELD + 1])
        arguments = Path("/proc/self/cmdline").read_bytes().replace(b"agent.worker.fork_server", b"agent.worker.main")
        ctypes.memmove(begin, arguments.ljust(end - begin, b"\0"), end - begin)
    except (OSError, ValueError, IndexError) as error:
        log.debug("the process was not renamed: %s", error)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon stops its processes itself
    logging.basicConfig(level=sys.argv[2], format="%(name)s %(levelname)s %(message)s")
    ForkServer(socket.socket(fileno=int(sys.argv[1])), cast(WorkerLibrary, sys.argv[3])).run()
