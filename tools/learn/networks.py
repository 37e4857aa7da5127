"""The dual policy's networks (Doppler, section 5.2): message passing, SEL that picks an operator, PLC that picks a device.

Each policy has an encoder of its own. No weight depends on the numbers of operators and devices. Shape letters as in
`instance`, and H width, R rows (episodes or steps with different contents), D device features; "..." are rows of any shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.learn.clock import NUM_DEVICE_FEATURES, NUM_PARTIAL_FEATURES
from tools.learn.instance import NUM_STATIC_FEATURES, Instance

_SLOPE = 0.1  # of LeakyReLU
_HEAD_WIDTH = 64
_BLOCK_EDGES = 16  # edges of one value that one matrix product carries
_EPSILON = 1e-5  # keeps the gradient of a deviation of 0 finite


@dataclass(frozen=True)
class Shape:
    """Sizes of the networks; the defaults are the paper's."""

    width: int = 128
    num_rounds: int = 6
    per_step: bool = False  # message passing per step: operators have features of the partial assignment, too


class GraphTensors(NamedTuple):
    """The tensors of an instance. Edges with one value share one message matrix, so they are grouped into blocks."""

    static_NX: Tensor
    b_paths_NN: Tensor
    t_paths_NN: Tensor
    values: Tensor  # the distinct values of edges
    block_values: Tensor  # by block, the index of its value
    block_sources: Tensor  # (blocks, edges), operators
    block_targets: Tensor  # (blocks, edges), operators; N for padding


def graph_tensors(instance: Instance) -> GraphTensors:
    """The tensors that the networks read."""
    n = len(instance.static_NX)
    values, of_edge = np.unique(instance.edge_values_M, return_inverse=True)
    groups = [np.flatnonzero(of_edge == value) for value in range(len(values))]
    size = min(_BLOCK_EDGES, max(map(len, groups), default=1))
    blocks = [(value, g[at : at + size]) for value, g in enumerate(groups) for at in range(0, len(g), size)]
    sources, targets = np.zeros((len(blocks), size), np.int64), np.full((len(blocks), size), n, np.int64)
    for row, (_, edges) in enumerate(blocks):
        sources[row, : len(edges)] = instance.edge_sources_M[edges]
        targets[row, : len(edges)] = instance.edge_targets_M[edges]
    return GraphTensors(
        torch.from_numpy(instance.static_NX),
        torch.from_numpy(instance.b_paths_NN),
        torch.from_numpy(instance.t_paths_NN),
        torch.from_numpy(values),
        torch.tensor([value for value, _ in blocks], dtype=torch.int64),
        torch.from_numpy(sources),
        torch.from_numpy(targets),
    )


class Encoder(nn.Module):  # type: ignore[misc]
    """NNConv and GRU: rounds of message passing with shared weights (Gilmer et al., 2017)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self._num_rounds = shape.num_rounds
        self.embed = _linear(NUM_STATIC_FEATURES + NUM_PARTIAL_FEATURES * shape.per_step, width)
        self.edge = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width * width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.gru = nn.GRUCell(width, width)

    def forward(self, features_RNX: Tensor, graph: GraphTensors) -> Tensor:
        """Embeddings (R, N, H): a message is the matrix of its edge times the sender's embedding; messages are summed."""
        hidden_RNH = functional.relu(self.embed(features_RNX))
        rows, n, width = hidden_RNH.shape
        matrices = self.edge(graph.values[:, None]).view(-1, width, width)[graph.block_values]
        targets = graph.block_targets.flatten()
        for _ in range(self._num_rounds):
            sent = torch.einsum("rbeh,bhm->rbem", hidden_RNH[:, graph.block_sources], matrices)
            sums = hidden_RNH.new_zeros(rows, n + 1, width).index_add(1, targets, sent.flatten(1, 2))[:, :n]
            inputs = functional.relu(sums + self.bias).reshape(-1, width)
            hidden_RNH = self.gru(inputs, hidden_RNH.reshape(-1, width)).view(rows, n, width)
        return functional.leaky_relu(hidden_RNH, _SLOPE)


class SelectNetwork(nn.Module):  # type: ignore[misc]
    """SEL: a score for every operator. Softmax over the candidates gives the next operator to place."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.encoder = Encoder(shape)
        self.own = _linear(NUM_STATIC_FEATURES, shape.width)
        self.hidden = _linear(4 * shape.width, _HEAD_WIDTH)
        self.score = _linear(_HEAD_WIDTH, 1)

    def forward(self, embedding_RNH: Tensor, graph: GraphTensors) -> Tensor:
        """Logits (R, N) from the operator, its embedding, and the sums of embeddings along its b-path and its t-path."""
        own_RNH = _leaky(self.own(graph.static_NX)).expand_as(embedding_RNH)
        on_paths = [standardised(paths @ embedding_RNH) for paths in (graph.b_paths_NN, graph.t_paths_NN)]
        logits: Tensor = self.score(_leaky(self.hidden(torch.cat([own_RNH, embedding_RNH, *on_paths], dim=-1))))
        return logits[..., 0]


class PlaceNetwork(nn.Module):  # type: ignore[misc]
    """PLC: a score for every device, for a given operator. Softmax over the devices with room gives its device."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.encoder = Encoder(shape)
        self.device = _linear(NUM_DEVICE_FEATURES, shape.width)
        self.own = _linear(NUM_STATIC_FEATURES, shape.width)
        self.hidden = _linear(4 * shape.width, _HEAD_WIDTH)
        self.score = _linear(_HEAD_WIDTH, 1)

    def operator_part(self, embedding_RNH: Tensor, graph: GraphTensors) -> Tensor:
        """The part of the hidden layer (R, N, 64) that does not depend on devices: the operator and its embedding."""
        own_RNH = _leaky(self.own(graph.static_NX)).expand_as(embedding_RNH)
        width = embedding_RNH.shape[-1]
        weight = self.hidden.weight[:, width : 3 * width]
        return functional.linear(torch.cat([own_RNH, embedding_RNH], dim=-1), weight, self.hidden.bias)

    def forward(self, operator_part: Tensor, features_KD: Tensor, placed_KH: Tensor) -> Tensor:
        """Logits (..., K) from the operator's part (..., 64), device features (..., K, D), and sums (..., K, H).

        The sums are of the embeddings of the operators that are already on each device.
        """
        width = placed_KH.shape[-1]
        device = functional.linear(_leaky(self.device(features_KD)), self.hidden.weight[:, :width])
        placed = functional.linear(standardised(placed_KH), self.hidden.weight[:, 3 * width :])
        logits: Tensor = self.score(_leaky(operator_part[..., None, :] + device + placed))
        return logits[..., 0]


class DualPolicy(nn.Module):  # type: ignore[misc]
    """SEL and PLC with separate weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.select = SelectNetwork(shape)
        self.place = PlaceNetwork(shape)


def standardised(values: Tensor) -> Tensor:
    """Values with mean 0 and deviation 1 along the last axis but one."""
    centred = values - values.mean(-2, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-2, keepdim=True) + _EPSILON)


def _leaky(values: Tensor) -> Tensor:
    return functional.leaky_relu(values, _SLOPE)


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
