"""Faults of the gateway of a home of real processes, while clients ask: it dies, hangs, or its coordinator is stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
from support.clients import Clients
from support.home import TestHome
from support.waiting import wait_for

from hearth.client.sync import Home

# Deadline of a call. A gateway that hangs is replaced after 1.5 s, and starting one takes less than a second.
CALL_SECONDS = 10.0
_NUM_CLIENTS = 2

Ask = Callable[[Home], Any]
Equal = Callable[[Any, Any], bool]


def survive_gateway_faults(running: TestHome, ask: Ask, equal: Equal) -> None:
    """Each fault costs the gateway, and no call: clients get what they get without faults, within `CALL_SECONDS`."""
    with running.ready() as home:
        expected = ask(home)

    def ask_and_compare(home: Home) -> None:
        answer = ask(home)
        assert equal(answer, expected), answer

    with Clients(running, _NUM_CLIENTS * [ask_and_compare]) as clients:
        clients.wait_for_answers(3 * CALL_SECONDS)
        for fault in (_kill, _stop, _stop_coordinator_for_a_while):
            gateway = _gateway_of(running)
            assert gateway is not None
            began = time.monotonic()
            fault(running, gateway)
            wait_for("another gateway", lambda old=gateway: _gateway_of(running) not in (None, old), CALL_SECONDS)
            clients.wait_for_answers(3 * CALL_SECONDS)
            longest = max(ended - begun for calls in clients.calls for begun, ended in calls if ended > began)
            print(f"{fault.__name__}: longest call {longest:.2f} s")


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
