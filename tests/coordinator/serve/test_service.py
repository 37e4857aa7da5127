"""The service of a coordinator: while its standby may lead, and on a disk that is full or hangs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.waiting import until

from coordinator.serve import deployments
from coordinator.serve import state as state_module
from coordinator.serve.clients.key_registry import KeyRegistry
from coordinator.serve.clients.trust import Trust
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.model.lifecycle import Lifecycle
from coordinator.serve.service import Service
from coordinator.serve.state import StateFile, TransformerGoal
from hearth.errors import AppRevoked, DiskHung, NotServing
from hearth.files import write_atomically
from hearth.platform.curve import new_keypair
from hearth.platform.security import derive_keypair, new_home_key
from hearth.wire import messages as wire
from hearth.wire.messages.client import KnownKeys
from hearth.wire.rpc import Caller

HOME = new_home_key()
ADMIN = Caller(derive_keypair(HOME.key_bytes(), "admin").public)
QUESTION = wire.GetModelInfo(request_id="1", timeout_seconds=1.0)


def service_in(folder: Path, end_requests: Any = None, configuration: wire.Configuration | None = None) -> Service:
    """A service that does not run; its only controller answers `QUESTION` with `Done`. `end_requests`: of its port.

    `configuration`: of voters, as of a standby that followed the run before.
    """

    async def answer(message: wire.Message, payload: object) -> wire.Message:
        return wire.Done()

    settings = CoordinatorSettings(state_dir=folder, advertise=False)
    state = StateFile(folder)
    state.save_configuration(configuration)
    port = cast(Any, SimpleNamespace(change_access=lambda: None, end_requests=end_requests))
    service = Service(settings, HOME, lambda line: None, lambda *_: None, Trust(settings, HOME), state, port)
    service.deployments.controllers["default"] = cast(
        Any,
        SimpleNamespace(
            name="default", state="adopting",
            kind=SimpleNamespace(handlers={type(QUESTION): answer}, answers="text", takes_tools=False, context_tokens=64),
            lifecycle=Lifecycle(phase="adopting"), goal=SimpleNamespace(path="m"),
        ),
    )  # fmt: skip
    return service


async def test_requests_are_refused_at_once_while_the_standby_may_lead(tmp_path: Path) -> None:
    """Clients would wait here for their answer, and could get it from the other coordinator."""
    configuration = wire.Configuration(number=3, leader="the run before", voters=("a",), tie_breaker="a")
    service = service_in(tmp_path, configuration=configuration)
    readiness = await service.handle(ADMIN, wire.GetReadiness(request_id="2", timeout_seconds=1.0), ())
    assert isinstance(readiness, wire.Readiness)
    with pytest.raises(NotServing, match="asks most devices for their leases"):
        await service.handle(ADMIN, QUESTION, ())
    leadership = service.leadership
    taken = leadership.quorum.granted("a", configuration).take_over("a")
    assert taken.current is not None
    leadership.quorum = taken
    with pytest.raises(NotServing):
        await service.handle(ADMIN, QUESTION, ())
    leadership.quorum = taken.stored("a", taken.current.number)
    assert await service.handle(ADMIN, QUESTION, ()) == wire.Done()


async def test_requests_are_taken_where_no_standby_ever_was(tmp_path: Path) -> None:
    assert await service_in(tmp_path).handle(ADMIN, QUESTION, ()) == wire.Done()


async def test_standby_that_led_before_brings_its_changes_of_keys(tmp_path: Path) -> None:
    lamp, attic, radio = (new_keypair().public for _ in range(3))
    ended: list[str] = []

    async def end_requests(key: str, error: AppRevoked) -> None:
        ended.append(key)

    service = service_in(tmp_path, end_requests)
    for change in (
        wire.AddApp(request_id="1", timeout_seconds=1.0, name="lamp", public_key=lamp),
        wire.AddDevice(request_id="2", timeout_seconds=1.0, name="attic", public_key=attic),
    ):
        await service.handle(ADMIN, change, ())
    follow = wire.Follow(
        name="b",
        apps=KnownKeys(admitted=((radio, "radio"),), revoked=((lamp, "lamp"),)),
        devices=KnownKeys(revoked=((attic, "attic"),)),
    )
    await service.handle(ADMIN, follow, ())
    assert ended == [lamp]
    assert all([await each.file.saved() for each in (service._trust.apps, service._trust.devices)])
    for name, admitted, revoked in (("apps", [radio], [lamp]), ("devices", [], [attic])):
        known = KeyRegistry(tmp_path / f"{name}.json").current
        assert (list(known.keys), list(known.revoked)) == (admitted, revoked)


@pytest.mark.parametrize(
    ("disk_full", "has_standby", "warning"), [(False, False, ""), (True, False, "disk of"), (False, True, "no standby")]
)
async def test_change_of_keys_says_why_it_may_be_lost(
    disk_full: bool, has_standby: bool, warning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, content: str, **options: bool) -> None:
        if disk_full:
            raise OSError(28, "No space left on device")
        write_atomically(path, content, **options)

    configuration = wire.Configuration(number=3, leader="the run before", voters=("a",), tie_breaker="a")
    service = service_in(tmp_path, configuration=configuration if has_standby else None)
    monkeypatch.setattr(state_module, "write_atomically", write)
    request = wire.AddApp(request_id="5", timeout_seconds=1.0, name="lamp", public_key=new_keypair().public)
    answer = await service.handle(ADMIN, request, ())
    assert isinstance(answer, wire.KeysChanged)
    assert warning in answer.warning
    assert bool(answer.warning) == bool(warning)


async def test_change_of_keys_on_a_disk_that_hangs_is_in_force_at_once_and_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def write(path: Path, content: str, **options: bool) -> None:
        answers.wait(60)
        write_atomically(path, content, **options)

    monkeypatch.setattr(state_module, "write_atomically", write)
    monkeypatch.setattr(state_module, "_SAVE_SECONDS", 0.3)
    service, lamp = service_in(tmp_path), new_keypair().public
    request = wire.AddApp(request_id="5", timeout_seconds=1.0, name="lamp", public_key=lamp)
    changing = asyncio.create_task(service.handle(ADMIN, request, ()))
    try:
        await until("the key in force", lambda: service._trust.apps.current.keys == {lamp: "lamp"})
        assert not changing.done()  # for a moment, the disk may be busy only
        assert await service.handle(ADMIN, QUESTION, ()) == wire.Done()
        answer = await changing
        assert isinstance(answer, wire.KeysChanged)
        assert "the disk of" in answer.warning
        assert not (tmp_path / "apps.json").exists()
    finally:
        answers.set()
    await until("the key on the disk", lambda: service._trust.apps.file.is_saved)
    assert KeyRegistry(tmp_path / "apps.json").current.keys == {lamp: "lamp"}


async def test_model_on_a_disk_that_hangs_is_an_error_and_does_not_stop_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(deployments, "open_checked", lambda goal, state_dir: answers.wait(30))
    monkeypatch.setattr(deployments, "_OPEN_SECONDS", 0.1)
    adding = service_in(tmp_path).deployments.add(TransformerGoal(model_dir="/models/m"), None)
    try:
        with pytest.raises(DiskHung, match="/models/m"):
            await asyncio.wait_for(adding, 10)
    finally:
        answers.set()
