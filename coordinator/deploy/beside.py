"""A second plan of a deployment, loaded for measurements while the deployed one goes on serving."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from coordinator.deploy.deployment import Deployment, Weights
from coordinator.devices.fleet import Fleet
from hearth.plan.plan import Plan
from hearth.plan.profile import Link

TRIAL_SUFFIX = ".trial"  # of the deployment's name: agents keep one worker for each name

D = TypeVar("D", bound=Deployment)


def trial_name(deployment: str) -> str:
    """The name of a deployment under which its second plan is loaded."""
    return f"{deployment}{TRIAL_SUFFIX}"


@asynccontextmanager
async def loaded_beside(
    fleet: Fleet,
    plan: Plan,
    make: Callable[[Plan], D],
    weights: Callable[[Plan], AbstractAsyncContextManager[Weights]],
    links: Mapping[tuple[str, str], Link],
    encrypt: bool,
) -> AsyncIterator[D]:
    """The loaded deployment of `plan`, which `make` creates under its `trial_name`; its workers end with the block.

    Raises as `Deployment.push` and `load` do.
    """
    fleet.last_epoch += 1  # agents refuse an epoch that the trial before had
    trial = make(plan.with_epoch(fleet.last_epoch))
    try:
        await trial.push(weights(trial.plan), lambda device, received_bytes, needed_bytes: None)
        fleet.running_epochs[trial.name] = trial.epoch
        await trial.load(links, encrypt)
        yield trial
    finally:
        fleet.running_epochs.pop(trial.name, None)  # an agent that is away stops it when it grants its lease again
        await trial.close()
