"""Deployments on a fake fleet."""

from __future__ import annotations

import asyncio

from support.fleets import TransformerFleet
from support.plans import BERT_LARGE, make_plan

from coordinator.deploy.deployment import Deployment
from hearth.wire.messages import Unload


def test_close_skips_devices_that_this_coordinator_has_never_met() -> None:
    async def close() -> list[str]:
        plan = make_plan(BERT_LARGE, "hmp", [1.0, 1.0])
        fleet = TransformerFleet("a")
        met = plan.devices[0].model_copy(update={"device_id": "a"})
        deployment = Deployment(fleet, plan.model_copy(update={"devices": (met, plan.devices[1])}))
        await deployment.close()
        return [device for device, message in fleet.asked if isinstance(message, Unload)]

    assert asyncio.run(close()) == ["a"]
