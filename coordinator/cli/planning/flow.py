"""The steps of `hearth plan`, the same for every kind of model: profile, plan, save, show. The kinds fill them in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from coordinator.cli.output import out, print_json, write_file
from coordinator.cli.planning.live import Live, Reach, check_names, reached
from coordinator.cli.render.picture import Drawing, check_picture, save_picture
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.serve.config import load_settings
from coordinator.serve.goal import allowed
from coordinator.serve.state import Goal
from hearth.errors import BadSetting
from hearth.plan.plan import Plan
from hearth.plan.profile import ClusterProfile
from hearth.trace import chrome_trace
from hearth.wire.messages import DeviceTrace

C = TypeVar("C", ClusterProfile, GraphCluster)


@dataclass(frozen=True)
class Source:
    """Where the profile of the devices comes from: a file, or the devices of this home."""

    reach: Reach
    profile: Path | None = None  # that --save-profile wrote
    cluster: Path | None = None  # devices described by hand


@dataclass(frozen=True)
class Output:
    """What to show of a plan, and files to write (None: not this one)."""

    explain: bool
    as_json: bool
    plan: Path | None
    timeline: Path | None
    picture: Path | None
    profile: Path | None


class Planned(Protocol):
    """A plan, with what its planner knows of it."""

    @property
    def plan(self) -> Plan: ...

    def timeline(self) -> Sequence[DeviceTrace]:
        """The simulated step or request."""

    def drawing(self) -> Drawing | None:
        """The model coloured by device, None for a kind that has no picture."""

    def as_json(self, explain: bool) -> dict[str, Any]: ...

    def show(self, explain: bool) -> None:
        """Print it for people."""


class Planning(Protocol[C]):
    """One model, opened, and how its kind is planned."""

    @property
    def goal(self) -> Goal: ...

    def read(self, source: Source) -> C | None:
        """The profile in a file; None where live devices are to be measured. Raises BadSetting."""

    async def measure(self, live: Live) -> C:
        """The profile of live devices. Raises NoDevices, ..."""

    def saved(self, cluster: C) -> BaseModel:
        """A profile as a file."""

    async def plan(self, cluster: C) -> Planned:
        """Under the user's limits. Raises ModelDoesNotFit, ..."""


async def plan_model(planning: Planning[C], source: Source, output: Output) -> None:
    """Raises HearthError."""
    if output.picture is not None:
        check_picture(output.picture)
    cluster = await _profile(planning, source)
    if output.profile is not None:
        write_file("--save-profile", output.profile, planning.saved(cluster).model_dump_json(indent=1))
    planned = await planning.plan(cluster)
    if output.plan is not None:
        write_file("--save", output.plan, planned.plan.model_dump_json(indent=1))
    if output.timeline is not None:
        write_file("--timeline", output.timeline, json.dumps(chrome_trace(planned.timeline())))
    drawing = planned.drawing() if output.picture is not None else None
    if output.picture is not None and drawing is not None:
        save_picture(output.picture, drawing)
    if output.as_json:
        print_json(planned.as_json(output.explain))
        return
    planned.show(output.explain)
    if drawing is not None:
        out.print(f"drew {output.picture}")


async def _profile(planning: Planning[C], source: Source) -> C:
    """All devices that the user allows."""
    cluster = planning.read(source)
    if cluster is None:
        async with reached(planning.goal, source.reach, load_settings({})) as live:
            return await planning.measure(live)
    check_names(planning.goal, cluster.devices)
    left = tuple(device.device_id for device in allowed(planning.goal, cluster.devices))
    if not left:
        raise BadSetting(setting="--exclude", reason="no device is left")
    return cluster.subset(left)
