"""Device profiles as JSON files, written by `hearth plan --save-profile` and read by `--load-profile`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from coordinator.models.file_kinds import FileKind, read_json_file, why_wrong_kind
from coordinator.models.graph_file import GraphFile
from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster, cluster_from_links
from hearth.errors import BadSetting
from hearth.plan.model_spec import ModelSpec
from hearth.plan.profile import ClusterProfile, Link, Seconds, SharedMedium
from hearth.validation import first_error


class SavedTransformerProfile(ClusterProfile):
    """A ClusterProfile with its model: block latencies are valid only for layers of the same shape as those of `model`."""

    version: Literal[1] = 1
    kind: Literal["transformer"] = "transformer"
    model: ModelSpec | None = None
    deterministic: bool = False  # as in `BlocksOf`: the times are those of other kernels


class SavedGraphProfile(BaseModel):
    """A GraphCluster with its links as a list. `seconds` [n][K]: n operators on K devices. `sha256` names the graph."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    kind: Literal["graph"] = "graph"
    name: str
    sha256: str
    measured: bool
    devices: tuple[ClusterDevice, ...]
    links: tuple[Link, ...]
    media: tuple[SharedMedium, ...] = ()
    operators: tuple[str, ...]
    seconds: tuple[tuple[Seconds, ...], ...]


_F = TypeVar("_F", SavedTransformerProfile, SavedGraphProfile)
_KINDS: dict[type, FileKind] = {SavedTransformerProfile: "transformer profile", SavedGraphProfile: "graph profile"}


def saved_graph_profile(graph: GraphFile, cluster: GraphCluster) -> SavedGraphProfile:
    """The file content for a cluster that was profiled for this graph."""
    return SavedGraphProfile(
        name=graph.spec.name,
        sha256=graph.fingerprint,
        measured=cluster.measured,
        devices=cluster.devices,
        links=cluster.links(),
        media=cluster.media,
        operators=tuple(operator.name for operator in graph.spec.operators),
        seconds=cluster.seconds,
    )


def read_transformer_profile(path: Path, spec: ModelSpec, deterministic: bool = False) -> ClusterProfile:
    """Read a profile for a model of this shape. Raises BadSetting."""
    profile = _read_profile(path, SavedTransformerProfile)
    if profile.model is not None and _layer_shape(profile.model) != _layer_shape(spec):
        raise _bad_profile(
            path, f"was measured for {profile.model.name}, whose layers have another shape than {spec.name}'s"
        )
    if profile.deterministic != deterministic:
        raise _bad_profile(path, f"was measured {'with' if profile.deterministic else 'without'} --deterministic")
    if spec.causal and not all(device.blocks.decode_seconds_per_byte for device in profile.devices):
        raise _bad_profile(path, "has no decode speed for its devices; measure them again")
    return profile


def read_graph_profile(path: Path, graph: GraphFile) -> GraphCluster:
    """Read the profile of this graph. Raises BadSetting."""
    profile = _read_profile(path, SavedGraphProfile)
    names = tuple(operator.name for operator in graph.spec.operators)
    if profile.sha256 != graph.fingerprint or profile.operators != names:
        raise _bad_profile(path, f"was measured for another graph than {graph.path}, or with another --dim")
    if [len(row) for row in profile.seconds] != [len(profile.devices)] * len(names):
        raise _bad_profile(
            path, f"must have {len(names)} rows of {len(profile.devices)} seconds, for operators on devices"
        )
    links = {(link.source, link.target): link for link in profile.links}
    return cluster_from_links(profile.devices, profile.seconds, links, profile.measured, profile.media)


def _read_profile(path: Path, kind: type[_F]) -> _F:
    """Read a profile; it must have a link for each ordered pair of its devices. Raises BadSetting."""
    content = read_json_file(path, partial(_bad_profile, path))
    if reason := why_wrong_kind(content, _KINDS[kind]):
        raise _bad_profile(path, reason)
    try:
        profile = kind.model_validate(content)
    except ValidationError as error:
        raise _bad_profile(path, f"is not a valid profile ({first_error(error)})") from None
    ids = [device.device_id for device in profile.devices]
    if len(set(ids)) < len(ids):
        raise _bad_profile(path, "names a device twice")
    links = {(link.source, link.target) for link in profile.links}
    if missing := [(a, b) for a in ids for b in ids if a != b and (a, b) not in links]:
        raise _bad_profile(path, f"lacks the link from {missing[0][0]} to {missing[0][1]}")
    return profile


def _layer_shape(spec: ModelSpec) -> tuple[object, ...]:
    layer = (spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.ffn_size)
    return (*layer, spec.causal, spec.gated, spec.weights)


def _bad_profile(path: Path, reason: str) -> BadSetting:
    return BadSetting(setting="--load-profile", reason=f"{path} {reason}")
