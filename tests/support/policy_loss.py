"""The loss of Doppler's policies by its definition, to compare with."""

from __future__ import annotations

import numpy as np

from coordinator.plan.graph.latency.doppler.features import Floats, ProblemFeatures
from coordinator.plan.graph.latency.doppler.policy import HIDDEN, Policy
from coordinator.plan.graph.latency.doppler.rollout import Rollouts


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
