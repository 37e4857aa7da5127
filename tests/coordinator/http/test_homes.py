"""Connections of the gateway to its coordinator: tokens that are wrong delay only the address that sends them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

pytest.importorskip("starlette")

from coordinator.http import homes
from hearth.errors import QueueFull, WrongKey
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.curve import new_keypair
from hearth.platform.security import AppKey, format_credential, format_token
from hearth.wire.messages import ServedModel

LIMIT_SECONDS = 30.0  # that only failures reach
COORDINATOR = new_keypair().public


def new_app() -> AppKey:
    return AppKey(name="app", secret=new_keypair().secret, coordinator_public=COORDINATOR)


class _Home:
    async def models(self, timeout_seconds: float) -> tuple[ServedModel, ...]:
        return ()

    async def close(self) -> None:
        """There is nothing to close."""


async def test_wrong_token_delays_unknown_ones_of_its_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_WRONG_TOKEN_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(homes, "_MAX_WAITING_OF_ADDRESS", 3)
    admitted = [new_app() for _ in range(4)]

    async def connect(address: object, key: AppKey, *_: object) -> _Home:
        if key.secret not in [each.secret for each in admitted]:
            raise WrongKey(endpoint="the coordinator")
        return _Home()

    monkeypatch.setattr(homes, "connect_async", connect)
    gateway = homes.Homes(homes.HttpSettings(key=format_credential(new_app())))

    async def ask(key: AppKey, address: str) -> None:
        async with gateway.served(format_token(key), address):
            pass

    known, waits, other, third = admitted
    await ask(known, "10.0.0.2")
    tasks = [asyncio.create_task(ask(each, "10.0.0.2")) for each in (new_app(), waits, third)]
    await asyncio.wait_for(ask(other, "10.0.0.3"), LIMIT_SECONDS)
    await asyncio.wait_for(ask(known, "10.0.0.2"), LIMIT_SECONDS)
    assert not any(task.done() for task in tasks)
    with pytest.raises(QueueFull):
        await ask(new_app(), "10.0.0.2")
    tasks[0].cancel()
    with suppress(asyncio.CancelledError):
        await tasks[0]
    await asyncio.wait_for(asyncio.gather(*tasks[1:]), LIMIT_SECONDS)
    await cancel_all(tasks)
    await gateway.close()
