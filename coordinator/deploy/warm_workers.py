"""Has agents start the processes from which they fork workers, so that loading a plan waits for no import."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from coordinator.devices.fleet import Fleet
from coordinator.devices.registry import Device
from hearth.errors import HearthError
from hearth.wire.messages import ChunksMissing, FindMissing, WorkerLibrary

log = logging.getLogger(__name__)

_PREPARE_SECONDS = 3.0  # timeout of the request, which an agent answers at once


def one_of_each_machine(devices: Sequence[Device]) -> list[Device]:
    """The first device of each machine, to start such a process before there is a plan.

    More of them on one machine would take its cores from the one that the plan uses.
    """
    return list({device.host_id: device for device in reversed(devices)}.values())


async def warm_workers(fleet: Fleet, device_ids: Iterable[str], library: WorkerLibrary) -> None:
    """Ask these devices to start it, unless it runs. A device that does not answer starts its worker from scratch."""

    async def ask(device_id: str) -> None:
        request = FindMissing(holder=fleet.holder, hashes=(), prepare_worker=library)
        try:
            await fleet.ask(device_id, request, ChunksMissing, timeout_seconds=_PREPARE_SECONDS)
        except HearthError as error:
            log.info("no worker process was prepared: %s", error.explanation())

    await asyncio.gather(*map(ask, device_ids))
