"""Confines a process to files and TCP ports with Landlock, so that a flaw in a library that reads models reveals no key.

The process may read the interpreter, its libraries, /proc, /sys and what the caller names. It may write where the caller
allows, and to the entries of its own threads in /proc.
The kernel also stops it from tracing, and where it can from signalling, processes such as the agent, which holds the key.
`hearth.platform.system_calls` takes from the process what Landlock does not cover.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from hearth.platform.system_calls import SET_NO_NEW_PRIVS, can_refuse, checked, refuse_system_calls
from hearth.protocol import CONFINEMENT

log = logging.getLogger(__name__)

# System calls of <asm-generic/unistd.h>; the numbers are the same on x86-64 and ARM.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1  # LANDLOCK_CREATE_RULESET_VERSION
_RULE_PATH_BENEATH, _RULE_PORT = 1, 2
# Access rights of <linux/landlock.h>, by the version of the interface that introduced them. Without IOCTL_DEV, which GPU
# drivers need.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_TRUNCATE = 1 << 14
_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE}
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE  # those that apply to a file; the others are of folders
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_BIND, _CONNECT = 1, 2
# Versions of the interface from which on it also restricts TCP ports; abstract Unix sockets and signals.
_PORT_VERSION, _SCOPE_VERSION = 4, 6
_SCOPES = 1 | 2

COMPILED_KERNELS = Path(os.path.expanduser("~/.nv"))  # of CUDA, for this computer's GPU
_Ranges: TypeAlias = Sequence[tuple[int, int]]

# Files below /etc that the C library, CUDA and Python read. Not the folder itself, which may hold the home key.
_ETC = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "hosts", "passwd", "group", "nvidia",
    "nv_tegra_release", "OpenCL", "alternatives",
)  # fmt: skip
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/opt/nvidia", "/proc", "/sys", "/run/nvidia-persistenced")
_MAX_WRITTEN_BYTES = 16 << 20  # of a file: plans go to pipes, and learnt policies have less than 1 MB
_NO_PORTS = ((1, 0),)  # an empty range


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


class _Port(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


def confinement() -> tuple[str, ...]:
    """What this system can confine a process in, of `CONFINEMENT`."""
    version = _version(ctypes.CDLL(None))
    supported = (version >= 1, version >= _PORT_VERSION, can_refuse())
    return tuple(name for name, is_supported in zip(CONFINEMENT, supported, strict=True) if is_supported)


def confine(
    readable: Iterable[Path], writable: Iterable[Path], bind_ports: _Ranges = (), connect_ports: _Ranges = ()
) -> bool:
    """Restrict this thread, and the threads and processes that it starts, for good. Call it before other threads start.

    TCP ports are ranges, first and last of each; port 0: any that the kernel chooses. No range: they are not restricted.
    Returns whether the kernel supports it; some restrict files only. Paths that do not exist are left out.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = _version(libc)
    if version < 1:
        log.info("this kernel has no Landlock: this process may read what its user may read")
        return False
    handled = 0
    for since, rights in _RIGHTS.items():
        handled |= rights if version >= since else 0
    ports = {_BIND: bind_ports, _CONNECT: connect_ports} if version >= _PORT_VERSION else {}
    ports = {right: ranges for right, ranges in ports.items() if ranges}
    scopes = _SCOPES if version >= _SCOPE_VERSION else 0
    attributes = _RulesetAttributes(handled, sum(ports), scopes)  # older kernels accept fields that are 0
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    ruleset = checked(libc.syscall(_CREATE_RULESET, ctypes.byref(attributes), size, 0))
    try:
        for path in (*_libraries(), *readable):
            _allow(libc, ruleset, path, _READ & handled)
        for path in (Path("/dev"), *writable):
            _allow(libc, ruleset, path, handled)
        _allow(libc, ruleset, _open_own_threads(), (_READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE) & handled)
        for right, ranges in ports.items():
            for number in chain.from_iterable(range(first, last + 1) for first, last in ranges):
                rule = ctypes.byref(_Port(right, number))
                checked(libc.syscall(_ADD_RULE, ruleset, _RULE_PORT, rule, 0))
        checked(libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


def confine_reader(readable: Iterable[Path], writable: Iterable[Path], more_bytes: int) -> None:
    """Leave this process these files, its libraries and no network, and `more_bytes` of private memory more than it has now.

    Beyond that, allocations fail (MemoryError). Mapped files do not count, so that files larger than memory can be read. What
    it writes to files, its output for instance, is limited too.
    """
    _limit(resource.RLIMIT_FSIZE, _MAX_WRITTEN_BYTES)
    if sys.platform == "linux":
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        _limit(resource.RLIMIT_DATA, int(fields["VmData"].split()[0]) * 1024 + more_bytes)
        confine(readable, writable, _NO_PORTS, _NO_PORTS)
        refuse_system_calls(unix_sockets=False)


def limit_processor_time(more_seconds: float) -> None:
    """End this process by SIGXCPU after so much more processor time of all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + more_seconds))


def _version(libc: ctypes.CDLL) -> int:
    """The version of Landlock's interface; not positive: there is none."""
    return int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)) if sys.platform == "linux" else 0


def _libraries() -> Iterable[Path]:
    """Where the interpreter, its packages and Hearth's own lie."""
    yield from map(Path, _SYSTEM)
    yield from (Path("/etc") / name for name in _ETC)
    yield from (Path(prefix) for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix})
    yield from (Path(entry) for entry in sys.path if entry and _holds_packages(Path(entry)))
    root = Path(__file__).parents[2]  # its other entries, for instance the current folder, may hold a key
    yield from (root / "agent", root / "coordinator", root / "hearth")
    yield from (Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry)  # CUDA's, perhaps


def _open_own_threads() -> Path:
    """The folder of this process's threads in /proc: CUDA names a thread there, and does not start if it cannot.

    It stays open: a rule is about this very entry, which the kernel might otherwise forget, and make again.
    """
    folder = Path(f"/proc/{os.getpid()}/task")
    with suppress(OSError):
        os.open(folder, os.O_PATH | os.O_CLOEXEC)
    return folder


def _holds_packages(folder: Path) -> bool:
    """Whether packages are installed in this entry of the path; `pip install --target` takes any folder."""
    return folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info"))


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = _PathBeneath(rights if path.is_dir() else rights & _FILE_RIGHTS, descriptor)
        checked(libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(descriptor)


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    if hard == resource.RLIM_INFINITY or value < hard:
        resource.setrlimit(what, (value, value + 1))  # for processor time, the soft limit has a signal of its own
