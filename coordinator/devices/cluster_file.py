"""Reads files that replace real devices: a described cluster, or a published placement problem."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.models.file_kinds import read_json_file, why_wrong_kind
from coordinator.models.limits import MAX_GRAPH_BYTES
from coordinator.plan.graph.cluster import ClusterDevice, FloatTable, GraphCluster, cluster_from_links
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem
from hearth.errors import BadGraph, BadSetting
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.profile import Link, SharedMedium
from hearth.platform.units import parse_bytes
from hearth.validation import first_error

_MAX_DEVICES = 256  # in a cluster file; the same limit as for the setting `min_devices`
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


# ---- clusters ---------------------------------------------------------------------------------------------------------


class _FileDevice(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=256)
    memory: int | str  # bytes, or text such as "512MiB"; for weights
    flops_per_second: _Positive | None = None
    seconds_per_operator: _Seconds = 0.0  # fixed time added to every operator
    operator_seconds: dict[str, _Seconds] | None = None  # by name; other operators are priced by their FLOPs


class _FileMedium(BaseModel):
    """A medium that the links of these devices share, such as an access point's air: one transfer has it at a time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: tuple[str, ...] = Field(min_length=1)  # names
    mbit_per_second: _Positive  # which a transfer between two of them has half of: it crosses the medium twice


class _FileCluster(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: tuple[_FileDevice, ...] = Field(min_length=1, max_length=_MAX_DEVICES)
    mbit_per_second: _Positive | tuple[tuple[_Seconds, ...], ...] | None = None
    latency_seconds: _Seconds | tuple[tuple[_Seconds, ...], ...] = 0.0
    media: tuple[_FileMedium, ...] = ()


def read_cluster(path: Path, spec: GraphSpec) -> GraphCluster:
    """Read a cluster from TOML or JSON (by file suffix) and price every operator of `spec`. Raises BadSetting.

    The fields of the file::

        mbit_per_second = 60          # or a matrix [[0, 60], [20, 0]]: row = source, column = target
        latency_seconds = 0.001       # optional; a number or a matrix
        [[devices]]
        name = "kitchen"
        memory = "512MiB"             # for weights
        flops_per_second = 8e9
        seconds_per_operator = 2e-5   # optional, added to every operator
        [devices.operator_seconds]    # optional: measured seconds by operator name; others are priced by their FLOPs
        conv1 = 0.004
        [[media]]                     # optional: what links share, one transfer at a time
        devices = ["kitchen"]         # those on the medium; others are on wires of their own
        mbit_per_second = 60          # no link over it is faster, and between two of its devices half as fast
    """
    content = _read_content(path)
    if reason := why_wrong_kind(content, "cluster"):
        raise _bad_cluster(path, reason)
    try:
        cluster = _FileCluster.model_validate(content)
    except ValidationError as error:
        raise _bad_cluster(path, first_error(error)) from None
    names = [device.name for device in cluster.devices]
    if len(set(names)) < len(names):
        raise _bad_cluster(path, "names a device twice")
    if cluster.mbit_per_second is None and len(names) > 1:
        raise _bad_cluster(path, "lacks mbit_per_second: a number, or a matrix from row to column")
    rates = _matrix(path, "mbit_per_second", cluster.mbit_per_second or 0.0, len(names))
    latency = _matrix(path, "latency_seconds", cluster.latency_seconds, len(names))
    _check_media(path, cluster.media, names)
    links = {}
    for a, b in permutations(range(len(names)), 2):
        if rates[a][b] <= 0:
            raise _bad_cluster(path, f"mbit_per_second from {names[a]} to {names[b]} must be above 0")
        links[names[a], names[b]] = Link(
            source=names[a],
            target=names[b],
            bytes_per_second=min(rates[a][b], _media_mbit(cluster.media, names[a], names[b])) * 1e6 / 8,
            round_trip_seconds=2 * latency[a][b],
        )
    devices = [ClusterDevice(device.name, device.name, _memory(path, device)) for device in cluster.devices]
    per_device = [_operator_seconds(path, device, spec) for device in cluster.devices]
    media = [SharedMedium(device_ids=medium.devices) for medium in cluster.media]
    return cluster_from_links(devices, tuple(zip(*per_device, strict=True)), links, measured=False, media=media)


def _check_media(path: Path, media: Sequence[_FileMedium], names: Sequence[str]) -> None:
    """Raise BadSetting if a medium names a device that there is not, or one that is on a medium already."""
    seen: set[str] = set()
    for number, medium in enumerate(media):
        for device in medium.devices:
            if device not in names:
                raise _bad_cluster(path, f"media.{number} names {device}, which is none of {', '.join(names)}")
            if device in seen:
                raise _bad_cluster(path, f"media.{number} names {device} again: a device is on one medium at most")
            seen.add(device)


def _media_mbit(media: Sequence[_FileMedium], source: str, target: str) -> float:
    """The most that media let pass from one device to another, in Mbit/s; infinite if the link crosses none."""
    crossings = ((medium.mbit_per_second, len({source, target} & set(medium.devices))) for medium in media)
    return min((mbit / count for mbit, count in crossings if count), default=math.inf)


def _read_content(path: Path) -> Any:
    if path.suffix.lower() == ".json":
        return read_json_file(path, partial(_bad_cluster, path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_cluster(path, f"cannot be read ({error})") from None
    if sys.version_info >= (3, 11):
        import tomllib

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise _bad_cluster(path, f"is not valid TOML ({error})") from None
    raise _bad_cluster(path, "is TOML, which needs Python 3.11 or later; write it as JSON")


def _memory(path: Path, device: _FileDevice) -> int:
    try:
        num_bytes = parse_bytes(device.memory) if isinstance(device.memory, str) else device.memory
    except ValueError as error:
        raise _bad_cluster(path, f"memory of {device.name}: {error}") from None
    if num_bytes < 0:
        raise _bad_cluster(path, f"memory of {device.name} is below 0")
    return num_bytes


def _matrix(path: Path, field: str, value: float | tuple[tuple[float, ...], ...], size: int) -> FloatTable:
    if not isinstance(value, tuple):
        return tuple((value,) * size for _ in range(size))
    if len(value) != size or any(len(row) != size for row in value):
        raise _bad_cluster(path, f"{field} must have {size} rows of {size} numbers, for {size} devices")
    return value


def _operator_seconds(path: Path, device: _FileDevice, spec: GraphSpec) -> tuple[float, ...]:
    measured = device.operator_seconds or {}
    if unknown := measured.keys() - {operator.name for operator in spec.operators}:
        raise _bad_cluster(
            path, f"{device.name} has seconds for {min(unknown)}, which is not an operator of {spec.name}"
        )
    seconds = []
    for operator in spec.operators:
        if operator.name in measured:
            seconds.append(measured[operator.name])
        elif device.flops_per_second is not None:
            seconds.append(operator.flops / device.flops_per_second + device.seconds_per_operator)
        else:
            raise _bad_cluster(path, f"{device.name} needs flops_per_second, or operator_seconds for {operator.name}")
    return tuple(seconds)


def _bad_cluster(path: Path, reason: str) -> BadSetting:
    return BadSetting(setting="--cluster", reason=f"{path} {reason}")


# ---- published placement problems -------------------------------------------------------------------------------------


def read_instance(path: str | Path, congestion: bool = True) -> PlacementProblem:
    """Read a placement problem in the Moirai authors' JSON format; times and memory keep its units. Raises BadGraph."""
    path = Path(path)
    data = read_json_file(
        path, lambda reason: BadGraph(path=str(path), reason=f"it {reason}"), path.parent, MAX_GRAPH_BYTES
    )
    try:
        return _instance(data, congestion)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        reason = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise BadGraph(path=str(path), reason=f"it is not a placement instance: {reason}") from None


def _instance(data: Mapping[str, Any], congestion: bool) -> PlacementProblem:
    num_devices, nodes = len(data["devices"]), data["nodes"]
    if not nodes or not num_devices:
        raise ValueError("a placement needs at least one operator and one device")
    ranks = range(num_devices)
    flows = []
    for source, target, _, times, *_ in data["edges"]:
        times = [0.0] * num_devices**2 if times is None else times
        if len(times) != num_devices**2:
            raise ValueError(f"the edge {source} -> {target} has {len(times)} times for {num_devices} devices")
        if not 0 <= source < target < len(nodes):
            raise ValueError(f"the edge {source} -> {target} is not in topological order")
        rows = tuple(tuple(map(float, times[a * num_devices :][:num_devices])) for a in ranks)
        if any(rows[a][a] != 0 for a in ranks):
            raise ValueError(f"the edge {source} -> {target} takes time although both its ends are on one device")
        flows.append(Flow(int(source), (int(target),), rows))
    seconds = tuple(tuple(map(float, node["time"])) for node in nodes)
    if any(len(row) != num_devices for row in seconds):
        raise ValueError(f"{len(nodes)} operators on {num_devices} devices need {len(nodes)} x {num_devices} times")
    for row in (*seconds, *(row for flow in flows for row in flow.seconds)):
        if any(not (math.isfinite(time) and time >= 0) for time in row):
            raise ValueError("a time is negative or not finite")
    return PlacementProblem(
        name=str(data["name"]),
        operators=tuple(str(node["name"]) for node in nodes),
        devices=tuple(str(device["name"]) for device in data["devices"]),
        seconds=seconds,
        memory_bytes=tuple(int(node["memory"]) for node in nodes),
        budget_bytes=tuple(int(device["mem"]) for device in data["devices"]),
        flows=tuple(flows),
        latency=tuple((0.0,) * num_devices for _ in ranks),
        congestion=congestion,
    )
