"""What is prepared for the loss of each device of a deployment: plans made ahead, and why there are none. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coordinator.devices.registry import RECONNECT_SECONDS
from coordinator.plan.redundancy import describe_refusals, pause_seconds
from hearth.plan.common import PlannedDevice
from hearth.plan.plan import Plan
from hearth.platform.units import format_bytes
from hearth.wire import messages as wire


@dataclass(frozen=True)
class PreparedPlan:
    """A plan for the devices `made_for`, by id. Its chunks are on its devices, and `parts` are those of its ranks."""

    made_for: frozenset[str]
    plan: Plan
    parts: Sequence[wire.ShardParts | wire.SegmentParts]
    # Of chunks that no other plan needs there, by device id.
    spare_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_ids(self) -> frozenset[str]:
        """The devices that it uses: some of those that it was made for."""
        return frozenset(device.device_id for device in self.plan.devices)

    @property
    def chunks(self) -> dict[str, tuple[str, ...]]:
        """The hashes of the chunks that each device loads, in order, by its id. Empty if the parts are not known."""
        return {device.device_id: part.hashes for device, part in zip(self.plan.devices, self.parts, strict=False)}


class Refusal(NamedTuple):
    """Why there is no plan for the loss of a device, and the loop time at which that is tried again."""

    reason: str
    again_at: float


class Spares(NamedTuple):
    """Bytes of the chunks that only plans made ahead need, over all devices; those in memory were read ahead."""

    disk_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Sending:
    """Chunks that are sent ahead for the loss of the device `lost`: bytes that each other device needs and lacks now."""

    lost: str
    # By device id: of chunks that the deployed plan does not need.
    spare_bytes: dict[str, int] = field(default_factory=dict)
    missing_bytes: dict[str, int] = field(default_factory=dict)  # by name


@dataclass(frozen=True)
class Preparation:
    """What is known about the loss of each device of one deployment, by device id. Immutable."""

    plans: Mapping[str, PreparedPlan]
    refusals: Mapping[str, Refusal]

    def to_prepare(self, planned: Iterable[str], usable: frozenset[str], now: float) -> list[str]:
        """The devices of the deployed plan for whose loss there is no plan that takes these usable devices into account."""
        return [
            device
            for device in planned
            if (device not in self.refusals or now >= self.refusals[device].again_at)
            and (device not in self.plans or self.plans[device].made_for != usable - {device})
        ]

    def for_devices(
        self, usable: frozenset[str], cut_links: Collection[tuple[str, str]] = ()
    ) -> tuple[str, PreparedPlan | None]:
        """The device for whose loss a plan was made, and this plan, whose devices are all usable; `("", None)` without one.

        That device is gone, or an end of a cut link, of which no plan uses both ends. Prefers a plan that was made for
        exactly the usable devices, then one for most of them, then the one that is predicted to be faster.
        """
        ends = {device for pair in cut_links for device in pair if usable.issuperset(pair)}
        possible = [
            (lost, each)
            for lost, each in sorted(self.plans.items())
            if (lost not in usable or lost in ends)
            and each.device_ids <= usable
            and not any(each.device_ids.issuperset(pair) for pair in cut_links)
        ]

        def preference(found: tuple[str, PreparedPlan]) -> tuple[bool, int, float]:
            _, each = found
            return each.made_for == usable, len(each.made_for & usable), -each.plan.predicted.latency_seconds

        return max(possible, key=preference, default=("", None))

    def spare_chunks(self, deployed: PreparedPlan) -> dict[str, list[str]]:
        """By device id: the chunks that a plan made ahead needs there and the deployed plan does not, without repetition."""
        used = {device: frozenset(chunks) for device, chunks in deployed.chunks.items()}
        spares: dict[str, dict[str, None]] = {}
        for plan in self.plans.values():
            for device, chunks in plan.chunks.items():
                others = dict.fromkeys(chunk for chunk in chunks if chunk not in used.get(device, ()))
                spares.setdefault(device, {}).update(others)
        return {device: list(chunks) for device, chunks in spares.items() if chunks}

    def prepared(self, device: str, plan: PreparedPlan) -> Preparation:
        refusals = {other: refusal for other, refusal in self.refusals.items() if other != device}
        return Preparation({**self.plans, device: plan}, refusals)

    def refused(self, device: str, refusal: Refusal) -> Preparation:
        plans = {other: plan for other, plan in self.plans.items() if other != device}
        return Preparation(plans, {**self.refusals, device: refusal})

    def without_refusals(self) -> Preparation:
        """Try all again: the devices have changed."""
        return Preparation(self.plans, {})


NOTHING = Preparation({}, {})


def prepared_losses(
    preparation: Preparation, plan: Plan, sending: Sending | None = None, spares: Spares | None = None
) -> tuple[wire.PreparedLoss, ...]:
    """What is prepared for the loss of each device of the plan."""
    unread = 1.0 - spares.memory_bytes / spares.disk_bytes if spares is not None and spares.disk_bytes else 1.0

    def loss(device: PlannedDevice) -> wire.PreparedLoss:
        ahead, refusal = preparation.plans.get(device.device_id), preparation.refusals.get(device.device_id)
        if refusal is not None:
            return wire.PreparedLoss(device=device.name, is_prepared=False, reason=refusal.reason)
        sent = sending if sending is not None and sending.lost == device.device_id else None
        spare_bytes: Mapping[str, int] = sent.spare_bytes if sent else ahead.spare_bytes if ahead else {}
        load_bytes = unread * max(spare_bytes.values(), default=0)
        return wire.PreparedLoss(
            device=device.name,
            is_prepared=ahead is not None,
            spare_bytes=sum(spare_bytes.values()),
            missing_bytes=sum(sent.missing_bytes.values()) if sent else 0,
            pause_seconds=pause_seconds(load_bytes, RECONNECT_SECONDS) if ahead else None,
        )

    return tuple(map(loss, plan.devices))


def describe(preparation: Preparation, plan: Plan, spares: Spares | None = None) -> str:
    """Whether the deployment survives the loss of any one device, in one line, with the longest pause."""
    names = {device.device_id: device.name for device in plan.devices}
    if refused := {names[each]: why.reason for each, why in preparation.refusals.items() if each in names}:
        return describe_refusals(refused)
    if names.keys() - preparation.plans.keys():
        return "being prepared"
    pause = max(each.pause_seconds or 0.0 for each in prepared_losses(preparation, plan, spares=spares))
    survives = f"yes, any one device; pause about {pause:.1f} s"
    if spares is None:
        return survives
    stored, read = format_bytes(spares.disk_bytes), format_bytes(spares.memory_bytes)
    return f"{survives}; spare weights: {stored} on disk, {read} in memory"


class Found(NamedTuple):
    """What is deployed after a loss: the lost plan again (`is_same`), one that was made ahead, or None. `reason`: why."""

    plan: PreparedPlan | None
    reason: str  # a line for the log; empty if there is nothing to say
    is_same: bool = False
    left_out: str = ""  # the id of a device that is there, and that the plan does without because its link is cut


def why_unprepared(preparation: Preparation, lost: Sequence[Any]) -> str:
    """Why there is no plan after the loss of these `PlannedDevice`s."""
    names = ", ".join(device.name for device in lost)
    if not lost:
        return "no device was lost"
    if len(lost) > 1:
        return f"{names} were lost at once"
    if (refusal := preparation.refusals.get(lost[0].device_id)) is not None:
        return f"the home could not lose {names}: {refusal.reason}"
    if lost[0].device_id in preparation.plans:
        return "it uses another device that is gone"
    return f"the one for the loss of {names} was not ready yet"
