"""The two roles of a coordinator process, one after the other: it leads (`service`) or stands by (`standby`)."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.deploy.distribution import PushProgress
from coordinator.serve.clients.client_port import client_port
from coordinator.serve.clients.trust import Trust
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.service import Service
from coordinator.serve.standby.leadership import AnotherLeads
from coordinator.serve.standby.standby import Standby
from coordinator.serve.state import Goal, locked_state, note_address
from hearth.plan.plan import Plan
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
    with locked_state(settings.state_dir):
        trust = Trust(settings, home)
        async with client_port(settings, trust) as port:
            note_address(settings, port.port)
            while True:
                if stands_by:
                    taking_over = await Standby(settings, home, report, trust, port, settings.leader_addresses).run()
                    if taking_over is None:
                        return
                    goal, plan, name, leading = None, None, "", taking_over  # it serves what the leader served
                service = Service(leading, home, report, progress, trust, port)
                try:
                    await service.run(goal, plan, name)
                    return
                except AnotherLeads:
                    if service.is_stopping:
                        return
                    report("another coordinator of this home leads; this one is its standby from now on")
                    stands_by = True
