"""What systemd's watchdog is fed with: each part of a program says whether it has worked, and says no when it hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_model
from support.contexts import zmq_context
from support.controllers import ServedController
from support.fleets import TransformerFleet
from support.waiting import until
from zmq.auth.base import Authenticator

from coordinator.serve.clients import client_port as client_port_module
from coordinator.serve.clients.client_port import client_port
from coordinator.serve.clients.trust import Trust
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.model import lifecycle
from coordinator.serve.state import TransformerGoal
from hearth.platform import loop_gatekeeper
from hearth.platform.asyncio_tools import cancel_all, loop_time
from hearth.platform.curve import new_keypair
from hearth.platform.loop_gatekeeper import LoopGatekeeper
from hearth.platform.security import Access, new_home_key
from hearth.wire.messages import Done
from hearth.wire.rpc import Caller, RpcClient, RpcServer


async def test_gatekeeper_that_does_not_decide_has_not_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(self: Authenticator, message: list[bytes]) -> None:
        await asyncio.Event().wait()

    async def handle(caller: Caller, message: Any, payload: Any) -> Done:
        return Done()

    monkeypatch.setattr(loop_gatekeeper, "_DECISION_SECONDS", 0.05)
    monkeypatch.setattr(Authenticator, "handle_zap_message", hang)

    server_keys, client_keys = new_keypair(), new_keypair()
    with zmq_context() as context, zmq_context() as client_context:
        gatekeeper = LoopGatekeeper(context)
        gatekeeper.admit("test", lambda key: True)
        gatekeeper.start()
        server = RpcServer(context, "127.0.0.1", 0, server_keys, "test", handle)
        access = Access(client_keys, server_keys.public)
        client = RpcClient(client_context, f"tcp://127.0.0.1:{server.port}", access, "test")
        assert gatekeeper.has_worked()
        asking = asyncio.create_task(client.call(Done(), timeout_seconds=60))
        await until("a handshake that waits", lambda: not gatekeeper.has_worked(), seconds=20)
        await cancel_all([asking])
        await client.close()
        await server.close()
        await gatekeeper.close()


async def test_client_port_that_hears_nothing_of_its_process_has_not_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CoordinatorSettings(state_dir=tmp_path, port=0, bind_host="127.0.0.1")
    async with client_port(settings, Trust(settings, new_home_key())) as port:
        assert port.has_worked()  # the first process is starting
        monkeypatch.setattr(client_port_module, "loop_time", lambda: loop_time() + 3600.0)
        await until("a sign of life", port.has_worked, seconds=30)
        process_id = port.process_id
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)
        try:
            num_silent = 0
            for _ in range(3):  # what it sent before may arrive late; after 1.5 s another process is started
                await asyncio.sleep(0.6)
                num_silent += not port.has_worked()
            assert num_silent > 0
        finally:
            with suppress(ProcessLookupError):  # it was replaced
                os.kill(process_id, signal.SIGCONT)


async def test_controller_whose_work_has_ended_without_an_outcome_has_not_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = [0.1]

    def pause_or_end(state: lifecycle.Lifecycle) -> float:
        if pauses:
            return pauses.pop()
        raise asyncio.CancelledError

    monkeypatch.setattr(lifecycle, "retry_seconds", pause_or_end)
    goal = TransformerGoal(model_dir=str(write_model(tmp_path / "model")))
    home = ServedController(TransformerFleet(""), tmp_path, goal, None)
    running = asyncio.create_task(home.controller.run())
    await home.until(lambda: home.controller.lifecycle.phase == "failed")  # there is no device: it tries again
    assert home.controller.has_worked()
    await home.until(lambda: not home.controller.has_worked())
    assert home.controller.lifecycle.phase == "failed"
    home.controller.stop()
    await asyncio.wait_for(running, 60)
    assert home.controller.has_worked()
