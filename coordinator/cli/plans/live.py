"""Access of `hearth plan` to the live devices of this home."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from coordinator.cli.options import DevicesOption, InterfacesOption, KeyPathOption, interface_list
from coordinator.cli.output import report
from coordinator.devices.fleet import Fleet
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.plan.limits import NamedDevice, require_known
from coordinator.serve.clients.key_registry import device_keys
from coordinator.serve.config import CoordinatorSettings, device_registry_dir
from coordinator.serve.goal import allowed_devices
from coordinator.serve.state import Goal
from hearth.errors import BadSetting, NoDevices, NotAuthorised
from hearth.platform.security import HomeKey, agent_access, resolve_credential
from hearth.protocol import LEASE_SECONDS
from hearth.wire.messages import AcquireLease, LeaseGranted

_D = TypeVar("_D", bound=NamedDevice)


@dataclass(frozen=True)
class ConnectionOptions:
    """How to find the devices, and with which key."""

    wait: Annotated[
        float, typer.Option(help="Start planning after this many seconds without a new device.", min=0.1, metavar="S")
    ] = 1.5
    devices: DevicesOption = None
    mdns_interfaces: InterfacesOption = None
    key: KeyPathOption = None


@dataclass(frozen=True)
class LiveDevices:
    """Devices that answered, without the excluded ones."""

    fleet: Fleet
    profiler: Profiler
    devices: list[Device]


@asynccontextmanager
async def connect_devices(
    goal: Goal,
    connection: ConnectionOptions,
    settings: CoordinatorSettings,
    lease_name: str | None = None,
    on_change: Callable[[Device], None] | None = None,
) -> AsyncIterator[LiveDevices]:
    """Connect to the devices that `goal` allows; with `lease_name`, hold a lease on each until the context ends.

    Raises NoDevices, AgentBusy if another coordinator holds a wanted device, BadSetting for an unknown name.
    """
    credential = resolve_credential(connection.key)
    if not isinstance(credential, HomeKey):
        raise NotAuthorised(role=credential.kind, action="profile devices")
    limit = max(connection.wait * 4, 5.0)
    access, interfaces = agent_access(credential), interface_list(connection.mdns_interfaces)
    own_keys = device_keys(device_registry_dir(settings.state_dir))
    async with Fleet(
        access, lease_name, interfaces, connection.devices or "", on_change=on_change, device_keys=own_keys
    ) as fleet:
        await fleet.settle(connection.wait, 0, limit)
        if not fleet.devices:
            await fleet.settle(connection.wait, 1, limit)
        for device in allowed_devices(goal, fleet.devices.values()):
            if device.health == "busy":  # asking again raises AgentBusy with the holder, unless the device is free now
                request = AcquireLease(holder=fleet.holder, holder_name=lease_name or "", seconds=LEASE_SECONDS)
                await fleet.ask(device.device_id, request, LeaseGranted)
        if not fleet.usable():
            raise NoDevices(seconds=limit)
        chosen = select_devices(goal, fleet.usable(), fleet.devices.values())
        profiler = Profiler(fleet, settings.state_dir / "profiles", report)
        yield LiveDevices(fleet, profiler, chosen)


def select_devices(goal: Goal, devices: Collection[_D], known: Collection[NamedDevice]) -> list[_D]:
    """The devices that `goal` allows. Raises BadSetting if none is left, and for a name that no `known` device has."""
    require_known("--limit", [limit.device for limit in goal.limits], known)
    require_known("--exclude", goal.exclude, known)
    remaining = allowed_devices(goal, devices)
    if not remaining:
        raise BadSetting(setting="--exclude", reason="no device is left")
    return remaining
