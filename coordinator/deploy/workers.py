"""The workers of one plan: started, connected, given up and stopped. What they run is up to who derives from this."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from coordinator.devices.fleet import Fleet
from hearth.errors import DeviceLost, HearthError, StepFailed, WorkerDied
from hearth.plan.profile import Link
from hearth.platform.asyncio_tools import all_or_first_error
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire.messages import Abort, ConnectPeers, Done, Message, Peer, Unload, WireStats, WorkerBound

_LOAD_SECONDS = 320.0  # a little more than the agent's own limit, so that its error comes first
_ABORT_GRACE_SECONDS = 0.5


class Member(Protocol):
    """A device of a plan."""

    @property
    def device_id(self) -> str: ...

    @property
    def name(self) -> str: ...


class Workers:
    """One worker on each of `devices`, by rank. `fail` may be called from outside, when a device is lost."""

    def __init__(
        self, fleet: Fleet, devices: Sequence[Member], epoch: int, deployment: str = DEFAULT_DEPLOYMENT
    ) -> None:
        self.deployment = deployment
        self.devices = devices
        self.epoch = epoch
        self.sent_bytes = self.passed_bytes = 0  # weights that the coordinator sent, and that devices passed on
        self.wire = WireStats()
        self.dropped_messages = 0
        self._fleet = fleet
        self._failed: asyncio.Future[HearthError] = asyncio.get_running_loop().create_future()

    @property
    def command(self) -> dict[str, Any]:
        """The fields of every `PlanCommand` to these workers."""
        return {"holder": self._fleet.holder, "deployment": self.deployment, "epoch": self.epoch}

    @property
    def failure(self) -> HearthError | None:
        return self._failed.result() if self._failed.done() else None

    def fail(self, error: HearthError) -> None:
        """A device or worker of this plan is gone: what runs, if anything, ends with `error`."""
        if not self._failed.done():
            self._failed.set_result(error)

    async def start_workers(
        self, load: Callable[[int, bytes], Message], links: Mapping[tuple[str, str], Link]
    ) -> list[WorkerBound]:
        """Start them with `load(rank, plan token)`, and connect them when all are bound."""
        token, devices = secrets.token_bytes(16), self.devices
        bound: list[WorkerBound] = await self._on_all(
            lambda rank: self._fleet.ask(
                devices[rank].device_id, load(rank, token), WorkerBound, timeout_seconds=_LOAD_SECONDS
            )
        )

        def connect(rank: int) -> Awaitable[Done]:
            peers = tuple(
                Peer(
                    rank=other,
                    host=self._fleet.devices[devices[other].device_id].host,
                    port=bound[other].port,
                    public_key=bound[other].public_key,
                    bytes_per_second=links[devices[rank].device_id, devices[other].device_id].bytes_per_second,
                )
                for other in range(len(devices))
                if other != rank
            )
            request = ConnectPeers(**self.command, peers=peers)
            return self._fleet.ask(devices[rank].device_id, request, Done, timeout_seconds=35.0)

        await self._on_all(connect)
        return bound

    async def close(self) -> None:
        """Stop the workers, so that the next plan finds their memory free."""
        self.fail(StepFailed(device="the coordinator", reason="the plan was taken down"))
        request = Unload(**self.command)
        calls = (
            self._fleet.call(device.device_id, request, timeout_seconds=5.0)
            for device in self.devices
            if self._fleet.devices[device.device_id].health == "alive"
        )
        await asyncio.gather(*calls, return_exceptions=True)

    async def give_up(self, tasks: Sequence[asyncio.Future[Any]]) -> HearthError:
        """End everywhere what these tasks wait for, and find the error at the bottom of it."""
        reason = str(self.failure or errors_of(tasks)[0])[:1000]
        request = Abort(**self.command, reason=reason)
        aborts = [
            asyncio.ensure_future(self._fleet.call(device.device_id, request, timeout_seconds=_ABORT_GRACE_SECONDS))
            for device in self.devices
        ]
        await asyncio.wait([*tasks, *aborts], timeout=_ABORT_GRACE_SECONDS)
        for task in (*tasks, *aborts):
            task.cancel()
        await asyncio.gather(*tasks, *aborts, return_exceptions=True)
        found = [*([self.failure] if self.failure else []), *errors_of(tasks), *errors_of(aborts)]
        return min(found, key=lambda error: not isinstance(error, WorkerDied | DeviceLost))

    async def _on_all(self, call: Callable[[int], Awaitable[Any]]) -> list[Any]:
        return await all_or_first_error(call(rank) for rank in range(len(self.devices)))


def errors_of(tasks: Sequence[asyncio.Future[Any]]) -> list[HearthError]:
    """Of those that failed. What is no HearthError is raised."""
    found = []
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, HearthError):
                raise error
            found.append(error)
    return found
