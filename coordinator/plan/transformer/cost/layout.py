"""A model divided among the devices of a cluster: the input of the cost model. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Generic

from typing_extensions import TypeVar

from coordinator.plan.simulator import Resource, wire_resources
from hearth.plan.common import BYTES_PER_VALUE, ValueFormatName, WireFormat
from hearth.plan.geometry import Span
from hearth.plan.model_spec import ModelSpec
from hearth.plan.phases import CHUNK_BYTES, MAX_CHUNKS
from hearth.plan.profile import BlockProfile, ClusterProfile, Link, WireCost, media_between
from hearth.plan.transformer import TransformerBody

Body_co = TypeVar("Body_co", default=TransformerBody, covariant=True)


@dataclass(frozen=True)
class PlanLayout(Generic[Body_co]):
    """Ranks are the cluster's devices in order; `wire` is the format of activations."""

    spec: ModelSpec
    body: Body_co
    cluster: ClusterProfile
    wire: WireFormat

    @cached_property
    def blocks(self) -> list[BlockProfile]:
        return [device.blocks for device in self.cluster.devices]

    @property
    def ranks(self) -> range:
        return range(len(self.cluster.devices))

    @cached_property
    def links(self) -> dict[tuple[int, int], Link]:
        """The links, by sending and receiving rank."""
        ids = [device.device_id for device in self.cluster.devices]
        by_ids = {(link.source, link.target): link for link in self.cluster.links}
        return {(a, b): by_ids[ids[a], ids[b]] for a, b in permutations(self.ranks, 2)}

    @cached_property
    def media(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The numbers of the shared media that a transfer crosses, by sending and receiving rank."""
        ids = [device.device_id for device in self.cluster.devices]
        return {(a, b): media_between(self.cluster.media, ids[a], ids[b]) for a, b in permutations(self.ranks, 2)}

    @cached_property
    def formats(self: PlanLayout) -> dict[tuple[int, int], ValueFormatName]:
        """The value format on each link."""
        return {ends: self.body.values_on(*ends, self.wire.values) for ends in permutations(self.ranks, 2)}

    def wire_resources(self, rank: int) -> tuple[Resource, ...]:
        """The resources of the CPU work of a rank's transfers."""
        return wire_resources(rank, self.blocks[rank].wire.beside_compute)

    def wire_seconds(self, rank: int, num_values: float, format_: ValueFormatName, converted: float = 0.5) -> float:
        """CPU seconds of this rank's end of a transfer."""
        return wire_seconds(self.blocks[rank].wire, num_values, format_, converted)


def wire_seconds(cost: WireCost, num_values: float, format_: ValueFormatName, converted: float = 0.5) -> float:
    """CPU seconds of one end of a transfer: encryption, TCP, and its part of the conversion.

    `converted` is the fraction of a conversion and its inverse that this end does.
    """
    num_chunks = max(1, min(num_values * 4 // CHUNK_BYTES, MAX_CHUNKS))
    return (
        num_values * BYTES_PER_VALUE[format_] * cost.encrypted_seconds_per_byte
        + num_values * converted * cost.convert_seconds_per_value.get(format_, 0.0)
        + num_chunks * cost.seconds_per_message
    )


def attention_ratio(spec: ModelSpec, rows: Span, seq_len: int) -> float:
    """Ratio of the time of attention for these rows of a sequence to that for its first `seq_len` rows, which was profiled.

    A decoder's row attends to the rows before it, up to the window of the profiled layer.
    """
    window = spec.window(0)

    def attended(end: int) -> int:
        """Twice the number of pairs of query and key among the first rows."""
        width = end if window is None else min(end, window)
        return width * (2 * end - width)

    return (attended(rows.stop) - attended(rows.start)) / attended(seq_len)
