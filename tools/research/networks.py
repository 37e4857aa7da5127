"""The dual policy's networks (Doppler, section 5.2): message passing, SEL that picks an operator, PLC that picks a device.

Each policy has an encoder of its own. No weight depends on the numbers of operators and devices. Shape letters as in
`episodes`, and H width, C the width of PLC's hidden layer; "..." are rows of any shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.research.episodes import (
    NUM_DEVICE_FEATURES,
    NUM_STATIC_FEATURES,
    DeviceOptions,
    EpisodeClock,
    Floats,
    Indices,
    Instance,
    Mask,
    Trace,
)

_SLOPE = 0.1  # of LeakyReLU
_HEAD_WIDTH = 64
_BLOCK_EDGES = 16  # edges of one value that one matrix product carries
_EPSILON = 1e-5  # keeps the gradient of a deviation of 0 finite


@dataclass(frozen=True)
class Shape:
    """Sizes of the networks; the defaults are the paper's."""

    width: int = 128
    num_rounds: int = 6


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


class Encoding(NamedTuple):
    """What both policies derive from the graph."""

    operator_logits_N: Tensor
    embedding_NH: Tensor  # PLC's
    operator_part_NC: Tensor  # PLC's

    def detach(self) -> Encoding:
        return Encoding(*(tensor.detach() for tensor in self))


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
        n, width = hidden_NH.shape
        matrices = self.edge(graph.values[:, None]).view(-1, width, width)[graph.block_values]
        targets = graph.block_targets.flatten()
        for _ in range(self._num_rounds):
            sent = torch.einsum("beh,bhm->bem", hidden_NH[graph.block_sources], matrices)
            sums = hidden_NH.new_zeros(n + 1, width).index_add(0, targets, sent.flatten(0, 1))[:n]
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


# ---- choices and probabilities ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """Which decisions are learnt; the others are Critical Path's (the paper's ablations "SEL only" and "PLC only")."""

    learns_operators: bool = True
    learns_devices: bool = True


class PolicyChooser:
    """The policy's choices: samples from the softmax, or without `rng` the most probable operator and device."""

    def __init__(self, policy: DualPolicy, encoding: Encoding, rng: np.random.Generator | None, rules: Rules) -> None:
        self._policy, self._encoding, self._rng, self._rules = policy, encoding.detach(), rng, rules
        self._sums_BKH: Tensor | None = None  # of the embeddings of the operators on each device

    def operators(self, clock: EpisodeClock, taught_BN: Mask) -> Indices:
        """A candidate of each episode."""
        if not self._rules.learns_operators:
            return self._choose(np.zeros(taught_BN.shape), taught_BN)
        return self._choose(self._encoding.operator_logits_N.double().numpy(), clock.candidates_BN)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def devices(self, operators_B: Indices, options: DeviceOptions, taught_BK: Mask) -> Indices:
        """A device for the operator of each episode."""
        if not self._rules.learns_devices:
            return self._choose(np.zeros(taught_BK.shape), taught_BK)
        rows, operators = torch.arange(len(operators_B)), torch.from_numpy(operators_B)
        embedding_NH = self._encoding.embedding_NH
        if self._sums_BKH is None:
            self._sums_BKH = embedding_NH.new_zeros(*taught_BK.shape, embedding_NH.shape[-1])
        parts_BC = self._encoding.operator_part_NC[operators]
        logits_BK = self._policy.place(parts_BC, torch.from_numpy(options.features_BKD), self._sums_BKH)
        devices_B = self._choose(logits_BK.double().numpy(), options.allowed_BK)
        self._sums_BKH[rows, torch.from_numpy(devices_B)] += embedding_NH[operators]
        return devices_B

    def _choose(self, logits: Floats, allowed: Mask) -> Indices:
        scores = np.where(allowed, logits, -np.inf)
        if self._rng is not None:  # the greatest sum of logit and Gumbel noise is a sample of the softmax
            scores[allowed] -= np.log(self._rng.standard_exponential(np.count_nonzero(allowed)))
        chosen: Indices = scores.argmax(axis=1)
        return chosen


def log_probabilities(policy: DualPolicy, encoding: Encoding, trace: Trace) -> tuple[Tensor, Tensor]:
    """Log-probabilities (T, B, N) and (T, B, K) of all steps of finished episodes, with gradients.

    They are -inf for operators that are no candidates and for devices without room.
    """
    operators_TB = torch.from_numpy(trace.operators_TB)
    sums_TBKH = _sums_before(encoding.embedding_NH, trace)
    devices_TBK = policy.place(
        encoding.operator_part_NC[operators_TB], torch.from_numpy(trace.features_TBKD), sums_TBKH
    )
    logits_TBN = encoding.operator_logits_N.expand(trace.candidates_TBN.shape)
    return (
        logits_TBN.masked_fill(~torch.from_numpy(trace.candidates_TBN), -torch.inf).log_softmax(-1),
        devices_TBK.masked_fill(~torch.from_numpy(trace.allowed_TBK), -torch.inf).log_softmax(-1),
    )


def _sums_before(embedding_NH: Tensor, trace: Trace) -> Tensor:
    """Before each step, the sums (T, B, K, H) of the embeddings of the operators on each device."""
    num_devices = trace.allowed_TBK.shape[-1]
    on_TBK = torch.from_numpy(trace.devices_TB)[..., None] == torch.arange(num_devices)
    added_TBKH = embedding_NH[torch.from_numpy(trace.operators_TB)][:, :, None, :] * on_TBK[..., None]
    return added_TBKH.cumsum(0) - added_TBKH
