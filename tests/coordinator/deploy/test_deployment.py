"""Deployments on a fake fleet."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fleets import TransformerFleet
from support.plans import BERT_LARGE, make_plan, on_devices

from coordinator.deploy.deployment import Deployment
from coordinator.deploy.transformer import TransformerDeployment
from coordinator.devices import registry
from hearth.errors import ConnectionLost, DeviceLost, StepFailed
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import Link
from hearth.platform.asyncio_tools import loop_time
from hearth.wire.messages import Abort, Load, Message, Run, ShardParts, Unload
from hearth.wire.rpc import Reply


async def unloaded_by_close(fleet: TransformerFleet) -> list[str]:
    """The devices on which a deployment on a and b unloads its workers when it closes."""
    await Deployment(fleet, plan_for("ab")).close()
    return [device for device, message in fleet.asked if isinstance(message, Unload)]


async def test_close_skips_devices_that_this_coordinator_has_never_met() -> None:
    assert await unloaded_by_close(TransformerFleet("a")) == ["a"]


async def test_close_stops_a_worker_whose_agent_answers_over_a_new_connection() -> None:
    class Reconnects(TransformerFleet):
        async def answers_again(self, device_id: str) -> bool:
            if device_id in self.devices and self.devices[device_id].health != "dead":
                self.devices[device_id] = replace(self.devices[device_id], disconnected_at=None)
                return True
            return False

    fleet = Reconnects("ab")
    fleet.devices["a"] = registry.after_connection_lost(fleet.devices["a"], loop_time())
    fleet.kill("b")
    assert await unloaded_by_close(fleet) == ["a"]


async def test_a_cancelled_step_leaves_no_abort_running() -> None:
    class SlowToAbort(TransformerFleet):
        async def call(self, device_id: str, message: Message, *arguments: Any, **options: Any) -> Reply:
            if isinstance(message, Abort):
                aborting.set()
                await asyncio.sleep(60)
            return await super().call(device_id, message, *arguments, **options)

    aborting = asyncio.Event()

    async def fail() -> None:
        raise StepFailed(device="a", reason="a tile is missing")

    deployment = Deployment(SlowToAbort("a"), plan_for("a"))
    abort = Abort(**deployment.command_fields, reason="")
    step = asyncio.create_task(deployment.gather_or_abort([fail()], abort))
    await asyncio.wait_for(aborting.wait(), 20)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("error", "device", "peer"),
    [
        (StepFailed(device="this device", reason="out of memory"), "b", ""),
        (StepFailed(device="rank 1", reason="a tile did not arrive", peer="rank 0"), "b", "a"),
        (StepFailed(device="rank 0", reason="as its peer said"), "a", ""),
    ],
)
async def test_errors_of_ranks_name_their_devices(error: StepFailed, device: str, peer: str) -> None:
    async def call(rank: int) -> None:
        if rank == 1:
            raise error

    with pytest.raises(StepFailed) as raised:
        await Deployment(TransformerFleet("ab"), plan_for("ab")).gather_or_abort(map(call, range(2)))
    assert (raised.value.device_name, raised.value.details()["peer"]) == (device, peer)


@pytest.mark.parametrize(
    ("ports", "sent"),
    [(((5, 9), (5, 9)), ((5, 9),)), (((7, 9), (1, 5)), ((1, 5), (7, 9))), (((1, 5), (0, 0)), ())],
)
async def test_workers_learn_the_data_ports_of_their_plan_unless_one_may_be_any(
    ports: tuple[tuple[int, int], ...], sent: tuple[tuple[int, int], ...]
) -> None:
    fleet = TransformerFleet("ab")
    for name, each in zip("ab", ports, strict=True):
        device = fleet.devices[name]
        fleet.devices[name] = replace(device, welcome=device.welcome.model_copy(update={"data_ports": each}))
    deployment = Deployment(fleet, plan_for("ab"))
    deployment.parts = (ShardParts(chunks=()), ShardParts(chunks=()))
    links = {
        (source, target): Link(source=source, target=target, bytes_per_second=1e9, round_trip_seconds=1e-4)
        for source, target in ("ab", "ba")
    }
    await deployment.load(links, encrypt=True)
    assert [message.data_ports for _, message in fleet.asked if isinstance(message, Load)] == [sent] * 2


@pytest.mark.parametrize("num_resets", [1, 3])
async def test_step_runs_again_if_only_the_connection_to_a_device_broke(num_resets: int) -> None:
    """The third time in a row the plan is lost."""

    class Resetting(TransformerFleet):
        num_broken = 0

        async def call(self, device_id: str, message: Message, *arguments: Any, **options: Any) -> Reply:
            if isinstance(message, Run) and device_id == "b" and self.num_broken < num_resets:
                self.num_broken += 1
                raise DeviceLost(device="b", reason="the connection broke")
            return await super().call(device_id, message, *arguments, **options)

        async def answers_again(self, device_id: str) -> bool:
            return device_id == "b"

    plan, fleet = plan_for("ab"), Resetting("ab")
    for rank, name in enumerate("ab"):
        fleet.loads[name] = Load.model_construct(plan=plan, rank=rank)
    deployment = TransformerDeployment(fleet, plan)
    lengths = np.array([0, 8], np.int32)
    step = deployment.run_step(np.ones(8, np.int32), lengths, "hidden")
    if num_resets < 3:
        assert (await step).outputs.shape == (8, plan.model.hidden_size)
    else:
        with pytest.raises(ConnectionLost):
            await step
    assert deployment.failure is None


def plan_for(names: str) -> TransformerPlan:
    return on_devices(make_plan(BERT_LARGE, "hmp", [1.0] * len(names)), names)
