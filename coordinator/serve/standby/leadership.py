"""Keeps a coordinator with a standby within its quorum: it may compute only with the leases of a majority of the devices.

The rules are in `coordinator.devices.quorum`. A coordinator that never had a standby has no quorum, and stores nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from coordinator.devices import registry
from coordinator.devices.fleet import Fleet
from coordinator.devices.quorum import Quorum, lacking, others_may_lead
from coordinator.serve.state import StateFile
from hearth.errors import BadRequest, HearthError, LeaseLost
from hearth.platform.asyncio_tools import loop_time
from hearth.platform.machine import host_id
from hearth.protocol import STANDBY_LEASE_SECONDS
from hearth.wire import messages as wire

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05  # interval of the checks, which send nothing while nothing changes: short against a lease
_STORE_SECONDS = 1.0  # timeout of storing a configuration on one device; it is tried again
# How long most devices must work for another coordinator before this one becomes its standby: a coordinator that asks for
# leases without getting a majority returns them sooner.
_DEPOSED_SECONDS = 1.0


class AnotherLeads(Exception):
    """Most devices work for another coordinator of this home; this one becomes its standby."""


class Leadership:
    """The quorum of one run of a coordinator. `on_lost(error)` is called when it may compute no more."""

    def __init__(self, fleet: Fleet, state: StateFile, on_lost: Callable[[HearthError], None]) -> None:
        self.quorum = Quorum(secrets.token_hex(8), state.current.configuration)
        self._has_standby = False
        self._stalls: registry.Silences = ()  # of this process, which renews no lease meanwhile
        self._is_needed = asyncio.Event()  # there is a standby, or the devices remember one
        self._fleet = fleet
        self._state = state
        self._on_lost = on_lost
        self._host_id = host_id()
        fleet.may_compute = self.may_compute
        fleet.on_granted = self._granted

    def add_standby(self) -> None:
        """A standby follows: from now on this coordinator counts on a majority of the devices."""
        self._has_standby = True
        self._is_needed.set()

    @property
    def has_quorum(self) -> bool:
        """Whether this coordinator counts on a majority of the devices: it has a standby, or had one."""
        return self.quorum.current is not None

    @property
    def may_be_replaced(self) -> bool:
        """Whether another coordinator may lead: there is a standby, and this run has not had a majority of the devices yet."""
        return self.has_quorum and not self.quorum.leads

    def may_compute(self) -> bool:
        return self.quorum.may_compute(self._fleet.leased())

    async def run(self) -> None:
        """Keep the quorum until cancelled. Raises AnotherLeads."""
        might_compute, was_needed = True, False
        busy_since: float | None = None
        while True:
            if self.quorum.current is None:
                await self._is_needed.wait()
            elif was_needed:
                # As if the devices had been silent for as long as this process stalled. Heartbeats change those that there are.
                self._fleet.lease_seconds = registry.lease_after_silences(self._stalls, loop_time())
            else:
                was_needed = True
                self._fleet.lease_seconds = STANDBY_LEASE_SECONDS
                await asyncio.gather(*map(self._fleet.acquire_again, self._fleet.leased()))
            self._update_voters()
            await self._store()
            if might_compute and not self.may_compute():
                self._on_lost(LeaseLost(device="most devices of this home"))
            might_compute = self.may_compute()
            busy_since = (busy_since or loop_time()) if self._others_lead() else None
            if busy_since is not None and loop_time() - busy_since > _DEPOSED_SECONDS:
                raise AnotherLeads
            slept = loop_time()
            await asyncio.sleep(_POLL_SECONDS)
            now = loop_time()
            self._stalls = registry.add_silence(self._stalls, now, now - slept - _POLL_SECONDS)

    def _others_lead(self) -> bool:
        busy = {device_id for device_id, device in self._fleet.devices.items() if device.health == "busy"}
        current = self.quorum.current
        return current is not None and not self.may_compute() and others_may_lead(current, busy)

    def _granted(self, device_id: str, configuration: wire.Configuration | None) -> None:
        """Callback of the fleet: a device has granted its lease."""
        self._set(self.quorum.granted(device_id, configuration))

    def _update_voters(self) -> None:
        """Begin a term, or change the voters to the devices that are there.

        A device whose key was revoked stores no configuration any more, although its lease lasts for a while.
        """
        quorum, devices = self.quorum, self._fleet.devices
        refused = {device_id for device_id, device in devices.items() if device.health == "refused"}
        leased = self._fleet.leased() - refused
        if quorum.current is None:
            if self._has_standby:
                self._set(quorum.change(leased, self._tie_breaker(leased)))
        elif not quorum.leads:
            if quorum.current.leader != quorum.leader:
                self._set(quorum.take_over(leased) or quorum)
        else:
            dead = {device_id for device_id, device in devices.items() if device.health == "dead"}
            voters = leased | (set(quorum.current.voters) - dead - refused)
            self._set(quorum.change(voters, self._tie_breaker(voters)))

    def _tie_breaker(self, voters: set[str]) -> str:
        """The agent on this computer, else the present tie breaker, else the first voter."""
        here = [
            device_id for device_id in sorted(voters)
            if device_id in self._fleet.devices and self._fleet.devices[device_id].host_id == self._host_id
        ]  # fmt: skip
        present = self.quorum.current.tie_breaker if self.quorum.current is not None else ""
        return here[0] if here else present if present in voters else min(voters, default="")

    async def _store(self) -> None:
        """Store the configuration on the devices that lack it."""
        leased = dict.fromkeys(sorted(self._fleet.leased()))
        if (configuration := self.quorum.current) is None or not (devices := lacking(self.quorum, leased)):
            return
        await self._state.file.saved()  # a coordinator that starts again must not know less than its devices
        request = wire.StoreConfiguration(holder=self._fleet.holder, configuration=configuration)

        async def store(device_id: str) -> None:
            try:
                await self._fleet.ask(device_id, request, wire.Done, timeout_seconds=_STORE_SECONDS)
            except BadRequest:  # it has a later one, which it returns with its lease
                await self._fleet.acquire_again(device_id)
            except HearthError as error:
                log.info("the configuration of voters could not be stored: %s", error)
            else:
                self._set(self.quorum.stored(device_id, configuration.number))

        await asyncio.gather(*map(store, devices))

    def _set(self, quorum: Quorum) -> None:
        before, self.quorum = self.quorum, quorum
        if quorum.current != before.current:
            self._is_needed.set()
            self._state.save_configuration(quorum.current)
