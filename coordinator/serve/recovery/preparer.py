"""Makes plans ahead while a deployment serves: for each of its devices, the plan of those that are left if it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from itertools import permutations
from typing import Any

from coordinator.deploy.deployment import Deployment, Weights
from coordinator.deploy.distribution import NoRoomAhead
from coordinator.devices.registry import Device
from coordinator.serve.goal import allowed_devices
from coordinator.serve.kinds.kind import ModelKind, SharedServices
from coordinator.serve.recovery.preparation import (
    NOTHING,
    Found,
    PreparedPlan,
    Refusal,
    Sending,
    Spares,
    why_unprepared,
)
from coordinator.serve.requests.admission import Admission
from coordinator.serve.requests.runner import as_hearth_error
from coordinator.serve.state import Goal
from hearth.errors import DeviceLost, HearthError, LeaseLost, WorkerDied
from hearth.plan.plan import Plan, is_transformer_plan
from hearth.platform.asyncio_tools import loop_time
from hearth.wire import messages as wire

log = logging.getLogger(__name__)

# From the start of serving until plans are made ahead: requests that waited for the deployment go first.
_REST_SECONDS = 1.0
_POLL_SECONDS = 1.0  # between looks at the devices: one that comes back is soon in the plans for the next loss
# Until a device whose loss could not be prepared for is tried again: its fault may have ended, but memory that is too small
# rarely grows, and each try is a plan.
_TRY_AGAIN_SECONDS = 60.0
# Of a device's free disk, for chunks that are sent ahead: what is left is for plans that are deployed, and other programs.
_AHEAD_DISK_SHARE = 0.25
# Before each chunk, one after the other, while requests wait: at most ten chunks of about 1 MB are sent in a second then.
_CHUNK_PAUSE_SECONDS = 0.1
# Between requests to read the chunks of these plans into memory: other programs displace them from the page cache, and what
# is still there is not read again.
_READ_AHEAD_EVERY_SECONDS = 600.0
_MAX_READ_AHEAD_CHUNKS = 50_000  # per device: the most that `FindMissing` takes
_READ_AHEAD_SECONDS = 30.0  # for the answer: an SD card reads 600 MB meanwhile. The agent reads on, and is asked again


class Preparer:
    """Prepares for the loss of each device while a deployment serves."""

    def __init__(self, kind: ModelKind[Any], services: SharedServices, admission: Admission[Any]) -> None:
        self.preparation = NOTHING
        self.spares: Spares | None = None  # None until the devices were asked
        self.sending: Sending | None = None
        self._deployed: PreparedPlan | None = None  # the deployed plan itself; None once it was found
        self._prepared_for: Plan | None = None  # the plan whose losses `preparation` is about
        self._kind = kind
        self._services = services
        self._admission = admission
        self._chunk_turn = asyncio.Lock()

    def take(self, devices: Sequence[Device], error: HearthError | None) -> Found:
        """The plan for these devices after `error`, if their links are known. It is found once, in case it does not work.

        If all devices of the lost plan are there, it is the same plan, unless it failed by itself.
        """
        usable = frozenset(device.device_id for device in devices)
        deployed, self._deployed = self._deployed, None
        if (
            deployed is not None
            and isinstance(error, WorkerDied | DeviceLost | LeaseLost)
            and deployed.device_ids <= usable
            and self._links_are_known(deployed)
        ):
            return Found(deployed, "the same plan is loaded again, since all its devices are there", is_same=True)
        preparation, self.preparation, self.spares = self.preparation, NOTHING, None
        planned, self._prepared_for = self._prepared_for, None
        if planned is None:
            return Found(None, "")
        prepared_for, found = preparation.for_devices(usable, self._services.profiler.cut_links())
        if found is not None and self._links_are_known(found):
            if prepared_for not in usable:
                return Found(found, "the plan that was made ahead for this loss is loaded")
            name = next(device.name for device in planned.devices if device.device_id == prepared_for)
            reason = f"the plan that was made ahead for the loss of {name} is loaded, since it does not use the link"
            return Found(found, reason, left_out=prepared_for)
        lost = [device for device in planned.devices if device.device_id not in usable]
        reason = "not all of its links have been measured" if found is not None else why_unprepared(preparation, lost)
        return Found(None, f"a plan is made now, because none that was made ahead can be used: {reason}")

    def _links_are_known(self, prepared: PreparedPlan) -> bool:
        """Whether all links of the plan have been measured, and none was found cut since."""
        known = self._services.profiler.links.keys() - self._services.profiler.cut_links()
        return known.issuperset(permutations(prepared.device_ids, 2))

    async def run(self, goal: Goal, deployment: Deployment) -> None:
        """Prepare, and again whenever other devices become usable. Ends only by cancellation."""
        plan = deployment.plan
        planned = [device.device_id for device in plan.devices]
        if self._prepared_for is None or self._prepared_for.with_epoch(plan.epoch) != plan:
            self.preparation, self.spares = NOTHING, None
        self._prepared_for = plan
        self._deployed = deployed = PreparedPlan(frozenset(planned), plan, deployment.parts)
        seen: frozenset[str] = frozenset()
        read_ahead_at = 0.0
        await asyncio.sleep(_REST_SECONDS)
        if not deployment.parts:
            await self._find_parts(deployment)
            self._deployed = deployed = PreparedPlan(frozenset(planned), plan, deployment.parts)
        while True:
            devices = allowed_devices(goal, self._services.fleet.usable())
            usable = frozenset(device.device_id for device in devices)
            if usable != seen:
                seen, self.preparation, self.spares = usable, self.preparation.without_refusals(), None
            if lost := self.preparation.to_prepare(planned, usable, loop_time()):
                await self._prepare(lost, devices, deployment)
                read_ahead_at = 0.0
            if loop_time() >= read_ahead_at and self.preparation.plans:
                await self._read_ahead(deployed)
                read_ahead_at = loop_time() + _READ_AHEAD_EVERY_SECONDS
            await asyncio.sleep(_POLL_SECONDS)

    async def _find_parts(self, deployment: Deployment) -> None:
        """Find the parts of the ranks of workers that were taken over, which an earlier coordinator has pushed."""
        try:
            deployment.parts = (await self._kind.weights(deployment.plan)).parts
        except Exception as error:  # all chunks then count as spare
            log.info("the chunks of the plan are not known: %s", as_hearth_error(error).explanation())

    async def _prepare(self, lost: Sequence[str], devices: Sequence[Device], deployment: Deployment) -> None:
        """Make the plan for the loss of each of these devices, then send the chunks of one plan after the other."""
        survivors = {each: [device for device in devices if device.device_id != each] for each in lost}
        clusters: dict[str, Any] = {}
        for each, others in survivors.items():
            if not others:
                self._refuse(each, "there is no other device")
                continue
            try:
                clusters[each] = await self._kind.profile(others, deployment.plan)
            except Exception as error:
                self._refuse(each, as_hearth_error(error).explanation())
        try:
            plans = await self._kind.plans_ahead(list(clusters.values()), deployment.plan)
        except Exception as error:
            for each in clusters:
                self._refuse(each, as_hearth_error(error).explanation())
            return
        room_bytes = self._room_for_chunks()
        for each, plan in zip(clusters, plans, strict=True):
            if isinstance(plan, HearthError):
                self._refuse(each, plan.explanation())
                continue
            ahead = self._kind.deployment(plan, deployment.name)
            self.sending = sending = Sending(each)
            try:
                received = partial(self._note_received, sending)
                await ahead.push(await self._weights_ahead(plan, sending), received, self._wait_for_queue, room_bytes)
            except NoRoomAhead as error:
                self._refuse(each, str(error))
                continue
            except Exception as error:
                self._refuse(each, as_hearth_error(error).explanation())
                continue
            finally:
                self.sending = None
            made_for = frozenset(device.device_id for device in survivors[each])
            prepared = PreparedPlan(made_for, plan, ahead.parts, sending.spare_bytes)
            self.preparation = self.preparation.prepared(each, prepared)

    async def _weights_ahead(self, plan: Plan, sending: Sending) -> Weights:
        """The weights of a plan that is made ahead; takes note of the bytes that it needs besides the deployed plan."""
        deployed = self._deployed.chunks if self._deployed is not None else {}
        weights = await self._kind.weights(plan)
        for device, chunks in zip(plan.devices, weights.chunks, strict=True):
            loaded = frozenset(deployed.get(device.device_id, ()))
            spare_bytes = sum({each.hash: each.num_bytes for each in chunks if each.hash not in loaded}.values())
            sending.spare_bytes[device.device_id] = sending.missing_bytes[device.name] = spare_bytes
        return weights

    def _note_received(self, sending: Sending, device: str, received_bytes: int, needed_bytes: int) -> None:
        """`PushProgress`, of chunks that are sent ahead."""
        sending.missing_bytes[device] = needed_bytes - received_bytes
        self._services.progress(device, received_bytes, needed_bytes)

    async def _read_ahead(self, deployed: PreparedPlan) -> None:
        """Have the devices read the chunks of plans made ahead into memory, and prepare to start a worker.

        After a loss, no worker waits for a slow disk or for its libraries, also on a device that has none so far.
        """
        fleet = self._services.fleet

        async def on_device(device: str, chunks: Sequence[str]) -> wire.ChunksMissing | None:
            request = wire.FindMissing(
                holder=fleet.holder,
                hashes=tuple(chunks[:_MAX_READ_AHEAD_CHUNKS]),
                read_ahead=True,
                prepare_worker="torch" if is_transformer_plan(deployed.plan) else "onnxruntime",
            )
            try:
                return await fleet.ask(device, request, wire.ChunksMissing, timeout_seconds=_READ_AHEAD_SECONDS)
            except HearthError as error:  # its chunks are read when they are needed
                log.info("no chunks were read ahead: %s", error.explanation())
                return None

        spares = self.preparation.spare_chunks(deployed)
        asked = await asyncio.gather(*(on_device(device, chunks) for device, chunks in spares.items()))
        found = [each for each in asked if each is not None]
        self.spares = Spares(sum(each.stored_bytes for each in found), sum(each.read_ahead_bytes for each in found))

    def _room_for_chunks(self) -> dict[str, int]:
        """Bytes of chunks that each device may get ahead now."""
        usable = self._services.fleet.usable()
        return {each.device_id: _bytes_ahead(each.telemetry) for each in usable if each.telemetry is not None}

    def _refuse(self, device: str, reason: str) -> None:
        self.preparation = self.preparation.refused(device, Refusal(reason, loop_time() + _TRY_AGAIN_SECONDS))

    async def _wait_for_queue(self) -> None:
        """Wait before a chunk while requests wait. Chunks take turns, so that this bounds their number per second."""
        async with self._chunk_turn:
            if self._admission.num_waiting:
                await asyncio.sleep(_CHUNK_PAUSE_SECONDS)


def _bytes_ahead(telemetry: wire.Telemetry) -> int:
    """Bytes of chunks that a device may get ahead."""
    share, room = int(_AHEAD_DISK_SHARE * telemetry.disk_free_bytes), telemetry.store_room_bytes
    return share if room is None else min(share, room)
