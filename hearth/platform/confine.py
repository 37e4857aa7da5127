"""Confines a process's access to files with Landlock, so that a flaw in a library that reads models reveals no key.

The process may read the interpreter, its libraries, /proc, /sys and what the caller names. It may write where the caller
allows, and to the entries of its own threads in /proc.
The kernel also stops it from tracing, and where it can from signalling, processes such as the agent, which holds the key.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

# System calls of <asm-generic/unistd.h>; the numbers are the same on x86-64 and ARM.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1  # LANDLOCK_CREATE_RULESET_VERSION
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38  # from <linux/prctl.h>; required before a process restricts itself
# Access rights of <linux/landlock.h>, by the version of the interface that introduced them. Without IOCTL_DEV, which GPU
# drivers need.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_TRUNCATE = 1 << 14
_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE}
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE  # those that apply to a file; the others are of folders
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_SCOPE_VERSION = 6  # of the interface: from here on, it also restricts
_SCOPES = 1 | 2  # abstract Unix sockets and signals

# Files below /etc that the C library, CUDA and Python read. Not the folder itself, which may hold the home key.
_ETC = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "hosts", "passwd", "group", "nvidia",
    "nv_tegra_release", "OpenCL", "alternatives",
)  # fmt: skip
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/opt/nvidia", "/proc", "/sys", "/run/nvidia-persistenced")


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def confine(readable: Iterable[Path], writable: Iterable[Path]) -> bool:
    """Restrict this thread, and the threads and processes that it starts, for good. Call it before other threads start.

    Returns whether the kernel supports it. Paths that do not exist are left out.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    if version < 1:
        log.info("this kernel has no Landlock: this process may read what its user may read")
        return False
    handled = 0
    for since, rights in _RIGHTS.items():
        handled |= rights if version >= since else 0
    attributes = _RulesetAttributes(handled, 0, _SCOPES if version >= _SCOPE_VERSION else 0)
    size = ctypes.sizeof(attributes) if version >= _SCOPE_VERSION else 8  # older kernels know the first field only
    ruleset = _checked(libc.syscall(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), 0))
    try:
        for path in (*_libraries(), *readable):
            _allow(libc, ruleset, path, _READ & handled)
        for path in (Path("/dev"), *writable):
            _allow(libc, ruleset, path, handled)
        _allow(libc, ruleset, _open_own_threads(), (_READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE) & handled)
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


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
        _checked(libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(descriptor)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
