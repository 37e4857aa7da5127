"""A coordinator that may have been replaced by its standby, or that has been."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.waiting import until

from coordinator.serve.standby import leadership as module
from coordinator.serve.standby.leadership import AnotherLeads, Leadership
from coordinator.serve.state import StateFile
from hearth.errors import HearthError, LeaseLost
from hearth.platform.asyncio_tools import cancel_all
from hearth.protocol import LEASE_SECONDS, STANDBY_LEASE_SECONDS
from hearth.wire import messages as wire

POLL_SECONDS = 0.02


@pytest.fixture(autouse=True)
def _polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", POLL_SECONDS)


class Devices:
    """The devices a, b and c, as the fleet of one coordinator knows them. They store every configuration."""

    def __init__(self) -> None:
        self.devices: dict[str, Any] = {name: SimpleNamespace(health="alive", host_id=name) for name in "abc"}
        self.leases: set[str] = set()
        self.holder = "this run"
        self.lease_seconds = 0.0
        self.may_compute: Callable[[], bool] = lambda: True
        self.on_granted: Callable[[str, wire.Configuration | None], None] = lambda device, configuration: None

    def leased(self) -> set[str]:
        return set(self.leases)

    def grant(self, names: str, known: wire.Configuration) -> None:
        for name in names:
            self.leases.add(name)
            self.on_granted(name, known)

    async def acquire_again(self, device_id: str) -> None:
        return

    async def ask(self, device_id: str, message: wire.Message, expected: type[Any], timeout_seconds: float) -> Any:
        assert isinstance(message, wire.StoreConfiguration)
        return wire.Done()


def known_configuration(leader: str = "the run before") -> wire.Configuration:
    return wire.Configuration(number=3, leader=leader, voters=("a", "b", "c"), tie_breaker="a")


def restarted(folder: Path, had_standby: bool = True) -> tuple[Leadership, Devices, list[HearthError]]:
    """The leadership of a coordinator that starts again; the list is of the errors with which it may compute no more."""
    state = StateFile(folder)
    if had_standby:
        state.save_configuration(known_configuration())
    devices, losses = Devices(), list[HearthError]()
    return Leadership(cast(Any, devices), state, losses.append), devices, losses


async def test_restarted_coordinator_may_have_been_replaced_until_it_has_a_majority(tmp_path: Path) -> None:
    leadership, devices, losses = restarted(tmp_path)
    assert leadership.may_be_replaced
    running = asyncio.create_task(leadership.run())
    devices.grant("a", known_configuration())
    await asyncio.sleep(3 * POLL_SECONDS)
    assert leadership.may_be_replaced
    devices.grant("b", known_configuration())
    await until("a term of its own", lambda: not leadership.may_be_replaced, seconds=20)
    assert leadership.may_compute()
    await asyncio.sleep(3 * POLL_SECONDS)
    devices.leases.clear()  # then its requests wait: it has a plan, and the same devices may return
    await until("the loss", lambda: len(losses) == 2, seconds=20)  # the first was at its start
    assert isinstance(losses[1], LeaseLost)
    assert not leadership.may_compute()
    assert not leadership.may_be_replaced
    await cancel_all([running])


async def test_device_whose_key_was_revoked_is_no_voter_although_its_lease_lasts(tmp_path: Path) -> None:
    leadership, devices, _ = restarted(tmp_path)

    def voters() -> tuple[str, ...]:
        current = leadership.quorum.current
        return current.voters if current is not None and not current.previous_voters else ()

    running = asyncio.create_task(leadership.run())
    devices.grant("abc", known_configuration())
    await until("a term of its own", leadership.may_compute, seconds=20)
    devices.devices["b"].health = "refused"
    await until("a change of the voters", lambda: voters() == ("a", "c"), seconds=20)
    await asyncio.sleep(3 * POLL_SECONDS)
    assert voters() == ("a", "c")
    assert leadership.may_compute()
    await cancel_all([running])


async def test_coordinator_that_never_had_a_standby_cannot_have_been_replaced(tmp_path: Path) -> None:
    leadership, _, _ = restarted(tmp_path, had_standby=False)
    assert not leadership.may_be_replaced
    assert leadership.may_compute()


async def test_coordinator_whose_devices_work_for_another_one_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DEPOSED_SECONDS", 0.2)
    leadership, devices, _ = restarted(tmp_path)
    running = asyncio.create_task(leadership.run())
    devices.devices["a"].health = "busy"
    await asyncio.sleep(0.4)
    assert not running.done()  # one of three
    devices.devices["b"].health = "busy"
    with pytest.raises(AnotherLeads):
        await running


async def test_leases_last_longer_after_the_coordinator_has_stalled(tmp_path: Path) -> None:
    leadership, devices, _ = restarted(tmp_path)
    running = asyncio.create_task(leadership.run())
    await until("the lease of a home with a standby", lambda: devices.lease_seconds == STANDBY_LEASE_SECONDS)
    time.sleep(0.9)
    await until("a longer lease", lambda: devices.lease_seconds >= 2.5)
    assert devices.lease_seconds <= LEASE_SECONDS
    await cancel_all([running])
