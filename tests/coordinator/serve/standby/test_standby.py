"""What a standby answers before it leads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.serve.clients.client_port import client_port
from coordinator.serve.clients.trust import Trust
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.standby.standby import Standby
from hearth.errors import NotServing
from hearth.platform.security import derive_keypair, new_home_key
from hearth.wire import messages as wire
from hearth.wire.rpc import Caller


def test_only_administrators_learn_the_name_of_the_leader(tmp_path: Path) -> None:
    home = new_home_key()
    admin = Caller(derive_keypair(home.key_bytes(), "admin").public)

    async def main() -> None:
        settings = CoordinatorSettings(state_dir=tmp_path, name="attic", port=0, bind_host="127.0.0.1")
        trust = Trust(settings, home)
        async with client_port(settings, trust) as port:
            standby = Standby(settings, home, lambda line: None, trust, port, ["kitchen"])
        standby._leader_name = "kitchen"
        for caller, learns in ((admin, True), (Caller("an app"), False)):
            ready = await standby.handle(caller, wire.GetReadiness(request_id="1", timeout_seconds=1.0), ())
            assert isinstance(ready, wire.Readiness)
            assert ("kitchen" in ready.state) is learns
            with pytest.raises(NotServing) as refused:
                await standby.handle(caller, wire.GetModelInfo(request_id="2", timeout_seconds=1.0), ())
            assert ("kitchen" in str(refused.value)) is learns

    asyncio.run(main())
