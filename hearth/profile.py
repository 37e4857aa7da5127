"""What was measured: latency curves of blocks on each device, and the links between them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class LatencyCurve(BaseModel):
    """Seconds as a function of a block's size, through measured points: linear between them, and beyond the last."""

    model_config = ConfigDict(frozen=True)

    sizes: tuple[int, ...] = Field(min_length=1, max_length=256)
    seconds: tuple[Seconds, ...] = Field(min_length=1, max_length=256)

    @field_validator("sizes")
    @classmethod
    def _rising(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)) or sizes[0] <= 0:
            raise ValueError("sizes must be positive and rise")
        return sizes

    def __call__(self, size: float) -> float:
        """Predicted seconds. Nothing to do (size 0) costs nothing; one measured point is taken as proportional."""
        if size <= 0:
            return 0.0
        xs, ys = self.sizes, self.seconds
        if len(xs) == 1:
            return ys[0] * size / xs[0]
        i = min(max(bisect_left(xs, size), 1), len(xs) - 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return max(ys[i - 1] + slope * (size - xs[i - 1]), 0.0)


class BlockProfile(BaseModel):
    """One layer's blocks on one device at `seq_len` rows (Galaxy's profiler: L(MHA,a,d), L(MLP,b,d), L(CON,s,d)).

    `attention` is indexed by heads and `mlp` by columns, both over all `seq_len` rows; `connective` by rows;
    `sequence_layer` by rows: a whole layer of sequence parallelism (all weights, those rows, attention over all rows);
    `embedding` by rows.
    """

    model_config = ConfigDict(frozen=True)

    seq_len: int = Field(ge=1)
    attention: LatencyCurve
    mlp: LatencyCurve
    connective: LatencyCurve
    sequence_layer: LatencyCurve
    embedding: LatencyCurve


class DeviceProfile(BaseModel):
    """A device as the planner sees it. `budget_bytes` is what a worker may hold in all."""

    model_config = ConfigDict(frozen=True)

    device_id: str
    name: str
    budget_bytes: int = Field(ge=0)
    blocks: BlockProfile


class Link(BaseModel):
    """One ordered pair of devices, measured over the data plane's kind of socket and security."""

    model_config = ConfigDict(frozen=True)

    source: str
    target: str
    bytes_per_second: float = Field(gt=0, allow_inf_nan=False)
    round_trip_seconds: Seconds


class ClusterProfile(BaseModel):
    """Everything a planner knows. `links` holds every ordered pair of `devices`."""

    model_config = ConfigDict(frozen=True)

    devices: tuple[DeviceProfile, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()

    def link(self, source: str, target: str) -> Link:
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        raise KeyError(f"no link from {source} to {target} was measured")

    def subset(self, device_ids: tuple[str, ...]) -> ClusterProfile:
        """The same cluster with only these devices, in this order."""
        by_id = {device.device_id: device for device in self.devices}
        return ClusterProfile(
            devices=tuple(by_id[device_id] for device_id in device_ids),
            links=tuple(link for link in self.links if link.source in device_ids and link.target in device_ids),
        )
