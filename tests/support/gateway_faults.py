"""Faults of the gateway of a home of real processes, while clients ask: it dies, hangs, or its coordinator is stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
from support.home import TestHome
from support.waiting import wait_for

from hearth.client.sync import Home

# Deadline of a call. A gateway that hangs is replaced after 1.5 s, and starting one takes less than a second.
CALL_SECONDS = 10.0
_NUM_CLIENTS = 2

Ask = Callable[[Home], Any]
Equal = Callable[[Any, Any], bool]


class _Clients:
    """Clients with a connection each, which ask all the time. `problems`: errors, and answers that are not as expected."""

    def __init__(self, running: TestHome, ask: Ask, is_expected: Callable[[Any], bool]) -> None:
        self.problems: list[object] = []
        self.calls: list[tuple[float, float]] = []  # when they began and ended
        self._ended = threading.Event()
        self._running, self._ask, self._is_expected = running, ask, is_expected
        self._threads = [threading.Thread(target=self._ask_again) for _ in range(_NUM_CLIENTS)]

    def __enter__(self) -> _Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask_again(self) -> None:
        with self._running.connect() as home:
            while not self._ended.is_set():
                began = time.monotonic()
                try:
                    if not self._is_expected(answer := self._ask(home)):
                        self.problems.append(answer)
                except Exception as error:  # checked in the main thread
                    self.problems.append(error)
                self.calls.append((began, time.monotonic()))

    def wait_for_calls(self) -> None:
        """Wait until several calls that begin from now on have been answered."""
        now = time.monotonic()

        def have_come() -> bool:
            return bool(self.problems) or sum(began > now for began, _ in self.calls) > _NUM_CLIENTS

        wait_for("answers", have_come, 3 * CALL_SECONDS)
        self.check()

    def check(self) -> None:
        assert not self.problems, f"{self.problems[0]!r}\n{self._running.log('coordinator')}"


def survive_gateway_faults(running: TestHome, ask: Ask, equal: Equal) -> None:
    """Each fault costs the gateway, and no call: clients get what they get without faults, within `CALL_SECONDS`."""
    with running.ready() as home:
        expected = ask(home)
    with _Clients(running, ask, lambda answer: equal(answer, expected)) as clients:
        clients.wait_for_calls()
        for fault in (_kill, _stop, _stop_coordinator_for_a_while):
            gateway = _gateway_of(running)
            assert gateway is not None
            began = time.monotonic()
            fault(running, gateway)
            _wait_for_another(running, gateway)
            clients.wait_for_calls()
            longest = max(ended - begun for begun, ended in clients.calls if ended > began)
            print(f"{fault.__name__}: longest call {longest:.2f} s")
    clients.check()


def _wait_for_another(running: TestHome, gateway: int) -> None:
    wait_for("another gateway", lambda: _gateway_of(running) not in (None, gateway), CALL_SECONDS)


def _gateway_of(running: TestHome) -> int | None:
    """The process id of the coordinator's gateway; None while there is none."""
    for child in psutil.Process(running.pid("coordinator")).children():
        try:
            if "coordinator.port" in child.cmdline():
                return child.pid
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return None


def _kill(running: TestHome, gateway: int) -> None:
    os.kill(gateway, signal.SIGKILL)


def _stop(running: TestHome, gateway: int) -> None:
    os.kill(gateway, signal.SIGSTOP)


def _stop_coordinator_for_a_while(running: TestHome, gateway: int) -> None:
    """Until the gateway has ended, which it does after 1.5 s."""
    os.kill(running.pid("coordinator"), signal.SIGSTOP)
    try:
        wait_for(
            "the end of the gateway", lambda: psutil.Process(gateway).status() == psutil.STATUS_ZOMBIE, CALL_SECONDS
        )
    finally:
        os.kill(running.pid("coordinator"), signal.SIGCONT)
