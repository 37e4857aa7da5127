"""The network of Doppler's two policies for a home: which operator next (SEL), and on which device (PLC); its file. Pure.

The definition of the network, in numpy; `parameter_shapes` lists its weights. A policy's file is a safetensors file with the
format's version and the features' names in its metadata. Shape letters: n operators, m edges,
B episodes, K devices, h hidden width; V, E and F features of an operator, an edge and a device. Every linear layer is
y = x W^T + b with W [out, in], as in torch; [a, b] concatenates features; act is LeakyReLU with slope 0.1.

Encoder, once per problem (sizes after SPEC of Doppler, arXiv 2505.23131, 5.2, made smaller):
    H = act(input x)
    for each round:
        incoming[v] = mean over edges (u, v) of act(rounds.r.incoming [H[u], e]);  0 without edges
        outgoing[u] = mean over edges (u, v) of act(rounds.r.outgoing [H[v], e]);  0 without edges
        H = norm(H + act(rounds.r.update [H, incoming, outgoing]))                 layer normalisation over h
    Z = act(vertex x)
SEL: logit(v) = select.output act(select.hidden [Z, H, to_exit, to_entry]), softmax over the operators whose predecessors
are placed. to_exit[v] is the mean of H over the longest path from v to an exit, to_entry[v] likewise to an entry.
PLC: logit(d) = place.output act(place.hidden [Z[v], H[v], S[d], Y[d]]), softmax over the devices with room. S[d] is the
mean of H over the operators on d (0 without any), and Y[d] = act(device x_d).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coordinator.plan.graph.latency.doppler.features import (
    DEVICE_FEATURES,
    EDGE_FEATURES,
    VERTEX_FEATURES,
    Floats,
    Ints,
    ProblemFeatures,
)
from hearth.errors import BadPolicy

HIDDEN = 64
NUM_ROUNDS = 4
HEADS = ("select", "device", "place")  # the layers after the encoder, by the first part of their names
_SLOPE = 0.1
_NORM_EPSILON = 1e-5
FORMAT_VERSION = "1"  # of the network and of what its features mean
_VERSION_KEY, _FEATURES_KEY = "policy_version", "policy_features"


def parameter_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights."""
    h, V, E, F = HIDDEN, len(VERTEX_FEATURES), len(EDGE_FEATURES), len(DEVICE_FEATURES)
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, inputs: int, outputs: int = h, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    linear("input", V)
    for index in range(NUM_ROUNDS):
        linear(f"rounds.{index}.incoming", h + E)
        linear(f"rounds.{index}.outgoing", h + E)
        linear(f"rounds.{index}.update", 3 * h)
        shapes[f"rounds.{index}.norm.weight"] = shapes[f"rounds.{index}.norm.bias"] = (h,)
    linear("vertex", V)
    linear("select.hidden", 4 * h)
    linear("select.output", h, 1, bias=False)  # a bias would cancel in the softmax
    linear("device", F)
    linear("place.hidden", 4 * h)
    linear("place.output", h, 1, bias=False)
    return shapes


class Encoding(NamedTuple):
    """What the policies read of a problem, once per problem and policy."""

    select_logits: Floats  # [n]
    static: Floats  # [n, h], the part of place.hidden that reads Z, H and the bias
    placed: Floats  # [n, h], the part of place.hidden that reads S, for each operator alone: its mean is that of S


@dataclass(frozen=True)
class Policy:
    """Both policies: weights by name, float32, with the shapes of `parameter_shapes`."""

    weights: Mapping[str, Floats]

    def encode(self, problem: ProblemFeatures) -> Encoding:
        """Embed all operators, and compute SEL's logits."""
        return self.read(self.embed(problem))

    def embed(self, problem: ProblemFeatures) -> Floats:
        """[Z, H, to_exit, to_entry] of all operators, [n, 4h]. It does not depend on the weights of the heads."""
        x, e = problem.vertices, problem.edges
        sources, targets, n = problem.sources, problem.targets, len(x)
        into, out = _Mean(targets, n), _Mean(sources, n)
        hidden = act(self._linear("input", x))
        for index in range(NUM_ROUNDS):
            name = f"rounds.{index}"
            incoming = into(act(self._message(f"{name}.incoming", hidden, sources, e)))
            outgoing = out(act(self._message(f"{name}.outgoing", hidden, targets, e)))
            update = act(self._linear(f"{name}.update", np.concatenate([hidden, incoming, outgoing], axis=1)))
            hidden = self._norm(f"{name}.norm", hidden + update)
        vertex = act(self._linear("vertex", x))
        paths = [path_means(hidden, path) for path in (problem.following, problem.preceding)]
        embedded: Floats = np.concatenate([vertex, hidden, *paths], axis=1)
        return embedded

    def read(self, embedded: Floats) -> Encoding:
        """SEL's logits, and the parts of PLC that depend on operators alone."""
        select = act(self._linear("select.hidden", embedded))
        h, weight = HIDDEN, self.weights["place.hidden.weight"]
        return Encoding(
            (select @ self.weights["select.output.weight"].T)[:, 0],
            embedded[:, : 2 * h] @ weight[:, : 2 * h].T + self.weights["place.hidden.bias"],
            embedded[:, h : 2 * h] @ weight[:, 2 * h : 3 * h].T,
        )

    def place_logits(self, static_Bh: Floats, placed_BKh: Floats, devices_BKF: Floats) -> Floats:
        """PLC's logits [B, K], from an operator's `Encoding.static` and the mean of `placed` on each device."""
        B, K, F = devices_BKF.shape
        device = act(self._linear("device", devices_BKF.reshape(B * K, F)))
        hidden = (device @ self.weights["place.hidden.weight"][:, 3 * HIDDEN :].T).reshape(B, K, HIDDEN)
        hidden += placed_BKh
        hidden += static_Bh[:, None]
        logits: Floats = (act(hidden) @ self.weights["place.output.weight"].T)[:, :, 0]
        return logits

    def _linear(self, name: str, x: Floats) -> Floats:
        y: Floats = x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]
        return y

    def _message(self, name: str, hidden: Floats, ends: Ints, edges: Floats) -> Floats:
        """A linear layer of [H, e] on every edge: H is multiplied once per operator."""
        weight = self.weights[f"{name}.weight"]
        y: Floats = (hidden @ weight[:, :HIDDEN].T)[ends] + (
            edges @ weight[:, HIDDEN:].T + self.weights[f"{name}.bias"]
        )
        return y

    def _norm(self, name: str, x: Floats) -> Floats:
        centred = x - x.mean(axis=1, keepdims=True)
        scale = np.sqrt((centred * centred).mean(axis=1, keepdims=True) + np.float32(_NORM_EPSILON))
        y: Floats = centred / scale * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
        return y


def path_means(hidden_nh: Floats, path_n: Ints) -> Floats:
    """Mean of H over the path from each operator; `path_n[v]` is the operator after v, or n at the path's end.

    Doubles the length of the summed paths in each step.
    """
    n = len(path_n)
    after = np.append(path_n, n)
    sums = np.concatenate([hidden_nh, np.zeros_like(hidden_nh[:1])])  # the last row is the end of all paths
    lengths = np.append(np.ones(n, hidden_nh.dtype), np.zeros(1, hidden_nh.dtype))
    while (after < n).any():
        sums, lengths, after = sums + sums[after], lengths + lengths[after], after[after]
    means: Floats = sums[:n] / lengths[:n, None]
    return means


class _Mean:
    """Mean of messages by the operator that receives them; 0 for an operator without messages."""

    def __init__(self, receivers: Ints, n: int) -> None:
        self._order = np.argsort(receivers, kind="stable")
        counts = np.bincount(receivers, minlength=n)
        self._receiving = np.flatnonzero(counts)
        self._counts = counts[self._receiving].astype(np.float32)[:, None]
        self._starts = (np.cumsum(counts) - counts)[self._receiving]
        self._n = n

    def __call__(self, messages: Floats) -> Floats:
        means = np.zeros((self._n, messages.shape[1]), messages.dtype)
        if len(messages):
            means[self._receiving] = np.add.reduceat(messages[self._order], self._starts) / self._counts
        return means


def act(x: Floats) -> Floats:
    """LeakyReLU."""
    y: Floats = np.maximum(x, np.float32(_SLOPE) * x)
    return y


def act_slopes(y: Floats) -> Floats:
    """The derivative of `act` where its result is y."""
    slopes: Floats = np.where(y > 0, np.float32(1), np.float32(_SLOPE))
    return slopes


def softmax(logits_SK: Floats) -> Floats:
    """Probabilities; each row sums to 1."""
    powers: Floats = np.exp(logits_SK - logits_SK.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers


# ---- its file -----------------------------------------------------------------------------------------------------------


def policy_bytes(policy: Policy, notes: Mapping[str, str] | None = None) -> bytes:
    """The file of a policy. `notes` are added to the metadata: how it was trained, for example."""
    metadata = {**(notes or {}), _VERSION_KEY: FORMAT_VERSION, _FEATURES_KEY: _feature_list()}
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
    if metadata.get(_FEATURES_KEY) != _feature_list():
        raise BadPolicy(path=path, reason="it reads other features than this Hearth computes")
    expected = parameter_shapes()
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
    return Policy(tensors)


def _metadata(data: bytes) -> dict[str, str]:
    """The metadata of a valid safetensors file; the library's `load` leaves it out."""
    header_bytes = int.from_bytes(data[:8], "little")
    found: dict[str, str] = json.loads(data[8 : 8 + header_bytes]).get("__metadata__") or {}
    return found


def _feature_list() -> str:
    return json.dumps({"vertex": VERTEX_FEATURES, "edge": EDGE_FEATURES, "device": DEVICE_FEATURES})
