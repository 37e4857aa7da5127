"""Placeto's policy network: message passing over the graph, pooling around one operator, logits over devices. Pure numpy.

Placeto (Addanki, Venkatakrishnan, Gupta, Mao, Alizadeh, arXiv 1906.08879, section 3.3). Messages pass separately down the
edges and up against them, with weights that all rounds share. The gradients are written out.

Shape letters: D = 2 directions (down, up), N operators, S steps of an episode, F features, W width, K devices, G = 3
groups of operators (ancestors, descendants and parallel operators of the current one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coordinator.plan.graph.latency.policy_gradient import Array, Weights

NUM_ROUNDS = 8  # of message passing, as published


def weight_shapes(num_features: int, num_devices: int, width: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every matrix `x`; each has a bias `x.bias` with the same leading axis and last axis."""
    both, joined = 2 * width, 8 * width
    return {
        "input": (num_features, width),
        "node": (width, width),
        "send": (2, width, width),  # applied to a sender before the mean over senders
        "receive": (2, width, width),  # applied to that mean
        "member": (3, both, both),  # applied to a group's operators before the mean over them
        "group": (3, both, both),  # applied to that mean
        "hidden": (joined, joined),
        "output": (joined, num_devices),
    }


def initial_weights(num_features: int, num_devices: int, width: int, generator: Generator) -> Weights:
    """Glorot-uniform matrices and zero biases in single precision; the output is small, so that all devices start equal."""
    weights: Weights = {}
    for name, shape in weight_shapes(num_features, num_devices, width).items():
        limit = np.sqrt(6.0 / (shape[-2] + shape[-1])) * (0.1 if name == "output" else 1.0)
        weights[name] = generator.uniform(-limit, limit, shape).astype(np.float32)
        bias = (*shape[:-2], shape[-1])
        weights[f"{name}.bias"] = np.zeros(bias, np.float32)
    return weights


class _Segments(NamedTuple):
    """For some rows of an array, the rows to sum: those of row `rows[i]` are `members[first[i]:first[i + 1]]`."""

    rows: NDArray[np.intp]
    members: NDArray[np.intp]
    first: NDArray[np.intp]

    @classmethod
    def of(cls, members_by_row: Sequence[Sequence[int]]) -> _Segments:
        rows = [row for row, members in enumerate(members_by_row) if members]
        counts = [len(members_by_row[row]) for row in rows]
        members = [each for row in rows for each in members_by_row[row]]
        first = np.cumsum([0, *counts])[:-1]
        return cls(*(np.array(each, np.intp) for each in (rows, members, first)))

    def sum(self, values: Array) -> Array:
        """The sums of rows, [rows of `values`, ...]; 0 where there is nothing to sum."""
        found = np.zeros_like(values)
        if self.rows.size:
            found[self.rows] = np.add.reduceat(values[self.members], self.first, axis=0)
        return found


@dataclass(frozen=True)
class MessageGraph:
    """Who sends messages to whom, and the groups around each operator. Rows 0 to N-1 are down, N to 2N-1 up."""

    incoming: _Segments  # by receiver, its senders
    outgoing: _Segments  # by sender, its receivers
    shares: Array  # [D, N, 1, 1]: one over the number of senders
    receives: Array  # [D, N, 1, 1]: 1 where there are senders, 0 elsewhere
    groups: Array  # [G, current operator, member]: one over the size of the group for its members, 0 for others

    @classmethod
    def of(cls, predecessors: Sequence[Sequence[int]], successors: Sequence[Sequence[int]]) -> MessageGraph:
        """The graph of operators in topological order."""
        n = len(predecessors)
        senders = [*predecessors, *([n + each for each in after] for after in successors)]
        receivers = [*successors, *([n + each for each in before] for before in predecessors)]
        counts = np.array([len(each) for each in senders], np.float32).reshape(2, n, 1, 1)
        ancestors = np.zeros((n, n), bool)
        for operator, before in enumerate(predecessors):
            for each in before:
                ancestors[operator] |= ancestors[each]
                ancestors[operator, each] = True
        parallel = ~(ancestors | ancestors.T | np.eye(n, dtype=bool))
        groups = np.stack([ancestors, ancestors.T, parallel]).astype(np.float32)
        groups /= np.maximum(1.0, groups.sum(axis=2, keepdims=True))
        return cls(
            _Segments.of(senders), _Segments.of(receivers), 1 / np.maximum(counts, 1), np.minimum(counts, 1), groups
        )


class _Round(NamedTuple):
    """One round of message passing; each array is [D, N, S, W]."""

    states: Array
    messages: Array
    means: Array  # of the messages that an operator receives
    received: Array


@dataclass(frozen=True)
class ForwardPass:
    """The logits of each step, and what the backward pass needs: inputs of layers, and outputs of ReLUs."""

    logits: Array  # [S, K]
    features: Array  # [N, S, F]
    current: NDArray[np.intp]  # [S]
    embedded: Array  # [N, S, W]
    rounds: list[_Round]
    both: Array  # [N, S, 2 W]: down and up
    members: Array  # [G, N, S, 2 W]
    pooled: Array  # [G, S, 2 W]
    groups: Array  # [G, S, 2 W]
    joined: Array  # [S, 8 W]: three groups and the current operator
    hidden: Array  # [S, 8 W]


def forward(
    weights: Mapping[str, Array], graph: MessageGraph, features_NSF: Array, current_S: NDArray[np.intp]
) -> ForwardPass:
    """The logits over devices for the operators `current_S`, each in a state of its own."""
    embedded = _relu(_linear(weights, "input", features_NSF))
    nodes = _linear(weights, "node", embedded)
    states_DNSW = np.stack([nodes, nodes])
    rounds = []
    for _ in range(NUM_ROUNDS):
        messages = _relu(_linear(weights, "send", states_DNSW))
        means = graph.incoming.sum(_rows(messages)).reshape(messages.shape) * graph.shares
        received = _relu(_linear(weights, "receive", means)) * graph.receives
        rounds.append(_Round(states_DNSW, messages, means, received))
        states_DNSW = nodes + received
    both_NSV = np.concatenate([states_DNSW[0], states_DNSW[1]], axis=-1)
    members = _relu(_linear(weights, "member", np.broadcast_to(both_NSV, (3, *both_NSV.shape))))
    pooled = np.einsum("gsn,gnsv->gsv", graph.groups[:, current_S], members)
    groups = _relu(_linear(weights, "group", pooled))
    own = both_NSV[current_S, np.arange(len(current_S))]
    joined = np.concatenate([*groups, own], axis=-1)
    hidden = _relu(_linear(weights, "hidden", joined))
    logits = _linear(weights, "output", hidden)
    return ForwardPass(
        logits, features_NSF, current_S, embedded, rounds, both_NSV, members, pooled, groups, joined, hidden
    )


def gradients(weights: Mapping[str, Array], graph: MessageGraph, passed: ForwardPass, d_logits_SK: Array) -> Weights:
    """The gradients of a loss by all weights, from its gradients by the logits; summed over steps."""
    found: Weights = {}

    def back(name: str, values: Array, d_result: Array) -> Array:
        """Add the gradients of a layer's weights; return those of its input."""
        lead = weights[name].shape[:-2]
        rows, d_rows = (each.reshape(*lead, -1, each.shape[-1]) for each in (values, d_result))
        found[name] = found.get(name, 0) + rows.swapaxes(-1, -2) @ d_rows
        found[f"{name}.bias"] = found.get(f"{name}.bias", 0) + d_rows.sum(axis=-2)
        d_values: Array = d_rows @ weights[name].swapaxes(-1, -2)
        return d_values.reshape(values.shape)

    d_hidden = back("output", passed.hidden, d_logits_SK) * (passed.hidden > 0)
    d_joined = back("hidden", passed.joined, d_hidden)
    *d_groups, d_own = np.split(d_joined, 4, axis=-1)
    d_pooled = back("group", passed.pooled, np.stack(d_groups) * (passed.groups > 0))
    shares_GNS1 = graph.groups[:, passed.current].swapaxes(1, 2)[..., None]
    d_members = shares_GNS1 * d_pooled[:, None] * (passed.members > 0)
    d_both = back("member", np.broadcast_to(passed.both, passed.members.shape), d_members).sum(axis=0)
    d_both[passed.current, np.arange(len(passed.current))] += d_own
    d_states = np.stack(np.split(d_both, 2, axis=-1))
    d_nodes = np.zeros_like(d_states[0])
    for states, messages, means, received in reversed(passed.rounds):
        d_nodes += d_states[0] + d_states[1]
        d_means = back("receive", means, d_states * (received > 0)) * graph.shares
        d_messages = graph.outgoing.sum(_rows(d_means)).reshape(messages.shape)
        d_states = back("send", states, d_messages * (messages > 0))
    d_nodes += d_states[0] + d_states[1]
    d_embedded = back("node", passed.embedded, d_nodes)
    back("input", passed.features, d_embedded * (passed.embedded > 0))
    return found


def _linear(weights: Mapping[str, Array], name: str, values: Array) -> Array:
    """`values @ matrix + bias`; a matrix with a leading axis has one matrix for each entry of that axis of `values`."""
    matrix = weights[name]
    rows = values.reshape(*matrix.shape[:-2], -1, values.shape[-1])
    result: Array = rows @ matrix + weights[f"{name}.bias"][..., None, :]
    return result.reshape(*values.shape[:-1], matrix.shape[-1])


def _relu(values: Array) -> Array:
    result: Array = np.maximum(values, 0)
    return result


def _rows(values_DNSW: Array) -> Array:
    """[D * N, S * W]: a row per direction and operator."""
    return values_DNSW.reshape(2 * values_DNSW.shape[1], -1)
