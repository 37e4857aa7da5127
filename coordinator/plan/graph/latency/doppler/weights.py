"""A policy as a file: safetensors, with the format's version and the features' names in its metadata. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coordinator.plan.graph.latency.doppler.features import HOME, PUBLISHED, FeatureSet
from coordinator.plan.graph.latency.doppler.policy import Policy, parameter_shapes
from hearth.errors import BadPolicy

FORMAT_VERSION = "1"  # of the network and of what its features mean
_VERSION_KEY, _FEATURES_KEY = "policy_version", "policy_features"


def policy_bytes(policy: Policy, notes: Mapping[str, str] | None = None) -> bytes:
    """The file of a policy. `notes` are added to the metadata: how it was trained, for example."""
    metadata = {**(notes or {}), _VERSION_KEY: FORMAT_VERSION, _FEATURES_KEY: _feature_list(policy.features)}
    data: bytes = save({name: np.ascontiguousarray(weight) for name, weight in policy.weights.items()}, metadata)
    return data


def policy_from_bytes(data: bytes, path: str) -> Policy:
    """Read a policy's file. `path` names it in errors. Raises BadPolicy."""
    try:
        tensors, metadata = load(data), _metadata(data)
    except (SafetensorError, ValueError, KeyError, TypeError):
        raise BadPolicy(path=path, reason="it was cut short, or is not a safetensors file") from None
    if metadata.get(_VERSION_KEY) != FORMAT_VERSION:
        found = metadata.get(_VERSION_KEY, "none")
        raise BadPolicy(path=path, reason=f"its version is {found:.20}, this Hearth reads version {FORMAT_VERSION}")
    features = next((each for each in (HOME, PUBLISHED) if metadata.get(_FEATURES_KEY) == _feature_list(each)), None)
    if features is None:
        raise BadPolicy(path=path, reason="it reads other features than this Hearth computes")
    expected = parameter_shapes(features)
    if tensors.keys() != expected.keys():
        odd = min(tensors.keys() ^ expected.keys())
        raise BadPolicy(path=path, reason=f"the tensor {odd:.80} is {'missing' if odd in expected else 'unknown'}")
    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype != np.float32:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise BadPolicy(path=path, reason=f"the tensor {name} is {found}, not float32 {list(shape)}")
        if not np.isfinite(tensor).all():
            raise BadPolicy(path=path, reason=f"the tensor {name} holds values that are not finite")
    return Policy(features, tensors)


def _metadata(data: bytes) -> dict[str, str]:
    """The metadata of a valid safetensors file; the library's `load` leaves it out."""
    header_bytes = int.from_bytes(data[:8], "little")
    found: dict[str, str] = json.loads(data[8 : 8 + header_bytes]).get("__metadata__") or {}
    return found


def _feature_list(features: FeatureSet) -> str:
    return json.dumps({"vertex": features.vertex, "edge": features.edge, "device": features.device})
