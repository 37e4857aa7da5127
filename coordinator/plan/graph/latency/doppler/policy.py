"""The network of Doppler's two policies for a home: which operator next (SEL), and on which device (PLC). Pure.

The definition of the network, in numpy; `parameter_shapes` lists its weights. Shape letters: n operators, m edges,
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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from coordinator.plan.graph.latency.doppler.features import HOME, FeatureSet, Floats, Ints, ProblemFeatures

HIDDEN = 64
NUM_ROUNDS = 4
HEADS = ("select", "device", "place")  # the layers after the encoder, by the first part of their names
_SLOPE = 0.1
_NORM_EPSILON = 1e-5
# Of `heft_policy`: by how much SEL's logit rises with the b-level and falls with the start in the incumbent, and PLC's falls
# with log_finish and rises on the incumbent's device. Untrained, three rounds of 32 samples find 0.972 of the best list
# schedule, and one round 0.981 (20 instances).
_B_LEVEL_LOGIT, _START_LOGIT = 15.0, 15.0
_FINISH_LOGIT, _INCUMBENT_LOGIT = 20.0, 20.0


def parameter_shapes(features: FeatureSet) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights."""
    h, V, E, F = HIDDEN, len(features.vertex), len(features.edge), len(features.device)
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

    features: FeatureSet
    weights: Mapping[str, Floats]

    @property
    def num_parameters(self) -> int:
        return sum(weight.size for weight in self.weights.values())

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


def random_policy(rng: Generator, features: FeatureSet = HOME) -> Policy:
    """Initial weights: orthogonal matrices, biases of 0, normalisation of scale 1."""
    weights: dict[str, Floats] = {}
    for name, shape in parameter_shapes(features).items():
        if len(shape) == 2:
            weights[name] = _orthogonal(rng, *shape)
        else:
            weights[name] = np.full(shape, float(name.endswith("norm.weight")), np.float32)
    return Policy(features, weights)


def heft_policy(rng: Generator, other_logits: float = 0.3) -> Policy:
    """Initial weights of training: the greedy policy nearly keeps the incumbent; without one it is HEFT with contention.

    Two units of each layer carry features past the others: SEL prefers operators with a great b-level that start early in the
    incumbent, and PLC the incumbent's device and one with an early finish. `other_logits` scales the random rest; with 0 the
    policy reads only these four features.
    """
    policy = random_policy(rng)
    weights = policy.weights
    vertex, device = HOME.vertex.index, HOME.device.index
    carried = {
        "vertex": (vertex("b_level"), vertex("incumbent_start")),
        "select.hidden": (0, 1),
        "device": (device("log_finish"), device("incumbent")),
        "place.hidden": (3 * HIDDEN, 3 * HIDDEN + 1),
    }
    for name, columns in carried.items():
        weights[f"{name}.weight"][:2] = np.eye(weights[f"{name}.weight"].shape[1])[list(columns)]
    for name, scales in (("select", (_B_LEVEL_LOGIT, -_START_LOGIT)), ("place", (-_FINISH_LOGIT, _INCUMBENT_LOGIT))):
        output = weights[f"{name}.output.weight"]
        output *= other_logits
        output[0, :2] = scales
    return policy


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


def _orthogonal(rng: Generator, outputs: int, inputs: int) -> Floats:
    """A random matrix [outputs, inputs] with orthonormal rows or columns, whichever are fewer."""
    q, r = np.linalg.qr(rng.standard_normal((max(outputs, inputs), min(outputs, inputs))))
    q *= np.sign(np.diag(r))
    return np.ascontiguousarray(q if outputs >= inputs else q.T, dtype=np.float32)
