"""Where a command's cluster profile comes from: the devices of this home, or a file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from coordinator.cli.options import interface_list
from coordinator.cli.output import err
from coordinator.devices.fleet import LEASE_SECONDS, Fleet
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.plan.limits import require_known
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.goal import Model, allowed
from coordinator.serve.state import Goal, TransformerGoal
from hearth.errors import BadSetting, NoDevices, NotAuthorised
from hearth.files import write_atomically
from hearth.plan.model_spec import ModelSpec
from hearth.plan.profile import ClusterProfile, DeviceProfile
from hearth.platform.security import HomeKey, agent_access, resolve_credential
from hearth.validation import first_error
from hearth.wire.messages import AcquireLease, LeaseGranted


@dataclass(frozen=True)
class Reach:
    """How a command reaches the devices."""

    key: Path | None
    devices: str  # host[:port],... where multicast is blocked
    interfaces: str | None
    wait_seconds: float  # without a new device, after which all are thought to be there


@dataclass(frozen=True)
class LiveCluster:
    """Devices that answered, and what was measured of them."""

    fleet: Fleet
    profiler: Profiler
    profile: ClusterProfile


@asynccontextmanager
async def live_cluster(
    goal: TransformerGoal,
    model: Model,
    reach: Reach,
    settings: CoordinatorSettings,
    lease_name: str | None = None,
    on_change: Callable[[Device], None] | None = None,
) -> AsyncIterator[LiveCluster]:
    """The home's devices less the excluded ones, profiled; with `lease_name`, held until the context ends.

    Raises NoDevices, AgentBusy when another coordinator holds one that is wanted, BadSetting for an unknown name.
    """
    async with reached(goal, reach, settings, lease_name, on_change) as (fleet, profiler, chosen):
        yield LiveCluster(fleet, profiler, await profiler.cluster(chosen, model.spec, model.seq_len))


@asynccontextmanager
async def reached(
    goal: Goal,
    reach: Reach,
    settings: CoordinatorSettings,
    lease_name: str | None = None,
    on_change: Callable[[Device], None] | None = None,
) -> AsyncIterator[tuple[Fleet, Profiler, list[Device]]]:
    """As `live_cluster`, with nothing profiled yet."""
    credential = resolve_credential(reach.key)
    if not isinstance(credential, HomeKey):
        raise NotAuthorised(role=credential.kind, action="profile devices")
    limit = max(reach.wait_seconds * 4, 5.0)
    async with Fleet(
        agent_access(credential),
        lease_name,
        interfaces=interface_list(reach.interfaces),
        static_devices=reach.devices,
        on_change=on_change,
    ) as fleet:
        await fleet.settle(reach.wait_seconds, 0, limit)
        if not fleet.devices:
            await fleet.settle(reach.wait_seconds, 1, limit)
        for device in allowed(goal, fleet.devices.values()):
            if device.health == "busy":  # asked once more, it says who holds it, unless it has become free
                request = AcquireLease(holder=fleet.holder, holder_name=lease_name or "", seconds=LEASE_SECONDS)
                await fleet.ask(device.device_id, request, LeaseGranted)
        if not fleet.usable():
            raise NoDevices(seconds=limit)
        check_names(goal, list(fleet.devices.values()))
        chosen = allowed(goal, fleet.usable())
        if not chosen:
            raise BadSetting(setting="--exclude", reason="no device is left")
        profiler = Profiler(fleet, settings.state_dir / "profiles", lambda line: err.print(line, soft_wrap=True))
        yield fleet, profiler, chosen


def check_names(goal: Goal, devices: list[Device] | list[DeviceProfile]) -> None:
    """Raise BadSetting for a limit or an exclusion of a device that is not there: it was probably mistyped."""
    require_known("--limit", [limit.device for limit in goal.limits], devices)
    require_known("--exclude", goal.exclude, devices)


class SavedProfile(ClusterProfile):
    """A profile as a file: also readable as a ClusterProfile. Latencies hold for layers of one shape only."""

    model: ModelSpec | None = None


def save_cluster(path: Path, cluster: ClusterProfile, model: Model) -> None:
    """Raises BadSetting."""
    saved = SavedProfile(devices=cluster.devices, links=cluster.links, model=model.spec)
    try:
        write_atomically(path, saved.model_dump_json(indent=1))
    except OSError as error:
        raise BadSetting(setting="--save-profile", reason=f"{path} cannot be written ({error.strerror})") from None


def _shape(spec: ModelSpec) -> tuple[object, ...]:
    layer = (spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.ffn_size)
    return (*layer, spec.causal, spec.gated, spec.weights)


def load_cluster(path: Path, goal: TransformerGoal, model: Model) -> ClusterProfile:
    """A profile that `--save-profile` wrote, less the excluded devices. Raises BadSetting."""

    def bad(reason: str) -> BadSetting:
        return BadSetting(setting="--load-profile", reason=f"{path} {reason}")

    try:
        cluster = SavedProfile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise bad(f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise bad(f"is no profile ({first_error(error)})") from None
    ids = [device.device_id for device in cluster.devices]
    links = {(link.source, link.target) for link in cluster.links}
    if len(set(ids)) < len(ids):
        raise bad("names a device twice")
    if missing := [(a, b) for a in ids for b in ids if a != b and (a, b) not in links]:
        raise bad(f"lacks the link from {missing[0][0]} to {missing[0][1]}")
    if cluster.model is not None and _shape(cluster.model) != _shape(model.spec):
        raise bad(f"was measured for {cluster.model.name}, whose layers have another shape than {model.spec.name}'s")
    if model.spec.causal and not all(device.blocks.decode_seconds_per_byte for device in cluster.devices):
        raise bad("does not say how fast its devices decode; measure them anew")
    check_names(goal, list(cluster.devices))
    left = tuple(device.device_id for device in allowed(goal, cluster.devices))
    if not left:
        raise BadSetting(setting="--exclude", reason="no device is left")
    return cluster.subset(left)
