"""`hearth devices`: the devices of this home, read directly from their agents. Needs no coordinator and takes no lease.

If a coordinator runs and is found over mDNS, it says which devices it leaves out of plans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from coordinator.cli.options import AsJsonOption, DevicesOption, InterfacesOption, KeyPathOption, interface_list
from coordinator.cli.output import out, print_json, report
from coordinator.cli.render.tables import device_table, kernel_table, link_table
from coordinator.devices.block_profiling import kept_kernel_tables
from coordinator.devices.fleet import Fleet
from coordinator.devices.profiling import Profiler
from coordinator.serve.clients.key_registry import device_keys
from coordinator.serve.config import device_registry_dir, load_coordinator_settings
from hearth.client.home import connect_async
from hearth.errors import HearthError, NoDevices, NotAuthorised
from hearth.plan.profile import Link
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.security import Credential, HomeKey, agent_access, resolve_credential
from hearth.wire.messages import DeviceInfo

# For the coordinator to be found and to answer, while the agents are searched for anyway.
_COORDINATOR_SECONDS = 1.5


async def _left_out_of_plans(
    credential: Credential, interfaces: Sequence[str] | None, seconds: float
) -> dict[str, str]:
    """Why and for how long a running coordinator leaves devices out of plans, by id; empty if none is found in time."""
    try:
        async with await connect_async(None, credential, seconds, interfaces) as home:
            listed = await home.devices(seconds)
    except HearthError:
        return {}
    return {device.device_id: device.reason for device in listed.devices if device.state == "alive" and device.reason}


def _show_kernels(as_json: bool) -> None:
    """The kernels of all classes of devices that a coordinator of this computer, or `hearth plan`, has profiled."""
    tables = kept_kernel_tables(load_coordinator_settings({}).state_dir / "profiles")
    if as_json:
        print_json({"kernels": [table.as_json() for table in tables]})
        return
    for table in tables:
        out.print(kernel_table(table), "")
    if not tables:
        out.print("no kernels are known here yet: `hearth plan MODEL --weights int4` measures them, for example")


def devices(
    measure: Annotated[bool, typer.Option("--measure", help="Also measure the links (needs the home key).")] = False,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Instead, show the times of the kernels in the profiles on this computer, and which are chosen.",
        ),
    ] = False,
    wait: Annotated[
        float, typer.Option(help="Stop the search after this many seconds without a new device.", min=0.1)
    ] = 1.5,
    static: DevicesOption = None,
    mdns_interfaces: InterfacesOption = None,
    key: KeyPathOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Show the devices of this home: processor, memory, temperature, GPU, and with --measure the links between them."""
    if kernels:
        _show_kernels(as_json)
        return
    credential = resolve_credential(key)
    if measure and not isinstance(credential, HomeKey):
        raise NotAuthorised(role=credential.kind, action="measure links")

    async def discover() -> tuple[list[DeviceInfo], list[Link], list[HearthError]]:
        limit = max(wait * 4, 5.0)
        access, interfaces = agent_access(credential), interface_list(mdns_interfaces)
        state_dir = load_coordinator_settings({}).state_dir
        own_keys = device_keys(device_registry_dir(state_dir))
        left_out = asyncio.create_task(_left_out_of_plans(credential, interfaces, max(wait, _COORDINATOR_SECONDS)))
        try:
            async with Fleet(
                access, None, interfaces=interfaces, static_devices=static or "", device_keys=own_keys
            ) as fleet:
                settled = await fleet.settle(wait, 1, limit)
                if not settled and not fleet.refusals:
                    raise NoDevices(seconds=limit)
                profiler = Profiler(fleet, state_dir / "profiles", report, keeps_links=False)
                links = await profiler.measure_links(settled) if measure else {}
                reasons = await left_out
                known = [(each, each.reason or reasons.get(each.device_id, "")) for each in fleet.device_infos()]
                infos = [each.model_copy(update={"reason": reason}) for each, reason in known]
                return infos, list(links.values()), fleet.refusals
        finally:
            await cancel_all([left_out])

    devices_found, links, refusals = asyncio.run(discover())
    if as_json:
        print_json(
            {
                "devices": [device.model_dump() for device in devices_found],
                "links": [link.model_dump() for link in links],
                "refused": [str(error) for error in refusals],
            }
        )
        return
    for error in refusals:
        report(f"[yellow]warning:[/] {error}")
    out.print(device_table(devices_found))
    if links:
        out.print(link_table(links, {device.device_id: device.name for device in devices_found}))
