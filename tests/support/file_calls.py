"""Finds accesses to files from an event loop of Hearth: a disk that hangs would stop all that the loop serves.

`watch` reports each access that a coroutine, or a callback of a loop, of the packages `agent`, `coordinator` and `hearth` makes
in the loop's own thread. A test that calls a function of theirs itself makes no coroutine do it, and is not reported.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

MARK = "on an event loop, files are accessed in threads (`hearth.platform.disk`):"
_ROOT = str(Path(__file__).parents[2]) + os.sep
# Events of Python's audit, and functions of `os` that have none.
_EVENTS = {
    "open", "os.chmod", "os.chown", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir",
    "os.symlink", "os.truncate", "os.utime", "fcntl.flock",
}  # fmt: skip
_FUNCTIONS = ("stat", "lstat", "statvfs", "fsync", "fdatasync", "access")
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

# ---- what may access files on a loop ---------------------------------------------------------------------------------------

# The kernel answers, or the page cache, as for the program itself.
_NO_DISKS = ("/proc/", "/sys/", "/dev/null", "/etc/machine-id")
_EXEMPT = {
    "<frozen importlib": "an import reads a program's own files: on a disk that hangs, no program goes on",
    "/linecache.py": "the lines of a traceback that is logged, as above",
    "coordinator/cli/": "a command serves nobody but its user",
    "agent/worker/": "a worker has nothing to do before it has read its weights; its agent watches it",
    "hearth/platform/socket_folder.py": "ZeroMQ binds and connects sockets there on the loop in any case",
}


def watch(report: Callable[[str], None]) -> None:
    """Call `report` with each access from now on, until the process ends."""

    def check(event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS and asyncio._get_running_loop() is not None:
            path = os.fsdecode(args[0]) if args and isinstance(args[0], str | bytes | os.PathLike) else ""
            is_descriptor = event == "open" and not path
            if not is_descriptor and not path.startswith(_NO_DISKS) and (where := _coroutine(sys._getframe(1))):
                report(f"{event} {path} by {where}")

    def checked(name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            check(f"os.{name}", args)
            return function(*args, **options)

        return wrapper

    _EVENTS.update(f"os.{name}" for name in _FUNCTIONS)
    for name in _FUNCTIONS:
        setattr(os, name, checked(name))
    sys.addaudithook(check)


def _coroutine(frame: FrameType | None) -> str:
    """The innermost function of Hearth that called this, if a coroutine or a loop of Hearth runs it; else empty."""
    innermost = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if any(exempt in file for exempt in _EXEMPT):
            return ""
        if file.startswith(_ROOT) and "site-packages" not in file and not file.endswith("simulation/disk.py"):
            name = file.removeprefix(_ROOT)
            if name.startswith("tests"):
                return ""
            innermost = innermost or f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
            if frame.f_code.co_flags & _COROUTINE:
                return innermost
        elif file.endswith("asyncio/events.py"):  # the loop calls back
            return innermost
        frame = frame.f_back
    return ""
