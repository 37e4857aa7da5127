"""Policies of Doppler with random weights, and their loss by its definition."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from coordinator.plan.graph.latency.doppler.features import Floats, ProblemFeatures
from coordinator.plan.graph.latency.doppler.policy import HIDDEN, Policy, parameter_shapes
from coordinator.plan.graph.latency.doppler.rollout import Rollouts


def random_policy(rng: Generator) -> Policy:
    """Orthogonal matrices, biases of 0, normalisation of scale 1."""
    weights: dict[str, Floats] = {}
    for name, shape in parameter_shapes().items():
        if len(shape) == 2:
            weights[name] = _orthogonal(rng, *shape)
        else:
            weights[name] = np.full(shape, float(name.endswith("norm.weight")), np.float32)
    return Policy(weights)


def shaken_policy(seed: int) -> Policy:
    """Random weights whose biases and normalisations are random too, in double precision."""
    rng = np.random.default_rng(seed)
    return Policy({name: each + rng.normal(0, 0.1, each.shape) for name, each in random_policy(rng).weights.items()})


def _orthogonal(rng: Generator, outputs: int, inputs: int) -> Floats:
    """A random matrix [outputs, inputs] with orthonormal rows or columns, whichever are fewer."""
    q, r = np.linalg.qr(rng.standard_normal((max(outputs, inputs), min(outputs, inputs))))
    q *= np.sign(np.diag(r))
    return np.ascontiguousarray(q if outputs >= inputs else q.T, dtype=np.float32)


def loss(
    problem: ProblemFeatures, policy: Policy, episodes: Rollouts, weights_B: Floats, entropy_weight: float
) -> float:
    """The loss by its definition, step by step."""
    encoding, placement = policy.encode(problem), problem.problem
    total = 0.0
    for b in np.flatnonzero(episodes.complete):
        on_device: list[list[int]] = [[] for _ in range(placement.num_devices)]
        placed: set[int] = set()
        for v in episodes.orders[b].tolist():
            candidates = [
                i for i in range(len(placement.operators))
                if i not in placed and placed.issuperset(placement.predecessors[i])
            ]  # fmt: skip
            means = np.array([encoding.placed[each].mean(axis=0) if each else np.zeros(HIDDEN) for each in on_device])
            places = policy.place_logits(encoding.static[[v]], means[None], episodes.features[b, [v]])[0]
            device = int(episodes.assignments[b, v])
            allowed = np.flatnonzero(episodes.allowed[b, v]).tolist()
            for logits, chosen in (
                (encoding.select_logits[candidates], candidates.index(v)),
                (places[allowed], allowed.index(device)),
            ):
                logs = logits - np.log(np.exp(logits).sum())
                total -= weights_B[b] * logs[chosen] - entropy_weight * float((np.exp(logs) * logs).sum())
            on_device[device].append(v)
            placed.add(v)
    return total
