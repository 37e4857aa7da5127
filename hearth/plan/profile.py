"""Measured profiles: latency curves of blocks on each device, and the links between devices. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, Field, field_validator

from hearth.plan.kernels import KernelTime

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class LatencyCurve(BaseModel, frozen=True):
    """Seconds as a function of a block's size: linear interpolation between points, linear extrapolation beyond the last.

    `error` is the expected relative error: the largest misfit of a measured point.
    """

    sizes: tuple[int, ...] = Field(min_length=1, max_length=256)
    seconds: tuple[Seconds, ...] = Field(min_length=1, max_length=256)
    error: float = Field(default=0.0, ge=0)

    @field_validator("sizes")
    @classmethod
    def _rising(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)) or sizes[0] <= 0:
            raise ValueError("sizes must be positive and increasing")
        return sizes

    def __call__(self, size: float) -> float:
        """Predicted seconds. Size 0 costs nothing; a curve of one point is taken as proportional to the size."""
        if size <= 0:
            return 0.0
        xs, ys = self.sizes, self.seconds
        if len(xs) == 1:
            return ys[0] * size / xs[0]
        if size < xs[0]:  # towards the cost of an empty call: the intercept of the line through the first two points
            intercept = max(ys[0] - (ys[1] - ys[0]) / (xs[1] - xs[0]) * xs[0], 0.0)
            return intercept + (ys[0] - intercept) * size / xs[0]
        i = min(max(bisect_left(xs, size), 1), len(xs) - 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return max(ys[i - 1] + slope * (size - xs[i - 1]), 0.0)

    def with_steps(self, seconds: Mapping[int, float]) -> LatencyCurve:
        """A copy with a point at each size of `seconds`, the times of a similar block, whose steps it takes over.

        `seconds` must have all sizes of this curve. The times at these sizes stay as they are.
        """
        if min(seconds.values()) <= 0:
            return self
        similar = LatencyCurve(sizes=self.sizes, seconds=tuple(seconds[size] for size in self.sizes))
        sizes = tuple(sorted(seconds))
        times = tuple(self(size) * seconds[size] / similar(size) for size in sizes)
        return self.model_copy(update={"sizes": sizes, "seconds": times})

    def scaled(self, factor: float) -> LatencyCurve:
        """A copy with all times multiplied by `factor`."""
        return self.model_copy(update={"seconds": tuple(seconds * factor for seconds in self.seconds)})


# Kernel times are about linear in size. A line with no relative misfit above this replaces the measured points: a smaller limit
# would keep noise, a larger one would hide steps in a kernel's time.
_MAX_LINE_MISFIT = 0.06


def fit_curve(measured: Mapping[int, float]) -> LatencyCurve:
    """Fit a curve to a few measurements (seconds by size): a line if one fits, else the points themselves.

    The line minimises squared relative errors, with slope and intercept at least 0. `error` is the largest relative misfit
    of the line; for points, the largest distance of an inner point from the line between its neighbours.
    """
    points = sorted(measured.items())
    sizes, seconds = [size for size, _ in points], [value for _, value in points]
    if len(sizes) < 3 or min(seconds) <= 0:
        return LatencyCurve(sizes=tuple(sizes), seconds=tuple(seconds))
    intercept, slope = _relative_line(sizes, seconds)
    line = [intercept + slope * size for size in sizes]
    misfit = max(abs(fitted - value) / value for fitted, value in zip(line, seconds, strict=True))
    if misfit <= _MAX_LINE_MISFIT:
        return LatencyCurve(sizes=tuple(sizes), seconds=tuple(line), error=misfit)
    between = max(
        abs(y1 + (y2 - y1) * (x - x1) / (x2 - x1) - y) / y
        for (x1, y1), (x, y), (x2, y2) in zip(points, points[1:], points[2:], strict=False)
    )
    return LatencyCurve(sizes=tuple(sizes), seconds=tuple(seconds), error=between)


def suspicious_point(measured: Mapping[int, float]) -> int | None:
    """The size whose time lies furthest above the line fitted to the other points, if by more than `_SUSPICIOUS_EXCESS`.

    Such a point was probably disturbed by background load. Points below the line are not suspicious: no disturbance makes
    a device faster.
    """
    if len(measured) < 3:
        return None

    def excess(size: int) -> float:
        others = {other: seconds for other, seconds in measured.items() if other != size}
        intercept, slope = _relative_line(list(others), list(others.values()))
        expected = intercept + slope * size
        return measured[size] / expected - 1 if expected > 0 else 0.0

    worst = max(measured, key=excess)
    return worst if excess(worst) > _SUSPICIOUS_EXCESS else None


# Relative distance above the line; well above `_MAX_LINE_MISFIT`, which kernels reach undisturbed.
_SUSPICIOUS_EXCESS = 0.15


def _relative_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, both at least 0, of the line with the least squared relative errors."""
    weights = [1 / max(y, 1e-12) ** 2 for y in seconds]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, seconds, strict=True)) / total
    variance = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, sizes, strict=True))
    covariance = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, sizes, seconds, strict=True))
    slope = max(covariance / variance, 0.0) if variance > 0 else 0.0
    intercept = mean_y - slope * mean_x
    if intercept < 0:  # fit a line through the origin instead
        slope = sum(w * x * y for w, x, y in zip(weights, sizes, seconds, strict=True)) / sum(
            w * x * x for w, x in zip(weights, sizes, strict=True)
        )
        intercept = 0.0
    return intercept, slope


class WireCost(BaseModel, frozen=True):
    """CPU cost of communication for a device: encryption, TCP, and conversion of value formats.

    In seconds of the whole device: with n threads, one core-second counts as 1/n. Measured under the device's CPU limits.
    """

    encrypted_seconds_per_byte: Seconds = 0.0  # at each end of a link
    plain_seconds_per_byte: Seconds = 0.0
    seconds_per_message: Seconds = 0.0
    # Encoding and decoding together, keyed by value format.
    convert_seconds_per_value: dict[str, Seconds] = Field(default={}, max_length=16)
    beside_compute: bool = False  # the device computes on its GPU, from which this work takes no time


class BlockProfile(BaseModel, frozen=True):
    """One layer's blocks on one device at `seq_len` rows (Galaxy's profiler: L(MHA,a,d), L(MLP,b,d), L(CON,s,d)).

    `qkv`, `core` (attention without projections) and `out` are functions of the number of heads, `up` (with the activation)
    and `down` of the number of MLP columns, each over all `seq_len` rows. `connective`, `embedding` and `mlp_rows` (the
    whole MLP) are functions of the number of rows; `mlp_rows` shows how much less efficient small tiles are, and the steps
    of the kernels' times.

    Decoding is bound by memory bandwidth: one row costs `decode_seconds_per_byte` for each byte of weights that it reads,
    `decode_seconds_per_cached_value` for each key and value, and `decode_layer_seconds` for the rest of a layer. All are 0 for
    encoders, where they are not measured. The second is also 0 where it was not measured.
    """

    seq_len: int = Field(ge=1)
    qkv: LatencyCurve
    core: LatencyCurve
    out: LatencyCurve
    up: LatencyCurve
    down: LatencyCurve
    connective: LatencyCurve
    embedding: LatencyCurve
    mlp_rows: LatencyCurve
    wire: WireCost = WireCost()
    decode_seconds_per_byte: Seconds = 0.0
    decode_layer_seconds: Seconds = 0.0
    decode_seconds_per_cached_value: Seconds = 0.0
    # The kernels that could multiply the layer's matrices; all other times are those with `choose_kernels` of them.
    kernels: tuple[KernelTime, ...] = Field(default=(), max_length=1024)

    def attention(self, heads: float) -> float:
        """Seconds of the attention block for this number of heads: L(MHA, a, d)."""
        return self.qkv(heads) + self.core(heads) + self.out(heads)

    def mlp(self, columns: float) -> float:
        """Seconds of the MLP for this number of columns: L(MLP, b, d)."""
        return self.up(columns) + self.down(columns)

    def tile_factor(self, rows: float) -> float:
        """Cost of a row in a GEMM of `rows` rows, relative to its cost in a GEMM of all rows; at least 1."""
        whole_seconds = self.mlp_rows(self.seq_len)
        if rows <= 0 or whole_seconds <= 0:
            return 1.0
        return max(self.mlp_rows(rows) / (whole_seconds * rows / self.seq_len), 1.0)

    def with_rows(self, seq_len: int) -> BlockProfile:
        """The profile of more rows, if all times grow with them: those of attention, which pairs rows, with their square."""
        factor = seq_len / self.seq_len

        def by_heads(curve: LatencyCurve, power: int = 1) -> LatencyCurve:
            return curve.model_copy(update={"seconds": tuple(each * factor**power for each in curve.seconds)})

        def by_rows(curve: LatencyCurve) -> LatencyCurve:
            sizes = tuple(max(round(size * factor), 1) for size in curve.sizes)
            return by_heads(curve).model_copy(update={"sizes": sizes})

        changes = {name: by_heads(getattr(self, name)) for name in ("qkv", "out", "up", "down")}
        changes |= {name: by_rows(getattr(self, name)) for name in ("connective", "embedding", "mlp_rows")}
        return self.model_copy(update={"seq_len": seq_len, "core": by_heads(self.core, power=2), **changes})

    def with_layer_seconds(self, num_heads: int, num_columns: int, seconds: float) -> BlockProfile:
        """The profile of a whole layer with all rows that takes `seconds`, if that is more than its parts take together.

        The difference is added to the connective blocks. A part that is measured in a loop of its own finds its inputs in the
        processor's cache, where a layer's other work would have replaced them, and no part writes to the KV cache.
        """
        connective = 2 * self.connective(self.seq_len)
        parts = self.attention(num_heads) + self.mlp(num_columns) + connective
        if connective <= 0 or seconds <= parts:
            return self
        return self.model_copy(update={"connective": self.connective.scaled(1 + (seconds - parts) / connective)})

    @property
    def error(self) -> float:
        """The largest expected relative error of the GEMM and attention curves."""
        return max(curve.error for curve in (self.qkv, self.core, self.out, self.up, self.down))

    def scaled(self, factor: float) -> BlockProfile:
        """The profile of the same device when it is slower by `factor`."""
        curves = ("qkv", "core", "out", "up", "down", "connective", "embedding", "mlp_rows")
        scaled: dict[str, LatencyCurve | float] = {name: getattr(self, name).scaled(factor) for name in curves}
        for name in DECODING_TIMES:
            scaled[name] = getattr(self, name) * factor
        return self.model_copy(update=scaled)


DECODING_TIMES = ("decode_seconds_per_byte", "decode_layer_seconds", "decode_seconds_per_cached_value")


class DeviceProfile(BaseModel, frozen=True):
    """A device as seen by planners. `budget_bytes` is the memory limit of its worker.

    `store_room_bytes`: the weights that its store can take besides those of deployed plans; None: not known, no limit.
    """

    device_id: str
    name: str
    budget_bytes: int = Field(ge=0)
    blocks: BlockProfile
    store_room_bytes: int | None = Field(default=None, ge=0)


class Link(BaseModel, frozen=True):
    """An ordered pair of devices, measured with the data plane's socket type and encryption."""

    source: str
    target: str
    bytes_per_second: float = Field(gt=0, allow_inf_nan=False)
    round_trip_seconds: Seconds


class SharedMedium(BaseModel, frozen=True):
    """A medium that the links of several devices share, such as the air of an access point: one transfer has it at a time."""

    device_ids: tuple[str, ...] = Field(min_length=1)


def media_between(media: Sequence[SharedMedium], source: str, target: str) -> tuple[int, ...]:
    """The numbers of the media that a transfer between two devices crosses."""
    return tuple(number for number, each in enumerate(media) if {source, target} & set(each.device_ids))


def media_of(media: Sequence[SharedMedium], device_ids: Sequence[str]) -> tuple[SharedMedium, ...]:
    """What is left of the media with these devices only."""
    left = (tuple(each for each in medium.device_ids if each in device_ids) for medium in media)
    return tuple(SharedMedium(device_ids=each) for each in left if each)


class ClusterProfile(BaseModel, frozen=True):
    """The devices and links that a planner may use. `links` holds every ordered pair of `devices`."""

    devices: tuple[DeviceProfile, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    media: tuple[SharedMedium, ...] = ()

    def link(self, source: str, target: str) -> Link:
        """The link from one device to another. Raises KeyError if it was not measured."""
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
            media=media_of(self.media, device_ids),
        )
