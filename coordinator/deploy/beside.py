"""A second plan of a deployment, loaded for measurements while the deployed one goes on serving."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from coordinator.deploy.deployment import Deployment, Weights
from coordinator.devices.fleet import Fleet
from coordinator.devices.registry import Device
from hearth.errors import HearthError
from hearth.plan.plan import Plan
from hearth.plan.profile import Link
from hearth.wire import messages as wire

log = logging.getLogger(__name__)

_SUFFIX = ".trial"  # of the deployment's name: agents keep one worker and one lease for each name

D = TypeVar("D", bound=Deployment)


def trial_name(deployment: str) -> str:
    """The name of a deployment under which its second plan is loaded."""
    return f"{deployment}{_SUFFIX}"


@asynccontextmanager
async def loaded_beside(
    fleet: Fleet,
    holder_name: str,
    plan: Plan,
    make: Callable[[Plan], D],
    weights: Callable[[Plan], AbstractAsyncContextManager[Weights]],
    links: Mapping[tuple[str, str], Link],
    encrypt: bool,
) -> AsyncIterator[D]:
    """The loaded deployment of `plan`, which `make` creates under its `trial_name`; its workers end with the block.

    Raises as `Deployment.push` and `load` do, and AgentBusy.
    """
    trial = make(plan)
    ids = [device.device_id for device in plan.devices]

    def lease(device_id: str) -> Awaitable[wire.LeaseGranted]:
        request = wire.AcquireLease(
            holder=fleet.holder, deployment=trial.name, holder_name=holder_name, seconds=fleet.lease_seconds
        )
        return fleet.ask(device_id, request, wire.LeaseGranted)

    try:
        granted = await asyncio.gather(*map(lease, ids))
        trial = make(plan.with_epoch(1 + max(each.last_epoch for each in granted)))
        await trial.push(weights(trial.plan), lambda device, received_bytes, needed_bytes: None)
        await trial.load(links, encrypt)
        yield trial
    finally:
        await trial.close()
        await _release(fleet, trial.name, ids)


async def end_leftovers(fleet: Fleet, deployment: str, devices: Iterable[Device]) -> None:
    """Stop the workers of second plans that a coordinator which ended suddenly has left, and whose lease this one renews."""
    name = trial_name(deployment)
    await _release(fleet, name, [device.device_id for device in devices if device.worker(name) is not None])


async def _release(fleet: Fleet, name: str, device_ids: Iterable[str]) -> None:
    """Stop the workers of this name and end their leases. A device that is away lets its own lease expire."""

    async def release(device_id: str) -> None:
        try:
            await fleet.ask(device_id, wire.ReleaseLease(holder=fleet.holder, deployment=name), wire.Done)
        except HearthError as error:
            log.info("the lease of %s on %s was not released: %s", name, device_id, error.explanation())

    await asyncio.gather(*map(release, device_ids))
