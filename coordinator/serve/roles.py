"""The two roles of a coordinator process, one after the other: it leads (`service`) or stands by (`standby`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from coordinator.deploy.distribution import PushProgress
from coordinator.serve.clients.client_port import client_port
from coordinator.serve.clients.trust import Trust
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.service import Service
from coordinator.serve.standby.leadership import AnotherLeads
from coordinator.serve.standby.standby import Standby
from coordinator.serve.state import Goal, StateFile, keep_retrying, locked_state, note_address
from hearth.plan.plan import Plan
from hearth.platform.asyncio_tools import cancel_all, supervised
from hearth.platform.disk import FILE_SECONDS, on_disk
from hearth.platform.security import HomeKey


async def run_coordinator(
    settings: CoordinatorSettings,
    home: HomeKey,
    report: Callable[[str], None],
    progress: PushProgress,
    goal: Goal | None,
    plan: Plan | None = None,
    name: str = "",
) -> None:
    """Lead, or stand by with the setting `standby`, until stopped. Raises PortInUse, BadSetting, and as `Service.run` does.

    A standby that takes over leads, and a leader whose devices work for another coordinator becomes its standby.
    """
    stands_by, leading = settings.standby, settings
    folder = settings.state_dir
    async with AsyncExitStack() as stack:
        await on_disk(folder, FILE_SECONDS, stack.enter_context, locked_state(folder))
        trust = await on_disk(folder, FILE_SECONDS, Trust, settings, home)
        state = await on_disk(folder, FILE_SECONDS, StateFile, folder)
        keeping = keep_retrying([state.file, trust.apps.file, trust.devices.file])
        stack.push_async_callback(cancel_all, [supervised(keeping, "the care of the state's files")])
        port = await stack.enter_async_context(client_port(settings, trust))
        await on_disk(folder, FILE_SECONDS, note_address, settings, port.port)
        while True:
            if stands_by:
                standby = Standby(settings, home, report, trust, state, port, settings.leader_addresses)
                if (taking_over := await standby.run()) is None:
                    return
                goal, plan, name, leading = None, None, "", taking_over  # it serves what the leader served
            service = Service(leading, home, report, progress, trust, state, port)
            try:
                await service.run(goal, plan, name)
                return
            except AnotherLeads:
                if service.is_stopping:
                    return
                report("another coordinator of this home leads; this one is its standby from now on")
                stands_by = True
