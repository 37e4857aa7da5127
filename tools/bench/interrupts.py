"""Ctrl-C ends a benchmark once, at once, and lets it take down what it has put up.

A KeyboardInterrupt that is raised just anywhere can be lost (in the callbacks of an import) or leave something half
begun. So what must be whole is shielded, and what was lost is found at the next `check`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _State:
    requested = False
    raised = False
    shields = 0


_state = _State()


def install() -> None:
    """For a command's main thread. SIGTERM does the same."""
    for number in _SIGNALS:
        signal.signal(number, _handle)


def ignore() -> None:
    """At the end of the program, so that one more cannot change how it ends."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raises KeyboardInterrupt when one was asked for. Not for use while things are taken down."""
    if _state.requested:
        _raise()


@contextmanager
def shielded(with_children: bool = False) -> Iterator[None]:
    """An interrupt waits for the end of the block, and then takes precedence over what failed in it.

    `with_children`: the programs that are run in it do not see Ctrl-C either, which a terminal sends to all.
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
    """The first one counts: after it everything is being taken down."""
    first = not _state.requested
    _state.requested = True
    if first and not _state.shields:
        _raise()


def _raise() -> None:
    _state.raised = True
    raise KeyboardInterrupt
