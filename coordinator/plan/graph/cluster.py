"""The devices that a graph is planned for: memory, seconds of every operator, links. Measured, or read from a file."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.plan.limits import MemoryLimit
from hearth.errors import BadSetting
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.profile import WireCost
from hearth.platform.units import parse_bytes

_MAX_DEVICES = 256
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ClusterDevice:
    """`budget_bytes` is what a worker may hold in all; of that, `reserved_bytes` are no room for weights."""

    device_id: str
    name: str
    budget_bytes: int
    reserved_bytes: int = 0
    process_bytes: int = 0  # a worker that holds no model
    load_bytes: int = 0  # the whole graph in it, more than its file where kernels pack weights their own way
    loading_bytes: int = 0  # what comes and goes while it is loaded
    run_bytes: int = 0  # what running it takes beside that
    wire: WireCost = field(default_factory=WireCost)

    def room_bytes(self, graph_bytes: int) -> int:
        """For weights as the file has them, of a graph that has so many."""
        factor = max(self.load_bytes / graph_bytes, 1.0) if graph_bytes else 1.0
        return int(max(self.budget_bytes - self.reserved_bytes, 0) / factor)


@dataclass(frozen=True)
class GraphCluster:
    """K devices as a planner of one graph of n operators sees them.

    `seconds` [n][K]; `bytes_per_second` [K][K] from row to column, infinite on the diagonal; `latency_seconds` [K][K] of
    the first byte. `measured`: these are live devices, so that all bytes of a worker count; without, weights alone do, as
    in the papers.
    """

    devices: tuple[ClusterDevice, ...]
    seconds: Matrix
    bytes_per_second: Matrix
    latency_seconds: Matrix
    measured: bool = False

    def with_rooms(self, reserved_bytes: Sequence[int]) -> GraphCluster:
        devices = tuple(
            replace(device, reserved_bytes=reserved)
            for device, reserved in zip(self.devices, reserved_bytes, strict=True)
        )
        return replace(self, devices=devices)


def with_limits(cluster: GraphCluster, limits: Sequence[MemoryLimit]) -> GraphCluster:
    """The cluster as the user lets it be used."""
    devices = []
    for device in cluster.devices:
        caps = [limit.of(device.budget_bytes) for limit in limits if limit.device in (device.name, device.device_id)]
        devices.append(replace(device, budget_bytes=min([device.budget_bytes, *caps])))
    return replace(cluster, devices=tuple(devices))


class _FileDevice(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=256)
    memory: int | str  # bytes, or "512MiB": for weights
    flops_per_second: _Positive | None = None
    seconds_per_operator: _Seconds = 0.0  # on top, whatever the operator is
    operator_seconds: dict[str, _Seconds] | None = None  # by name; those not named are priced by their FLOPs


class _FileCluster(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: tuple[_FileDevice, ...] = Field(min_length=1, max_length=_MAX_DEVICES)
    mbit_per_second: _Positive | tuple[tuple[_Seconds, ...], ...] | None = None
    latency_seconds: _Seconds | tuple[tuple[_Seconds, ...], ...] = 0.0


def read_cluster(path: Path, spec: GraphSpec) -> GraphCluster:
    """A cluster from TOML (or JSON, by the file's ending), with every operator of `spec` priced. Raises BadSetting::

    mbit_per_second = 60          # or a matrix [[0, 60], [20, 0]]: from row to column
    latency_seconds = 0.001       # optional; a number or a matrix
    [[devices]]
    name = "kitchen"
    memory = "512MiB"             # for weights
    flops_per_second = 8e9
    seconds_per_operator = 2e-5   # optional, on top
    [devices.operator_seconds]    # optional: those known better than by their FLOPs, by operator name
    conv1 = 0.004
    """
    try:
        read = _FileCluster.model_validate(_values(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _bad(path, f"{where}: {first['msg']}") from None
    names = [device.name for device in read.devices]
    if len(set(names)) < len(names):
        raise _bad(path, "names a device twice")
    if read.mbit_per_second is None and len(names) > 1:
        raise _bad(path, "lacks mbit_per_second: a number, or a matrix from row to column")
    rates = _matrix(path, "mbit_per_second", read.mbit_per_second or 0.0, len(names))
    for source, row in enumerate(rates):
        for target, rate in enumerate(row):
            if source != target and rate <= 0:
                raise _bad(path, f"mbit_per_second from {names[source]} to {names[target]} must be above 0")
    latency = _matrix(path, "latency_seconds", read.latency_seconds, len(names))
    per_device = [_operator_seconds(path, device, spec) for device in read.devices]
    return GraphCluster(
        devices=tuple(ClusterDevice(device.name, device.name, _memory(path, device)) for device in read.devices),
        seconds=tuple(zip(*per_device, strict=True)),
        bytes_per_second=tuple(
            tuple(math.inf if i == j else rate * 1e6 / 8 for j, rate in enumerate(row)) for i, row in enumerate(rates)
        ),
        latency_seconds=tuple(
            tuple(0.0 if i == j else seconds for j, seconds in enumerate(row)) for i, row in enumerate(latency)
        ),
    )


def _values(path: Path) -> Any:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(path, f"cannot be read ({error})") from None
    if path.suffix.lower() == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise _bad(path, f"is no JSON ({error})") from None
    if sys.version_info >= (3, 11):
        import tomllib

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise _bad(path, f"is no TOML ({error})") from None
    else:
        raise _bad(path, "is TOML, which takes Python 3.11; write it as JSON here")


def _memory(path: Path, device: _FileDevice) -> int:
    try:
        num_bytes = parse_bytes(device.memory) if isinstance(device.memory, str) else device.memory
    except ValueError as error:
        raise _bad(path, f"memory of {device.name}: {error}") from None
    if num_bytes < 0:
        raise _bad(path, f"memory of {device.name} is below 0")
    return num_bytes


def _matrix(path: Path, field: str, value: float | tuple[tuple[float, ...], ...], size: int) -> Matrix:
    if not isinstance(value, tuple):
        return tuple((value,) * size for _ in range(size))
    if len(value) != size or any(len(row) != size for row in value):
        raise _bad(path, f"{field} must have {size} rows of {size} numbers, for {size} devices")
    return value


def _operator_seconds(path: Path, device: _FileDevice, spec: GraphSpec) -> tuple[float, ...]:
    known = device.operator_seconds or {}
    if unknown := known.keys() - {operator.name for operator in spec.operators}:
        raise _bad(path, f"{device.name} has seconds for {min(unknown)}, which is no operator of {spec.name}")
    found = []
    for operator in spec.operators:
        if operator.name in known:
            found.append(known[operator.name])
        elif device.flops_per_second is not None:
            found.append(operator.flops / device.flops_per_second + device.seconds_per_operator)
        else:
            raise _bad(path, f"{device.name} needs flops_per_second, or operator_seconds for {operator.name}")
    return tuple(found)


def _bad(path: Path, reason: str) -> BadSetting:
    return BadSetting(setting="--cluster", reason=f"{path} {reason}")
