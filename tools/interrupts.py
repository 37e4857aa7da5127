"""Interrupt handling: the first Ctrl-C ends a command at once, and the cleanup runs without further interrupts.

A KeyboardInterrupt raised at an arbitrary point can be lost (in the callbacks of an import) or leave an operation
half done. So critical sections are `shielded`, and `check` raises an interrupt that was lost.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _State:
    requested = False
    raised = False
    shields = 0


_state = _State()


def install() -> None:
    """Install the handler for SIGINT and SIGTERM. Call it in the main thread."""
    for number in _SIGNALS:
        signal.signal(number, _handle)


def ignore() -> None:
    """Ignore further signals. Call it at the end of the program, to keep its exit status."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # CPython ends with SIGINT instead of the exit status once an interrupt came while it executed a string, as dataclasses
    # do, also if it was handled. Executing another one makes it forget that.
    exec("pass")


def check() -> None:
    """Raise KeyboardInterrupt if a signal has arrived. Do not call it during cleanup."""
    if _state.requested:
        _raise()


def run(app: Callable[[], None]) -> None:
    """Run a command; an error of a program or file is one line, and cleanup is not interrupted."""
    install()
    try:
        app()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        ignore()


@contextmanager
def shielded(with_children: bool = False) -> Iterator[None]:
    """Delay an interrupt to the end of the block, where it replaces an exception of the block.

    `with_children`: also block the signals in programs started in the block, to which a terminal sends Ctrl-C too.
    """
    _state.shields += 1
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS) if with_children else None
    try:
        yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _state.shields -= 1
        if _state.requested and not _state.raised and not _state.shields:
            _raise()


def _handle(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt for the first signal only, because cleanup runs after it."""
    first = not _state.requested
    _state.requested = True
    if first and not _state.shields:
        _raise()


def _raise() -> None:
    _state.raised = True
    raise KeyboardInterrupt
