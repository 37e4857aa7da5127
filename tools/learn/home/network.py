"""The network of `coordinator.plan.graph.latency.doppler.policy` in torch, with gradients. That module defines it.

Shape letters as there, and T steps of an episode: one for each operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from coordinator.plan.graph.latency.doppler.features import Ints, ProblemFeatures
from coordinator.plan.graph.latency.doppler.policy import HIDDEN, NUM_ROUNDS, Policy, path_means

_SLOPE = 0.1


@dataclass(frozen=True)
class GraphTensors:
    """The static part of a problem as tensors."""

    vertices_nV: Tensor
    edges_mE: Tensor
    sources_m: Tensor
    targets_m: Tensor
    out_degrees_n1: Tensor  # at least 1
    in_degrees_n1: Tensor
    paths_nn: tuple[Tensor, Tensor]  # matrices of the means over the longest paths to an exit, and to an entry


class Encoding(NamedTuple):
    """As `policy.Encoding`, without the embeddings themselves."""

    select_logits_n: Tensor
    static_nh: Tensor
    placed_nh: Tensor


def graph_tensors(problem: ProblemFeatures) -> GraphTensors:
    """The tensors that `HomeNetwork.encode` reads."""
    n = len(problem.vertices)

    def degrees(ends: Ints) -> Tensor:
        return torch.from_numpy(np.maximum(np.bincount(ends, minlength=n), 1).astype(np.float32)[:, None])

    def means(path: Ints) -> Tensor:
        return torch.from_numpy(path_means(np.eye(n, dtype=np.float32), path))

    return GraphTensors(
        torch.from_numpy(problem.vertices),
        torch.from_numpy(problem.edges),
        torch.from_numpy(problem.sources),
        torch.from_numpy(problem.targets),
        degrees(problem.sources),
        degrees(problem.targets),
        (means(problem.following), means(problem.preceding)),
    )


class HomeNetwork:
    """The weights of a policy with gradients. They share memory with `policy`, which follows each optimiser's step."""

    def __init__(self, policy: Policy) -> None:
        self.policy = Policy(policy.features, {name: each.copy() for name, each in policy.weights.items()})
        self.weights = {name: torch.from_numpy(each).requires_grad_() for name, each in self.policy.weights.items()}

    def encode(self, graph: GraphTensors) -> Encoding:
        """Embed all operators, and compute SEL's logits."""
        x, e, n, h = graph.vertices_nV, graph.edges_mE, len(graph.vertices_nV), HIDDEN
        hidden = self._layer("input", x)
        for index in range(NUM_ROUNDS):
            name = f"rounds.{index}"
            incoming = self._message(f"{name}.incoming", hidden, graph.sources_m, e)
            outgoing = self._message(f"{name}.outgoing", hidden, graph.targets_m, e)
            update = self._layer(
                f"{name}.update",
                torch.cat(
                    [
                        hidden,
                        hidden.new_zeros(n, h).index_add(0, graph.targets_m, incoming) / graph.in_degrees_n1,
                        hidden.new_zeros(n, h).index_add(0, graph.sources_m, outgoing) / graph.out_degrees_n1,
                    ],
                    dim=1,
                ),
            )
            norm = self.weights[f"{name}.norm.weight"], self.weights[f"{name}.norm.bias"]
            hidden = functional.layer_norm(hidden + update, (h,), *norm)
        vertex = self._layer("vertex", x)
        select = self._layer("select.hidden", torch.cat([vertex, hidden, *(p @ hidden for p in graph.paths_nn)], dim=1))
        weight = self.weights["place.hidden.weight"]
        return Encoding(
            (select @ self.weights["select.output.weight"].T)[:, 0],
            functional.linear(
                torch.cat([vertex, hidden], dim=1), weight[:, : 2 * h], self.weights["place.hidden.bias"]
            ),
            hidden @ weight[:, 2 * h : 3 * h].T,
        )

    def place_logits(self, static_BTh: Tensor, placed_BTKh: Tensor, devices_BTKF: Tensor) -> Tensor:
        """PLC's logits [B, T, K], from an operator's `static` and the mean of `placed` on each device."""
        device = self._layer("device", devices_BTKF) @ self.weights["place.hidden.weight"][:, 3 * HIDDEN :].T
        hidden = functional.leaky_relu(device + placed_BTKh + static_BTh[:, :, None], _SLOPE)
        logits: Tensor = (hidden @ self.weights["place.output.weight"].T)[..., 0]
        return logits

    def _layer(self, name: str, x: Tensor) -> Tensor:
        y: Tensor = functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
        return functional.leaky_relu(y, _SLOPE)

    def _message(self, name: str, hidden_nh: Tensor, ends_m: Tensor, edges_mE: Tensor) -> Tensor:
        """A layer of [H, e] on every edge: H is multiplied once per operator."""
        weight = self.weights[f"{name}.weight"]
        own = (hidden_nh @ weight[:, :HIDDEN].T)[ends_m]
        return functional.leaky_relu(
            own + functional.linear(edges_mE, weight[:, HIDDEN:], self.weights[f"{name}.bias"]), _SLOPE
        )
