"""Acts on workers that wait unusually long for another rank: its device is lost, or the link between the two.

A device of which others say that it is late is asked at once, and must answer sooner than to a heartbeat. If it does, the link
is checked in both directions: TCP alone notices a cut one only after minutes, and the step's timeout ends it after 5 s. The
link counts as lost only if both devices answer this coordinator at once while they cannot connect to each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from coordinator.deploy.deployment import Deployment
from coordinator.devices.fleet import LATE_SECONDS, Fleet
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device, connect_seconds
from hearth.errors import HearthError, LinkLost
from hearth.platform.asyncio_tools import cancel_all, loop_time

_AGAIN_SECONDS = 1.0  # least time between the starts of two checks, while the worker still waits


class LateLinks:
    """What the workers of one deployed model say about each other. `on_link_lost(deployment, error)`: two cannot connect."""

    def __init__(
        self, fleet: Fleet, profiler: Profiler, on_link_lost: Callable[[Deployment, HearthError], None]
    ) -> None:
        self._fleet = fleet
        self._profiler = profiler
        self._on_link_lost = on_link_lost
        self._checks: dict[tuple[str, str], asyncio.Task[None]] = {}  # keyed by the waiting device and the late one

    def device_changed(self, device: Device, deployment: Deployment) -> None:
        """A device of the fleet has another state: check what it waits for, unless that is being checked."""
        late = _late_device(device, deployment)
        if late is not None and (pair := (device.device_id, late)) not in self._checks:
            check = self._checks[pair] = asyncio.create_task(self._check(deployment, *pair))
            check.add_done_callback(lambda _: self._checks.pop(pair, None))

    async def close(self) -> None:
        await cancel_all(self._checks.values())

    async def _check(self, deployment: Deployment, waiting: str, late: str) -> None:
        while deployment.failure is None and self._waits_for(deployment, waiting, late):
            began = loop_time()
            if await self._fleet.is_lost(late, partial(self._num_witnesses, deployment, late)):
                return
            is_cut = await self._is_cut(waiting, late)
            if is_cut and any(self._fleet.devices[each].is_on_radio for each in (waiting, late)):
                is_cut = await self._is_cut(waiting, late)  # a stall may have ended just between the two questions
            if is_cut and deployment.failure is None and self._waits_for(deployment, waiting, late):
                self._profiler.link_is_cut(waiting, late)
                names = [self._fleet.devices[each].name for each in (waiting, late)]
                reason = "a step waits for it, and they cannot connect"
                self._on_link_lost(deployment, LinkLost(device=names[0], peer=names[1], reason=reason))
                return
            await asyncio.sleep(began + _AGAIN_SECONDS - loop_time())

    async def _is_cut(self, waiting: str, late: str) -> bool:
        """Whether two devices cannot connect to each other, although both answer this coordinator at once."""
        return not await self._can_connect(waiting, late) and await self._fleet.answer_at_once((waiting, late))

    async def _can_connect(self, waiting: str, late: str) -> bool:
        """Whether one of two devices reaches the other in time. A packet that is lost delays one attempt by a second."""
        began = loop_time()
        one, other = self._fleet.devices[waiting], self._fleet.devices[late]
        seconds = connect_seconds(one, other, began)
        attempts = [asyncio.ensure_future(self._profiler.can_connect(*pair)) for pair in ((one, other), (other, one))]
        try:
            for attempt in asyncio.as_completed(attempts, timeout=seconds):
                if await attempt:
                    return True
            return False
        except asyncio.TimeoutError:
            return loop_time() - began - seconds > LATE_SECONDS  # if so: unknown
        finally:
            await cancel_all(attempts)

    def _num_witnesses(self, deployment: Deployment, late: str) -> int:
        """How many devices wait for this one, or for another device that waits for it."""
        ids = [device.device_id for device in deployment.plan.devices if device.device_id != late]
        witnesses, found = {late}, {late}
        while found:
            found = {
                each for each in ids if any(self._waits_for(deployment, each, other) for other in found)
            } - witnesses
            witnesses |= found
        return len(witnesses) - 1

    def _waits_for(self, deployment: Deployment, waiting: str, late: str) -> bool:
        device = self._fleet.devices.get(waiting)
        return device is not None and _late_device(device, deployment) == late


def _late_device(device: Device, deployment: Deployment) -> str | None:
    """The id of the device that the worker of a deployment waits for unusually long."""
    worker, plan = device.worker(deployment.name), deployment.plan
    if worker is None or worker.late_rank is None or worker.epoch != plan.epoch or worker.late_rank >= plan.num_ranks:
        return None
    late = plan.devices[worker.late_rank].device_id
    return late if late != device.device_id else None
