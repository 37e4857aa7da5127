"""A placement problem as arrays: the paper's static features, paths, and tables for episodes in lockstep.

Shape letters: N operators, K devices, M directed edges (each flow to each of its targets, in both directions), F flows,
P most inputs of an operator, S most successors, G shared weights, X static features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.plan.graph.latency.doppler.features import longest_paths
from coordinator.plan.graph.latency.list_scheduling import mean_seconds, mean_transfer_seconds
from coordinator.plan.graph.latency.problem import PlacementProblem

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

NUM_STATIC_FEATURES = 5
_EQUAL = 1e-9  # a deviation below this share of the greatest value is rounding: all values are equal


@dataclass(frozen=True)
class Instance:
    """Arrays of one problem. Padded tables of operators and flows use N and F as padding."""

    problem: PlacementProblem
    static_NX: Singles  # compute, transfers in, transfers out, t-level, b-level; standardised over operators
    edge_sources_M: Indices
    edge_targets_M: Indices
    edge_values_M: Singles  # mean transfer seconds, standardised over edges
    b_levels_N: Floats  # longest path from the start of an operator to the end of the graph
    b_paths_NN: Singles  # row v: 1 for the operators on v's longest path to an exit, v included
    t_paths_NN: Singles  # the same to an entry
    seconds_NK: Floats
    inputs_NP: Indices  # the operators that produce an operator's inputs, one for each flow
    input_flows_NP: Indices
    transfer_FKK: Floats  # seconds with latency, by sender and receiver; 0 for padding, of flows and of senders
    successors_NS: Indices
    num_predecessors_N: Indices
    memory_N: Floats  # bytes, without shared weights
    budget_K: Floats  # bytes
    shared_NG: Mask  # which shared weights an operator uses
    shared_bytes_G: Floats

    @property
    def memory_binds(self) -> bool:
        """Whether some device cannot hold the whole graph."""
        return bool(self.memory_N.sum() + self.shared_bytes_G.sum() > self.budget_K.min())


def make_instance(problem: PlacementProblem) -> Instance:
    """The arrays of a problem. Costs of devices and links that differ enter the static features as means."""
    n, num_devices, num_flows = problem.num_operators, problem.num_devices, len(problem.flows)
    compute, carried = mean_seconds(problem), mean_transfer_seconds(problem)
    b_levels, t_levels, following, preceding = longest_paths(problem, np.array(compute), np.array(carried))
    flow_of_edge = [f for f, flow in enumerate(problem.flows) for _ in flow.targets]
    sources = np.array([problem.flows[f].source for f in flow_of_edge], np.int64)
    targets = np.array([target for flow in problem.flows for target in flow.targets], np.int64)
    values = np.array([carried[f] for f in flow_of_edge], np.float64)
    received = np.bincount(targets, values, n)
    sent = np.bincount(sources, values, n)
    static = np.stack([np.array(compute), received, sent, t_levels, b_levels], axis=1)
    transfer = np.zeros((num_flows + 1, num_devices + 1, num_devices))
    for f, flow in enumerate(problem.flows):
        transfer[f, :num_devices] = np.array(flow.seconds) + np.array(problem.latency)
    shared = np.zeros((n, len(problem.shared)), np.bool_)
    for index, group in enumerate(problem.shared):
        shared[list(group.operators), index] = True
    edge_values = standardised(np.concatenate([values, values]), 0)
    return Instance(
        problem=problem,
        static_NX=standardised(static, 0).astype(np.float32),
        edge_sources_M=np.concatenate([sources, targets]),
        edge_targets_M=np.concatenate([targets, sources]),
        edge_values_M=edge_values.astype(np.float32),
        b_levels_N=np.asarray(b_levels, np.float64),
        b_paths_NN=_paths(following, reversed(range(n))),
        t_paths_NN=_paths(preceding, range(n)),
        seconds_NK=np.array(problem.seconds, np.float64),
        inputs_NP=_padded([[problem.flows[f].source for f in flows] for flows in problem.incoming], n),
        input_flows_NP=_padded(problem.incoming, num_flows),
        transfer_FKK=transfer,
        successors_NS=_padded(problem.successors, n),
        num_predecessors_N=np.array([len(each) for each in problem.predecessors], np.int64),
        memory_N=np.array(problem.memory_bytes, np.float64),
        budget_K=np.array(problem.budget_bytes, np.float64),
        shared_NG=shared,
        shared_bytes_G=np.array([group.num_bytes for group in problem.shared], np.float64),
    )


def standardised(values: Floats, axis: int) -> Floats:
    """Values with mean 0 and deviation 1 along an axis; 0 where all are equal."""
    if values.size == 0:
        return values
    centred: Floats = values - values.mean(axis, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(axis, keepdims=True))
    varied = deviation > _EQUAL * np.abs(values).max(axis, keepdims=True, initial=0.0)
    return np.where(varied, centred / np.where(varied, deviation, 1.0), 0.0)


def _paths(following: Sequence[int], order: Iterable[int]) -> Singles:
    """Row v marks v and all that follow; `order` lists an operator after the one that follows it, if any."""
    marks = np.eye(len(following), dtype=np.float32)
    for operator in order:
        if following[operator] < len(following):
            marks[operator] += marks[following[operator]]
    return marks


def _padded(rows: Sequence[Sequence[int]], padding: int) -> Indices:
    width = max(1, max(map(len, rows), default=0))
    return np.array([[*row, *[padding] * (width - len(row))] for row in rows], np.int64)
