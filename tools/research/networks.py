"""The dual policy's networks (Doppler, section 5.2): message passing, SEL that picks an operator, PLC that picks a device.

Each policy has an encoder of its own. No weight depends on the numbers of operators and devices.

Shape letters: N operators, K devices, X static features, D device features, H width, C the width of PLC's hidden layer; "..."
are rows of any shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_STATIC_FEATURES, NUM_DEVICE_FEATURES = 5, 5
_SLOPE = 0.1  # of LeakyReLU
_HEAD_WIDTH = 64
_EPSILON = 1e-5  # keeps the gradient of a deviation of 0 finite


@dataclass(frozen=True)
class Shape:
    """Sizes of the networks; the defaults are the paper's."""

    width: int = 128
    num_rounds: int = 6


class GraphTensors(NamedTuple):
    """What the networks read of a graph. An edge is a flow to one of its targets, in either direction.

    Edges with one value share one message matrix. Task graphs have few values.
    """

    static_NX: Tensor  # compute, transfers in, transfers out, t-level, b-level; standardised over operators
    b_paths_NN: Tensor  # row v: 1 for the operators on v's longest path to an exit, v included
    t_paths_NN: Tensor  # the same to an entry
    values: Tensor  # the distinct mean transfer seconds of edges, standardised over edges
    edge_values: Tensor  # by edge, the index of its value
    senders: Tensor  # by edge, an operator
    receivers: Tensor


class Encoding(NamedTuple):
    """What both policies derive from the graph."""

    operator_logits_N: Tensor
    embedding_NH: Tensor  # PLC's
    operator_part_NC: Tensor  # PLC's


class Encoder(nn.Module):  # type: ignore[misc]
    """NNConv and GRU: rounds of message passing with shared weights (Gilmer et al., 2017)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self._num_rounds = shape.num_rounds
        self.embed = _linear(NUM_STATIC_FEATURES, width)
        self.edge = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width * width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.gru = nn.GRUCell(width, width)

    def forward(self, graph: GraphTensors) -> Tensor:
        """Embeddings (N, H): a message is the matrix of its edge times the sender's embedding; messages are summed."""
        hidden_NH = functional.relu(self.embed(graph.static_NX))
        width = hidden_NH.shape[1]
        matrices_VHM = self.edge(graph.values[:, None]).view(-1, width, width)
        for _ in range(self._num_rounds):
            sent_VNM = torch.einsum("nh,vhm->vnm", hidden_NH, matrices_VHM)
            messages = sent_VNM[graph.edge_values, graph.senders]
            sums = torch.zeros_like(hidden_NH).index_add(0, graph.receivers, messages)
            hidden_NH = self.gru(functional.relu(sums + self.bias), hidden_NH)
        return functional.leaky_relu(hidden_NH, _SLOPE)


class SelectNetwork(nn.Module):  # type: ignore[misc]
    """SEL: a score for every operator. Softmax over the candidates gives the next operator to place."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.encoder = Encoder(shape)
        self.own = _linear(NUM_STATIC_FEATURES, shape.width)
        self.hidden = _linear(4 * shape.width, _HEAD_WIDTH)
        self.score = _linear(_HEAD_WIDTH, 1)

    def forward(self, embedding_NH: Tensor, graph: GraphTensors) -> Tensor:
        """Logits (N) from the operator, its embedding, and the sums of embeddings along its b-path and its t-path."""
        own_NH = _leaky(self.own(graph.static_NX))
        on_paths = [standardised(paths @ embedding_NH) for paths in (graph.b_paths_NN, graph.t_paths_NN)]
        logits: Tensor = self.score(_leaky(self.hidden(torch.cat([own_NH, embedding_NH, *on_paths], dim=-1))))
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

    def operator_part(self, embedding_NH: Tensor, graph: GraphTensors) -> Tensor:
        """The part of the hidden layer (N, C) that does not depend on devices: the operator and its embedding."""
        own_NH = _leaky(self.own(graph.static_NX))
        width = embedding_NH.shape[-1]
        weight = self.hidden.weight[:, width : 3 * width]
        return functional.linear(torch.cat([own_NH, embedding_NH], dim=-1), weight, self.hidden.bias)

    def forward(self, operator_part: Tensor, features_KD: Tensor, placed_KH: Tensor) -> Tensor:
        """Logits (..., K) from the operator's part (..., C), device features (..., K, D), and sums (..., K, H).

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
        self.select = SelectNetwork(shape)
        self.place = PlaceNetwork(shape)

    def encode(self, graph: GraphTensors) -> Encoding:
        """Run the message passing of both policies."""
        embedding_NH = self.place.encoder(graph)
        return Encoding(
            self.select(self.select.encoder(graph), graph), embedding_NH, self.place.operator_part(embedding_NH, graph)
        )


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
