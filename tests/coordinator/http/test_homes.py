"""Connections of the gateway to its coordinator: tokens that are wrong delay only the address that sends them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from coordinator.http import homes
from hearth.errors import QueueFull, WrongKey
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.curve import new_keypair
from hearth.platform.security import AppKey, format_credential, format_token

LIMIT_SECONDS = 30.0  # that only failures reach


async def nothing(*_: object) -> tuple[()]:
    return ()


async def test_wrong_token_delays_unknown_ones_of_its_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_WRONG_TOKEN_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(homes, "_MAX_WAITING_OF_ADDRESS", 2)
    public = new_keypair().public
    secrets = [new_keypair().secret for _ in range(5)]
    wrong, known, waits, other, another = (AppKey(name="a", secret=each, coordinator_public=public) for each in secrets)

    async def connect(address: object, key: AppKey, *_: object) -> SimpleNamespace:
        if key.secret == wrong.secret:
            raise WrongKey(endpoint="the coordinator")
        return SimpleNamespace(models=nothing)

    monkeypatch.setattr(homes, "connect_async", connect)
    gateway = homes.Homes(homes.HttpSettings(key=format_credential(known)))

    async def ask(key: AppKey, address: str) -> None:
        async with gateway.served(format_token(key), address):
            """The request is answered."""

    await ask(known, "10.0.0.2")
    tasks = [asyncio.create_task(ask(each, "10.0.0.2")) for each in (wrong, waits)]
    await asyncio.wait_for(ask(other, "10.0.0.3"), LIMIT_SECONDS)
    await asyncio.wait_for(ask(known, "10.0.0.2"), LIMIT_SECONDS)
    assert not any(task.done() for task in tasks)
    with pytest.raises(QueueFull):
        await ask(another, "10.0.0.2")
    await cancel_all(tasks[:1])
    await asyncio.wait_for(tasks[1], LIMIT_SECONDS)
