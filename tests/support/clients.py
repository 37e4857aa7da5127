"""Clients of a home of real processes that ask all the time, while a test does something to the home."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from support.home import TestHome
from support.waiting import WAIT_LIMIT_SECONDS, wait_for
from typing_extensions import Self

from hearth.client.sync import Home

Ask = Callable[[Home], object]


class Clients:
    """A client for each of `asks`, with a thread and a connection of its own, that calls it again and again in the block.

    An `ask` compares its answer itself. An error ends its client and fails the test, at the latest at the end of the block.
    `connect`: to other addresses than the coordinator's.
    """

    def __init__(self, running: TestHome, asks: Sequence[Ask], connect: Callable[[], Home] | None = None) -> None:
        self.calls: list[list[tuple[float, float]]] = [[] for _ in asks]  # of each client: when they began and ended
        self._errors: list[BaseException] = []
        self._ended = threading.Event()
        self._running, self._connect = running, connect or running.connect
        self._threads = [
            threading.Thread(target=self._ask_again, args=each) for each in zip(asks, self.calls, strict=True)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(WAIT_LIMIT_SECONDS)
        if kind is None:
            self._check()

    def _ask_again(self, ask: Ask, calls: list[tuple[float, float]]) -> None:
        try:
            with self._connect() as home:
                while not self._ended.is_set():
                    began = time.monotonic()
                    ask(home)
                    calls.append((began, time.monotonic()))
        except BaseException as error:  # raised in the test's thread
            self._errors.append(error)

    def wait_for_answers(self, seconds: float = WAIT_LIMIT_SECONDS) -> None:
        """Wait until each client has an answer to a call that begins from now on."""
        now = time.monotonic()

        def have_come() -> bool:
            return bool(self._errors) or all(calls and calls[-1][0] > now for calls in self.calls)

        wait_for("answers", have_come, seconds)
        self._check()

    def _check(self) -> None:
        for error in self._errors:
            raise AssertionError(f"{error!r}\n{self._running.log('coordinator')}") from error
