"""Memory, processor time and links that other deployments use and a new plan cannot. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from coordinator.devices.registry import Device
from coordinator.devices.shared_media import Pair
from coordinator.plan.simulator import Resource, transfer_resources
from hearth.plan.profile import Link, SharedMedium, media_between

# Bytes/s that are sent over each link, whenever it is asked for.
Traffic: TypeAlias = Callable[[], Mapping[Pair, float]]

# The most of a link's time that counts as taken: a plan avoids a link that others fill, although TCP would give it about half.
_MAX_LINK_LOAD = 0.9


def no_traffic() -> Mapping[Pair, float]:
    """That of links that nobody else uses."""
    return {}


class Taken(NamedTuple):
    """What other deployments take of one device."""

    num_bytes: int = 0  # of memory, besides what is no longer part of its budget
    load: float = 0.0  # share of the processor time of its compute threads

    @property
    def slowdown(self) -> float:
        """The factor on the seconds of a computation."""
        return 1.0 / (1.0 - self.load)


@dataclass(frozen=True)
class TakenByOthers:
    """What other deployments take, whenever it is asked for; by default there are none."""

    of_device: Callable[[Device], Taken] = lambda device: Taken()
    traffic: Traffic = no_traffic  # of their workers

    def __call__(self, device: Device) -> Taken:
        """What they take of a device."""
        return self.of_device(device)


NOTHING_TAKEN = TakenByOthers()


def left_bytes(device: Device, taken: TakenByOthers) -> int:
    """The memory of a device that a plan may use."""
    return max(device.budget_bytes - taken(device).num_bytes, 0)


def links_left(
    traffic: Mapping[Pair, float], links: Mapping[Pair, Link], media: Sequence[SharedMedium]
) -> dict[Pair, Link]:
    """The links with other `traffic` in bytes/s, each with the rate of the time that is left, at least a tenth.

    A transfer takes its time from what the simulator lets it occupy: the sending side of one device, the receiving side of the
    other, and the media that the link crosses. Of these, a link has what the busiest leaves: its own rate less the traffic if
    that is the only one. Traffic on links that are not in `links` counts for nothing.
    """
    numbers = {each: number for number, each in enumerate(dict.fromkeys(end for pair in links for end in pair))}

    def occupied(pair: Pair) -> tuple[Resource, ...]:
        return transfer_resources(numbers[pair[0]], numbers[pair[1]], media_between(media, *pair))

    busy: dict[Resource, float] = defaultdict(float)  # fraction of the time
    for pair, bytes_per_second in traffic.items():
        if (link := links.get(pair)) is not None:
            for resource in occupied(pair):
                busy[resource] += bytes_per_second / link.bytes_per_second
    if not busy:
        return dict(links)

    def left(link: Link, pair: Pair) -> Link:
        load = min(max(busy[resource] for resource in occupied(pair)), _MAX_LINK_LOAD)
        return link.model_copy(update={"bytes_per_second": (1.0 - load) * link.bytes_per_second}) if load else link

    return {pair: left(link, pair) for pair, link in links.items()}


def link_alone(measured: Link, traffic: Mapping[Pair, float]) -> Link:
    """The link as it would be without this `traffic` in bytes/s, during which it was measured.

    The measurement had what the traffic of its two ends left, but at least half: TCP gives each connection about as much.
    """
    sent = sum(rate for (source, _), rate in traffic.items() if source == measured.source)
    received = sum(rate for (_, target), rate in traffic.items() if target == measured.target)
    added = min(max(sent, received), measured.bytes_per_second)
    return measured.model_copy(update={"bytes_per_second": measured.bytes_per_second + added}) if added else measured
