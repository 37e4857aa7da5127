"""Faults under requests that never stop: a loss while a better plan is loaded, all devices but one lost, rotten chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_model
from support.controllers import ServedController, serving
from support.fleets import TransformerFleet

from coordinator.serve.replan.drift import MAX_PRESENCE_SECONDS, REPLAN_SECONDS
from coordinator.serve.state import TransformerGoal
from hearth.errors import ChunkCorrupt, WorkerDied
from hearth.wire.messages import ConnectPeers, FindMissing, Load, Message, PutChunk, Run
from hearth.wire.rpc import Reply


@asynccontextmanager
async def serving_under_load(folder: Path, fleet: TransformerFleet) -> AsyncIterator[ServedController]:
    """A home with three clients, none of whose requests may fail."""
    goal = TransformerGoal(model_dir=str(write_model(folder / "model")), strategy="hmp")
    async with serving(fleet, folder / "state", goal) as home:
        ended = False

        async def ask() -> int:
            num_answers = 0
            while not ended:
                assert (await home.hidden_states(16, 60.0)).shape == (16, 24)
                num_answers += 1
                await asyncio.sleep(0.001)
            return num_answers

        clients = [asyncio.create_task(ask()) for _ in range(3)]
        try:
            yield home
            ended = True
            assert min(await asyncio.wait_for(asyncio.gather(*clients), 60)) > 0
            assert home.controller.requests.num_failed == 0
        finally:
            for client in clients:
                client.cancel()


async def until_used(home: ServedController, names: str) -> None:
    """Let time pass until the plan has these devices."""
    while home.names() != names:
        home.now += REPLAN_SECONDS + MAX_PRESENCE_SECONDS
        await home.wait_for_replanner()
    await home.until(lambda: home.ready)


@pytest.mark.parametrize("during", [Load, ConnectPeers, Run], ids=lambda message: message.__name__)
@pytest.mark.parametrize("lost", ["b", "c"], ids=["device of both plans", "device of the new plan"])
async def test_loss_while_a_better_plan_is_loaded_fails_no_request(
    during: type[Message], lost: str, tmp_path: Path
) -> None:
    async with serving_under_load(tmp_path, TransformerFleet("ab")) as home:
        working, begun = home.fleet.call, False

        async def call(device_id: str, message: Message, *arguments: Any, **options: Any) -> Reply:
            nonlocal begun
            if isinstance(message, during) and device_id == lost and home.controller.lifecycle.phase != "serving":
                begun = True
                home.kill(lost)
            return await working(device_id, message, *arguments, **options)

        home.fleet.call = call  # type: ignore[method-assign]
        home.fleet.add("c")
        home.now += REPLAN_SECONDS
        await home.wait_for_replanner()
        home.now += REPLAN_SECONDS + MAX_PRESENCE_SECONDS
        await home.until(lambda: begun and home.ready and home.names() == "abc".replace(lost, ""))
        assert "failed" not in home.phases()


async def test_home_serves_on_its_last_device_and_takes_all_others_back(tmp_path: Path) -> None:
    async with serving_under_load(tmp_path, TransformerFleet("abc")) as home:
        there = dict(home.fleet.devices)
        for lost, left in (("c", "ab"), ("a", "b")):
            home.kill(lost)
            await home.until(lambda left=left: home.ready and home.names() == left)
        served = home.controller.requests.num_served
        await home.until(lambda: home.controller.requests.num_served > served)
        home.fleet.devices.update(there)
        await until_used(home, "abc")


class RottingFleet(TransformerFleet):
    """Agents that notice damaged chunks as the real ones do: when they load them, or are asked to hash them."""

    def __init__(self, names: str) -> None:
        super().__init__(names)
        self.damaged: dict[str, set[str]] = {name: set() for name in names}

    async def call(self, device_id: str, message: Message, *arguments: Any, **options: Any) -> Reply:
        damaged = self.damaged[device_id]
        if isinstance(message, FindMissing) and message.verify:
            self.stored[device_id] -= damaged & set(message.hashes)
            damaged -= set(message.hashes)
        elif isinstance(message, Load) and (found := damaged & set(message.parts.hashes)):
            self.asked.append((device_id, message))
            raise ChunkCorrupt(chunk=f"{min(found)[:12]} and {len(found) - 1} more", where=f"the disk of {device_id}")
        return await super().call(device_id, message, *arguments, **options)


async def test_all_damaged_chunks_of_a_device_are_replaced_at_once(tmp_path: Path) -> None:
    fleet = RottingFleet("ab")
    async with serving_under_load(tmp_path, fleet) as home:
        rotten = set(fleet.loads["b"].parts.hashes)
        assert len(rotten) > 3
        fleet.damaged["b"] = set(rotten)
        already = len(fleet.asked)
        fleet.failures = [WorkerDied(device="b", reason="killed")]
        await home.until(lambda: fleet.failures == [] and not fleet.damaged["b"])
        await home.until(lambda: home.ready and home.names() == "ab")
        since = [message for device, message in fleet.asked[already:] if device == "b"]
        assert sum(isinstance(message, Load) for message in since) <= 2  # the second one succeeds
        assert rotten <= fleet.stored["b"]
        assert rotten & {message.hash for message in since if isinstance(message, PutChunk)}
