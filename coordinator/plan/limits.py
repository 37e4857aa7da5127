"""Memory limits that the user sets per device, below what its agent offers. Pure: profiles in, lower budgets out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hearth.errors import BadSetting
from hearth.plan.plan import Plan
from hearth.plan.profile import ClusterProfile
from hearth.platform.units import format_bytes, parse_bytes

_MIN_LIMIT_BYTES = 1 << 20  # below 1 MiB, the user has probably forgotten the unit


class NamedDevice(Protocol):
    """A device with an id and a name, from the fleet or from a profile."""

    @property
    def device_id(self) -> str: ...

    @property
    def name(self) -> str: ...


class DeviceWithBudget(NamedDevice, Protocol):
    """A device that also has a memory budget."""

    @property
    def budget_bytes(self) -> int: ...


class MemoryLimit(BaseModel):
    """A cap on the memory of one device: bytes, or a percentage of what its agent offers."""

    model_config = ConfigDict(frozen=True)

    device: str = Field(min_length=1)  # name or id
    num_bytes: int | None = Field(default=None, ge=_MIN_LIMIT_BYTES)
    percent: float | None = Field(default=None, gt=0, le=100)

    @model_validator(mode="after")
    def _check_exactly_one(self) -> MemoryLimit:
        if (self.num_bytes is None) == (self.percent is None):
            raise ValueError("give either bytes or a percentage")
        return self

    def applied_to(self, offered_bytes: int) -> int:
        if self.num_bytes is not None:
            return min(self.num_bytes, offered_bytes)
        return int(offered_bytes * (self.percent or 0.0) / 100)

    def __str__(self) -> str:
        return format_bytes(self.num_bytes) if self.num_bytes is not None else f"{self.percent:g} %"


def parse_limit(text: str) -> MemoryLimit:
    """Parse `kitchen=1.5GiB` or `kitchen=50%`. Raises BadSetting."""
    device, separator, amount = (part.strip() for part in text.rpartition("="))
    if not separator or not device:
        raise BadSetting(setting="--limit", reason=f"'{text}' is not of the form NAME=1.5GiB or NAME=50%")
    try:
        if amount.endswith("%"):
            percent = float(amount.removesuffix("%"))
            if not 0 < percent <= 100:
                raise ValueError(f"'{amount}' is not a percentage between 0 % and 100 %")
            return MemoryLimit(device=device, percent=percent)
        num_bytes = parse_bytes(amount)
        if num_bytes < _MIN_LIMIT_BYTES:
            raise ValueError(f"'{amount}' is below 1 MiB; name the unit, as in 800M or 2GiB")
        return MemoryLimit(device=device, num_bytes=num_bytes)
    except ValueError as error:
        raise BadSetting(setting=f"--limit {device}", reason=str(error)) from None


def limited_budgets(
    devices: Iterable[DeviceWithBudget], limits: Sequence[MemoryLimit], deployed: Plan | None = None
) -> dict[str, int]:
    """Bytes of each device, by id, that a new plan may use under the user's limits.

    The memory that the worker of the `deployed` plan holds will be free for the new plan, up to the budget for which the
    old plan was made: an agent with its own limit offers the same amount whatever is held. A percentage is of the memory
    offered when nothing runs, but gives no more than it did for the deployed plan.
    """
    planned = {device.device_id: device for device in deployed.devices} if deployed else {}
    by_device: dict[str, int] = {}
    for device in devices:
        held, budget = planned.get(device.device_id), device.budget_bytes
        offered_bytes = budget + (held.memory.total if held is not None else 0)
        if held is not None:
            budget = max(budget, min(held.budget_bytes, offered_bytes))
        for limit in limits:
            if limit.device in (device.name, device.device_id):
                budget = min(budget, limit.applied_to(offered_bytes))
                if held is not None and limit.percent is not None:
                    budget = min(budget, held.budget_bytes)
        by_device[device.device_id] = budget
    return by_device


def profile_with_limits(
    cluster: ClusterProfile, limits: Sequence[MemoryLimit], deployed: Plan | None = None
) -> ClusterProfile:
    """The cluster with the budgets that `limited_budgets` computes."""
    budgets = limited_budgets(cluster.devices, limits, deployed)
    devices = (device.model_copy(update={"budget_bytes": budgets[device.device_id]}) for device in cluster.devices)
    return cluster.model_copy(update={"devices": tuple(devices)})


def limit_violation(
    plan: Plan, limits: Sequence[MemoryLimit], exclude: Sequence[str], offered_bytes: Mapping[str, int]
) -> str | None:
    """Why a given plan violates the user's limits or exclusions; None if it does not. `offered_bytes` is by device id."""
    for device in plan.devices:
        both = (device.name, device.device_id)
        if set(both) & set(exclude):
            return f"{device.name} is excluded"
        for limit in limits:
            offered = offered_bytes.get(device.device_id, device.budget_bytes)
            if limit.device in both and device.memory.total > limit.applied_to(offered):
                return f"{device.name} would hold {format_bytes(device.memory.total)}, above its limit of {limit}"
    return None


def unknown_names(names: Iterable[str], devices: Iterable[NamedDevice]) -> list[str]:
    """The names (or ids) that no device has."""
    known = {name for device in devices for name in (device.name, device.device_id)}
    return [name for name in dict.fromkeys(names) if name not in known]


def require_known(setting: str, names: Iterable[str], devices: Iterable[NamedDevice]) -> None:
    """Raise BadSetting for names that no device has; the message lists the existing names."""
    devices = list(devices)
    if unknown := unknown_names(names, devices):
        existing = ", ".join(sorted({device.name for device in devices})) or "none"
        reason = f"no device here is called {', '.join(unknown)}; there are: {existing}"
        raise BadSetting(setting=setting, reason=reason)
