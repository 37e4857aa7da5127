"""Stands for `agent.worker.graph.runtime` in a worker that tries all that a hostile model might, once it loads a plan.

Each attempt has the text of its row in docs/protocol.md. `targets.json` in the store says what to attack.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ATTEMPTS: dict[str, Callable[[Any], object]] = {}
_FAST_OPEN, _MPTCP, _TYPE_INTO_TERMINAL, _ATTACH = 0x20000000, 262, 0x5412, 16


def attempt(row: str) -> Callable[[Callable[[Any], object]], None]:
    def add(function: Callable[[Any], object]) -> None:
        ATTEMPTS[row] = function

    return add


def refused_every_time(attempts: list[Callable[[], object]]) -> None:
    """Raise PermissionError if each attempt is refused, OSError if only some are."""
    refused = 0
    for each in attempts:
        try:
            each()
        except PermissionError:
            refused += 1
    if refused == len(attempts):
        raise PermissionError
    if refused:
        raise OSError(f"{len(attempts) - refused} of {len(attempts)} attempts succeeded")


def system_call(number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *[ctypes.c_long(0)] * 6) < 0 and ctypes.get_errno() == errno.EPERM:
        raise PermissionError


def connect(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 5):
        pass


def bind(port: int) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def start_thread() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def fork() -> None:
    if os.fork() == 0:
        os._exit(0)


# ---- files


@attempt("read a key, or another file of its user")
def _(at: Any) -> None:
    refused_every_time([Path(at.key).read_bytes, lambda: os.listdir(Path(at.key).parent)])


@attempt("read the chunks of all models in the store")
def _(at: Any) -> object:
    return Path(at.chunk).read_bytes()


@attempt("change, add or remove a chunk")
def _(at: Any) -> None:
    chunk = Path(at.chunk)
    attempts = [lambda: chunk.open("r+b"), lambda: chunk.with_name("new").touch(), lambda: os.truncate(chunk, 0)]
    attempts.append(lambda: os.open(chunk, os.O_RDONLY | os.O_TRUNC))
    refused_every_time([*attempts, chunk.unlink, lambda: chunk.rename(Path(at.scratch) / "stolen")])


@attempt("change modes, owners, times or attributes of files")
def _(at: Any) -> None:
    files = [Path(at.chunk), Path(at.key), Path(at.key).parent, Path(at.scratch)]
    attempts = [[lambda p=p: p.chmod(0o700), lambda p=p: os.utime(p), lambda p=p: os.chown(p, -1, -1)] for p in files]
    refused_every_time([each for of_file in attempts for each in of_file])


@attempt("write in its own scratch folder, and one file beside it")
def _(at: Any) -> object:
    return (Path(at.scratch) / "file").write_bytes(b"x"), Path(f"{at.scratch}.part").write_bytes(b"x")


@attempt("write elsewhere, also in the system's temporary folder")
def _(at: Any) -> None:
    others = [
        Path("/tmp/red-team"),
        Path.home() / "red-team",
        Path(at.key).with_name("new"),
        Path(at.socket).with_name("new"),
    ]
    refused_every_time([other.touch for other in others])


@attempt("read the libraries, `/proc` and `/sys`")
def _(at: Any) -> object:
    return Path(ctypes.__file__).read_bytes(), Path("/proc/cpuinfo").read_bytes(), os.listdir("/sys")


@attempt("use devices and shared memory in `/dev`, as far as its user may")
def _(at: Any) -> None:
    shared = Path(f"/dev/shm/red-team-{os.getpid()}")
    shared.touch()
    shared.unlink()


# ---- processes


@attempt("read or write another process's memory, or trace it")
def _(at: Any) -> None:
    def trace() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(_ATTACH, at.pid, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), "ptrace")

    memory = f"/proc/{at.pid}/mem"
    refused_every_time([trace, Path(memory).read_bytes, lambda: Path(memory).write_bytes(b"x")])


@attempt("signal another process, or change its limits")
def _(at: Any) -> None:
    refused_every_time(
        [
            lambda: os.kill(at.pid, signal.SIGCONT),
            lambda: os.kill(0, 0),
            lambda: signal.pidfd_send_signal(os.pidfd_open(at.pid), signal.SIGCONT),
            lambda: resource.prlimit(at.pid, resource.RLIMIT_NOFILE, (1, 1)),
        ]
    )


@attempt("start a program or a process")
def _(at: Any) -> None:
    program = "/bin/true"
    spawn = [lambda: os.posix_spawn(program, [program], {}), lambda: os.execv(program, [program])]
    refused_every_time([fork, *spawn])


@attempt("start threads; above 4096, the agent ends it")
def _(at: Any) -> None:
    start_thread()


# ---- network


@attempt("connect to the data ports of its plan's devices")
def _(at: Any) -> None:
    connect(at.peer_port)


@attempt("connect to another TCP port, for instance of an agent or a coordinator")
def _(at: Any) -> None:
    connect(at.control_port)


@attempt("bind a data port of its device")
def _(at: Any) -> None:
    bind(at.own_port)


@attempt("bind another TCP port")
def _(at: Any) -> None:
    bind(at.other_port)


@attempt("connect past the rule of ports (TCP Fast Open, MPTCP, io_uring)")
def _(at: Any) -> None:
    def fast_open() -> None:
        with socket.socket() as client:
            client.sendto(b"x", _FAST_OPEN, ("127.0.0.1", at.control_port))

    multipath = [lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, _MPTCP)]
    refused_every_time([fast_open, *multipath, lambda: system_call(425)])


@attempt("send UDP, or use another family of sockets")
def _(at: Any) -> None:
    kinds = [
        (socket.AF_INET, socket.SOCK_DGRAM),
        (socket.AF_INET6, socket.SOCK_DGRAM),
        (socket.AF_INET, socket.SOCK_RAW),
    ]
    families = [(family, socket.SOCK_RAW) for family in range(50) if family not in (1, 2, 10, 16)]
    refused_every_time([lambda each=each: socket.socket(*each) for each in [*kinds, *families]])


@attempt("connect to a Unix socket, for instance of D-Bus")
def _(at: Any) -> None:
    def through_a_pair() -> None:
        with socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0] as end:
            end.connect(at.socket)

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(at.socket)

    refused_every_time([connect, *([] if at.on_gpu else [through_a_pair])])


# ---- the kernel


@attempt("mount, load code into the kernel, or use its keys, performance counters or io_uring")
def _(at: Any) -> None:
    refused_every_time([lambda each=each: system_call(each) for each in at.system_calls])


@attempt("type into the terminal from which the agent was started")
def _(at: Any) -> None:
    fcntl.ioctl(0, _TYPE_INTO_TERMINAL, b"x")


# ---- the runtime


def outcome(function: Callable[[Any], object], at: Any) -> str:
    try:
        function(at)
    except PermissionError:
        return "no"
    except Exception as error:
        return repr(error)
    return "yes"


class GraphRuntime:
    def __init__(self, start: Any, *_: Any) -> None:
        self._start = start

    def load(self, is_given_up: Callable[[], bool]) -> Any:
        from hearth.wire.messages import WorkerBound

        at = SimpleNamespace(**json.loads((Path(self._start.store_path) / "targets.json").read_bytes()))
        at.scratch, at.on_gpu = self._start.scratch_path, self._start.compute_device == "cuda"
        outcomes = {row: outcome(function, at) for row, function in ATTEMPTS.items()}
        (Path(at.scratch) / "outcomes.json").write_text(json.dumps(outcomes))
        return WorkerBound(port=1, public_key="0" * 40, num_bytes_loaded=0)
