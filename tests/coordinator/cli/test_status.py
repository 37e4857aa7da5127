"""`hearth status` and `hearth devices`: what they say of a standby and of devices that are left out of plans."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import options
from coordinator.cli.app import app
from coordinator.cli.commands import devices
from hearth.errors import NoCoordinator, NotServing
from hearth.platform.security import new_home_key
from hearth.wire import messages as wire

STANDBY = "this is the standby of kitchen"


class Coordinator:
    """Stands for a client of a coordinator, which is a standby if it names no model."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.asked: list[float] = []

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None: ...

    def readiness(self, timeout_seconds: float, model: str | None) -> wire.Readiness:
        return wire.Readiness(ready=False, state=STANDBY, model=self.model)

    def status(self, timeout_seconds: float, model: str | None) -> wire.Status:
        self.asked.append(timeout_seconds)
        raise NotServing(state=STANDBY)


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_status_of_a_standby_says_whom_it_follows(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    standby = Coordinator("")
    monkeypatch.setattr(options, "connect", lambda *_: standby)
    result = CliRunner().invoke(app, ["status", *arguments])
    assert result.exit_code == 0, result.output
    assert STANDBY in result.output
    assert standby.asked == [2.0]  # another coordinator may lead


def test_status_of_a_coordinator_that_serves_no_model_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "connect", lambda *_: Coordinator("small"))
    result = CliRunner().invoke(app, ["status"])
    assert isinstance(result.exception, NotServing | SystemExit)
    assert result.exit_code == 1


def test_devices_are_shown_with_the_reason_for_which_a_coordinator_leaves_them_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def info(device_id: str, reason: str, state: Any = "alive") -> wire.DeviceInfo:
        return wire.DeviceInfo(
            device_id=device_id, name=device_id, host="10.0.0.1:1", state=state, reason=reason, telemetry=None
        )

    class Home:
        async def __aenter__(self) -> Home:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def devices(self, timeout_seconds: float) -> wire.DeviceList:
            reason = "left out of plans for 42 s: its worker died: killed"
            return wire.DeviceList(
                devices=(info("a", reason), info("b", ""), info("c", "no answer", "suspect")), links=()
            )

    async def connect(*_: object) -> Home:
        return Home()

    async def connect_to_none(*_: object) -> Home:
        raise NoCoordinator(seconds=1.5)

    monkeypatch.setattr(devices, "connect_async", connect)
    key = new_home_key()
    reasons = asyncio.run(devices._left_out_of_plans(key, None, 1.5))
    assert reasons == {"a": "left out of plans for 42 s: its worker died: killed"}
    monkeypatch.setattr(devices, "connect_async", connect_to_none)
    assert asyncio.run(devices._left_out_of_plans(key, None, 1.5)) == {}
