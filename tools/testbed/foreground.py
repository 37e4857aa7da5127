"""Runs a command in a testbed in the foreground; it ends with its caller."""

from __future__ import annotations

import secrets
import shutil
import signal
from collections.abc import Sequence

import psutil

from hearth.errors import BadSetting
from tools.testbed.cluster import Testbed

_MARK = "HEARTH_TESTBED_RUN"  # environment variable that marks the command and its descendants
_GRACE_SECONDS = 2.0  # that the processes get to end after each signal


def run_in_foreground(testbed: Testbed, device: str, command: Sequence[str], limited: bool) -> int:
    """Run a command; returns its exit status in the shell's convention. An interrupt ends all its processes.

    Raises BadSetting if there is no such program.
    """
    environment = testbed.environment()
    if shutil.which(command[0], path=environment["PATH"]) is None:
        raise BadSetting(setting="the command", reason=f"there is no program '{command[0]}'")
    mark = secrets.token_hex(8)
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        process = testbed.popen(device, *command, limited=limited, environment={**environment, _MARK: mark})
        status = process.wait()
    except KeyboardInterrupt:
        # Ctrl-C also reaches the command, so first wait for it to end by itself, then terminate, then kill it.
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            if testbed.stop(
                lambda: {pid for pid in testbed.pids(device) if _is_marked(pid, mark)}, number, _GRACE_SECONDS
            ):
                break
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def _is_marked(pid: int, mark: str) -> bool:
    try:
        return psutil.Process(pid).environ().get(_MARK) == mark
    except psutil.Error:
        return False
