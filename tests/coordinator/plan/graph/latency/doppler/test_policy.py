"""The policies' network against its definition, and its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from safetensors.numpy import save
from support.placement_problems import random_problem
from support.policies import random_policy, shaken_policy

from coordinator.plan.graph.latency.doppler.features import ProblemFeatures, problem_features
from coordinator.plan.graph.latency.doppler.policy import (
    NUM_ROUNDS,
    Policy,
    path_means,
    policy_bytes,
    policy_from_bytes,
)
from coordinator.plan.graph.latency.doppler.rollout import draw_noise, roll_out
from hearth.errors import BadPolicy

SHAKEN = Policy({name: each.astype(np.float32) for name, each in shaken_policy(5).weights.items()})


class ByDefinition:
    """The network as the docstring of policy.py states it, operator by operator, in float64."""

    def __init__(self, policy: Policy, problem: ProblemFeatures) -> None:
        self.weights = {name: weight.astype(float) for name, weight in policy.weights.items()}
        x, n = problem.vertices.astype(float), len(problem.vertices)
        edges = list(zip(problem.sources.tolist(), problem.targets.tolist(), problem.edges.astype(float), strict=True))
        H = [self.layer("input", row) for row in x]
        for r in range(NUM_ROUNDS):
            name = f"rounds.{r}"
            ins = [[self.layer(f"{name}.incoming", H[u], e) for u, w, e in edges if w == v] for v in range(n)]
            outs = [[self.layer(f"{name}.outgoing", H[w], e) for u, w, e in edges if u == v] for v in range(n)]
            H = [self.norm(f"{name}.norm", H[v] + self.update(name, H[v], ins[v], outs[v])) for v in range(n)]
        self.H, self.Z = np.array(H), [self.layer("vertex", row) for row in x]
        self.select = []
        for v in range(n):
            means = [self.path_mean(v, path.tolist()) for path in (problem.following, problem.preceding)]
            hidden = self.layer("select.hidden", self.Z[v], self.H[v], *means)
            self.select.append(float(self.weights["select.output.weight"][0] @ hidden))

    def place(self, v: int, on_device: list[int], x_d: np.ndarray) -> float:
        S = self.H[on_device].mean(axis=0) if on_device else np.zeros(64)
        hidden = self.layer("place.hidden", self.Z[v], self.H[v], S, self.layer("device", x_d))
        return float(self.weights["place.output.weight"][0] @ hidden)

    def layer(self, name: str, *parts: np.ndarray) -> np.ndarray:
        y = self.weights[f"{name}.weight"] @ np.concatenate(parts) + self.weights[f"{name}.bias"]
        return np.where(y > 0, y, 0.1 * y)

    def update(self, name: str, own: np.ndarray, *messages: list[np.ndarray]) -> np.ndarray:
        means = [np.mean(each, axis=0) if each else np.zeros(64) for each in messages]
        return self.layer(f"{name}.update", own, *means)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scaled = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def path_mean(self, v: int, path: list[int]) -> np.ndarray:
        visited = []
        while v < len(path):
            visited.append(v)
            v = path[v]
        return self.H[visited].mean(axis=0)


def test_rollouts_follow_the_definition_of_the_network() -> None:
    problem = problem_features(random_problem(np.random.default_rng(2), spare_memory=0.3))
    policy = SHAKEN
    reference = ByDefinition(policy, problem)
    assert policy.encode(problem).select_logits == pytest.approx(np.array(reference.select), abs=1e-5)
    found = roll_out(problem, policy, draw_noise(problem.problem, 3, np.random.default_rng(0)))
    K = problem.problem.num_devices
    for b in np.flatnonzero(found.complete):
        on_device: list[list[int]] = [[] for _ in range(K)]
        for v in found.orders[b].tolist():
            logits = np.array([reference.place(v, on_device[d], found.features[b, v, d]) for d in range(K)])
            shares = np.exp(logits) * found.allowed[b, v]
            assert found.probabilities[b, v] == pytest.approx(shares / shares.sum(), abs=1e-5)
            on_device[found.assignments[b, v]].append(v)


def test_path_means_of_long_and_short_paths() -> None:
    values = np.arange(7, dtype=np.float32)[:, None]
    path = np.array([2, 2, 3, 4, 5, 7, 7])  # 0 and 1 join; 6 is alone
    assert path_means(values, path)[:, 0] == pytest.approx([14 / 5, 3, 14 / 4, 4, 4.5, 5, 6])


def test_the_policy_is_small() -> None:
    policy = random_policy(np.random.default_rng(0))
    assert sum(weight.size for weight in policy.weights.values()) == 120_384
    assert len(policy_bytes(policy)) < 600_000


def test_a_policy_survives_its_file() -> None:
    policy = SHAKEN
    found = policy_from_bytes(policy_bytes(policy, {"episodes": "4000"}), "a file")
    assert found.weights.keys() == policy.weights.keys()
    for name, weight in policy.weights.items():
        assert np.array_equal(found.weights[name], weight)


def _edited(metadata: Mapping[str, str] = {}, **tensors: np.ndarray | None) -> bytes:
    """The file of a policy with other metadata or tensors; None removes a tensor."""
    policy = random_policy(np.random.default_rng(0))
    data = policy_bytes(policy)
    own = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    every = {**policy.weights, **{name.replace("_", "."): each for name, each in tensors.items()}}
    return save({name: each for name, each in every.items() if each is not None}, {**own, **metadata})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: b"", "cut short"),
        (lambda: b"not safetensors", "cut short"),
        (lambda: _edited()[:-1], "cut short"),
        (lambda: _edited()[:300], "cut short"),
        (lambda: save({"input.bias": np.zeros(64, np.float32)}), "version is none"),
        (lambda: _edited({"policy_version": "2"}), "version is 2, this Hearth reads version 1"),
        (lambda: _edited({"policy_features": "[]"}), "other features"),
        (lambda: _edited(place_output_weight=None), "place.output.weight is missing"),
        (lambda: _edited(more=np.zeros(3)), "more is unknown"),
        (lambda: _edited(device_bias=np.zeros(63, np.float32)), r"device.bias is float32 \[63\], not float32 \[64\]"),
        (lambda: _edited(device_bias=np.zeros(64)), r"device.bias is float64 \[64\]"),
        (lambda: _edited(device_bias=np.full(64, np.nan, np.float32)), "not finite"),
    ],
)
def test_a_bad_file_is_one_error_that_names_the_fault(make: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(BadPolicy, match=reason) as caught:
        policy_from_bytes(make(), "policy.safetensors")
    assert caught.value.path == "policy.safetensors"
