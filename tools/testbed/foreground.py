"""A command in a testbed that ends with whoever waits for it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence

import psutil

from hearth.errors import BadSetting
from tools.testbed.cluster import Testbed

_MARK = "HEARTH_TESTBED_RUN"  # in the environment of the command and of whatever it starts
_GRACE_SECONDS = 2.0


def run_in_foreground(testbed: Testbed, device: str, command: Sequence[str], limited: bool) -> int:
    """The command's exit status, as a shell gives it. Interrupted, it leaves nothing behind.

    Raises BadSetting when there is no such program.
    """
    environment = testbed.environment()
    if shutil.which(command[0], path=environment["PATH"]) is None:
        raise BadSetting(setting="the command", reason=f"there is no program '{command[0]}'")
    mark = secrets.token_hex(8)
    handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        process = testbed.popen(device, *command, limited=limited, environment={**environment, _MARK: mark})
        status = process.wait()
    except KeyboardInterrupt:
        # Ctrl-C reached the command as well; so it may end by itself before it is told to, and before it is made to.
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if _gone(process, testbed, device, mark, number):
                break
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _gone(process: subprocess.Popen[bytes], testbed: Testbed, device: str, mark: str, number: int | None) -> bool:
    """Signal what the command was and started; whether it is all gone soon after."""
    deadline = time.monotonic() + _GRACE_SECONDS
    signalled: set[int] = set()
    while True:
        process.poll()  # reaps it
        pids = {pid for pid in testbed.pids(device) if _is_marked(pid, mark)}
        if not pids or time.monotonic() > deadline:
            return not pids
        for pid in pids - signalled if number is not None else ():
            try:
                os.kill(pid, number or 0)
            except ProcessLookupError:
                pass
        signalled |= pids
        time.sleep(0.02)


def _is_marked(pid: int, mark: str) -> bool:
    try:
        return psutil.Process(pid).environ().get(_MARK) == mark
    except psutil.Error:
        return False
