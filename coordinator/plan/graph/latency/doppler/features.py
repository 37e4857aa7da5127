"""Features of a placement problem for Doppler's policies: arrays of its operators, edges and devices. Pure.

Every time is divided by that of the mean operator, so features do not change with the unit of time. Shape letters:
n operators (V features each), m edges (E features), K devices (F features), B episodes, R raw columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coordinator.plan.graph.latency.list_scheduling import mean_seconds, mean_transfer_seconds
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule

Floats: TypeAlias = NDArray[np.floating[Any]]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


# The names of the features, in the order of the columns of a policy's weights.
# Logarithms are log(1 + x), with x in units of the mean operator: they tell large values apart and ignore tiny ones.
VERTEX_FEATURES = (
    "log_compute",  # mean over devices
    "log_incoming",  # transfers of its inputs, mean over pairs of devices
    "log_outgoing",
    "b_level",  # longest path from its start to an exit; this and the next two as fractions of the critical path
    "t_level",  # longest path from an entry to its start
    "path",  # longest path through it
    "log_in_degree",
    "log_out_degree",
    "fastest",  # least time of a device over the mean of all
    "deviation",  # of its times over devices, relative to their mean
    "memory",  # its weights, in mean budgets
    "graph_memory",  # all weights over all budgets
    "devices",  # 1 / K
    "log_transfer",  # mean transfer of the graph
    "congestion",  # 1 if transfers contend
    "incumbent_start",  # in the incumbent schedule, as a fraction of its makespan; 0 without one
)
EDGE_FEATURES = ("log_transfer", "log_consumers")
DEVICE_FEATURES = (
    "log_free",  # end of all that is placed there; this and the next five relative to the least of the devices with room
    "log_load",  # compute placed there
    "log_start",  # earliest start of the operator there
    "log_finish",
    "log_sent",  # booked on its sending side
    "log_received",
    "log_seconds",  # of the operator there
    "log_missing",  # transfers that the operator needs there
    "log_inputs_compute",  # of the operator's predecessors there
    "log_first_age",  # from the start of the first predecessor there to the earliest start
    "log_last_age",  # from the end of the last predecessor there to the earliest start
    "inputs",  # share of the operator's predecessors that are there
    "memory_left",  # after placing the operator there, over the budget
    "incumbent",  # 1 if the incumbent schedule has the operator there
)

# What the clock observes for an operator on each device, in ticks except for the number of inputs.
CLOCK_COLUMNS = (
    "free", "load", "start", "sent", "received", "missing", "inputs_compute", "first_input", "last_input", "num_inputs"
)  # fmt: skip
RAW_COLUMNS = (*CLOCK_COLUMNS, "seconds", "memory_left", "incumbent")
_RAW = {name: index for index, name in enumerate(RAW_COLUMNS)}
_TINY = 1e-300  # in place of a divisor of 0
_RELATIVE = [_RAW[name] for name in ("free", "load", "start", "sent", "received")]


@dataclass(frozen=True)
class ProblemFeatures:
    """The static part: what the encoder reads of a problem. Computed once per problem."""

    problem: PlacementProblem
    vertices: Floats  # [n, V], float32
    edges: Floats  # [m, E], float32; one edge for each consumer of each flow
    sources: Ints  # [m], the producer
    targets: Ints  # [m], the consumer
    following: Ints  # [n], the next operator on the longest path to an exit; n at its end
    preceding: Ints  # [n], likewise on the longest path to an entry
    incumbent: Floats  # [n, K], 1 on the device of each operator in the incumbent schedule; all 0 without one

    def with_incumbent(self, schedule: Schedule) -> ProblemFeatures:
        """These features, for a policy that improves a schedule."""
        vertices = self.vertices.copy()
        vertices[:, VERTEX_FEATURES.index("incumbent_start")] = np.array(schedule.starts) / max(
            schedule.makespan, _TINY
        )
        return replace(self, vertices=vertices, incumbent=np.eye(self.problem.num_devices)[list(schedule.assignment)])


def problem_features(problem: PlacementProblem) -> ProblemFeatures:
    """The features of a problem's operators and edges, and its longest paths."""
    n = problem.num_operators
    seconds, carried = np.array(mean_seconds(problem)), np.array(mean_transfer_seconds(problem))
    edges = [(flow.source, target, index) for index, flow in enumerate(problem.flows) for target in flow.targets]
    sources, targets, flows = np.array(edges, dtype=np.int64).reshape(-1, 3).T
    producers = np.array([flow.source for flow in problem.flows], dtype=np.int64)
    unit = mean_operator_seconds(problem)
    compute, transfers = seconds / unit, carried / unit
    incoming, outgoing = np.bincount(targets, transfers[flows], n), np.bincount(producers, transfers, n)
    b_level, t_level, following, preceding = longest_paths(problem, compute, transfers)
    critical = max(float(b_level.max()), _TINY)
    vertices = np.stack(
        [
            *np.log1p([compute, incoming, outgoing]),
            *(np.array([b_level, t_level, b_level + t_level]) / critical),
            *np.log1p([np.bincount(targets, minlength=n), np.bincount(sources, minlength=n)]),
            *_differences(problem, seconds),
            *_memory_shares(problem),
            np.full(n, 1 / problem.num_devices),
            np.full(n, np.log1p(transfers.mean()) if len(transfers) else 0.0),
            np.full(n, float(problem.congestion)),
            np.zeros(n),
        ],
        axis=1,
    )
    consumers = np.array([len(problem.flows[flow].targets) for flow in flows])
    edge_columns = np.log1p(np.stack([transfers[flows], consumers], axis=1))
    return ProblemFeatures(
        problem,
        vertices.astype(np.float32),
        edge_columns.astype(np.float32),
        sources,
        targets,
        np.array(following),
        np.array(preceding),
        np.zeros((n, problem.num_devices)),
    )


def device_features(raw_BRK: Floats, allowed_BK: Bools, ticks_per_mean: float) -> Floats:
    """The features of every device for one operator of each episode, float32 [B, K, F].

    Values of devices that are not allowed have no meaning.
    """
    relative = np.concatenate(
        [raw_BRK[:, _RELATIVE], raw_BRK[:, _RAW["start"]][:, None] + raw_BRK[:, _RAW["seconds"]][:, None]], axis=1
    )
    relative -= np.where(allowed_BK[:, None], relative, np.inf).min(axis=2, keepdims=True)
    start, num_inputs = raw_BRK[:, _RAW["start"]], raw_BRK[:, _RAW["num_inputs"]]
    has_inputs = num_inputs > 0
    B, _, K = raw_BRK.shape
    times = np.empty((B, 11, K))
    times[:, [0, 1, 2, 4, 5, 3]] = relative
    times[:, 6] = raw_BRK[:, _RAW["seconds"]]
    times[:, 7] = raw_BRK[:, _RAW["missing"]]
    times[:, 8] = raw_BRK[:, _RAW["inputs_compute"]]
    times[:, 9] = (start - raw_BRK[:, _RAW["first_input"]]) * has_inputs
    times[:, 10] = (start - raw_BRK[:, _RAW["last_input"]]) * has_inputs
    found = np.empty((B, K, len(DEVICE_FEATURES)), np.float32)
    found[:, :, :11] = np.log1p(np.maximum(times, 0) / ticks_per_mean).transpose(0, 2, 1)
    found[:, :, 11] = num_inputs / np.maximum(num_inputs.sum(axis=1, keepdims=True), 1)
    found[:, :, 12] = raw_BRK[:, _RAW["memory_left"]]
    found[:, :, 13] = raw_BRK[:, _RAW["incumbent"]]
    return found


def mean_operator_seconds(problem: PlacementProblem) -> float:
    """Mean over operators and devices: the unit of time. The mean transfer, or 1, if operators take no time."""
    means = mean_seconds(problem), mean_transfer_seconds(problem)
    return next((sum(times) / len(times) for times in means if sum(times) > 0), 1.0)


def _differences(problem: PlacementProblem, mean_n: Floats) -> tuple[Floats, Floats]:
    """By operator, the least of its times over devices, and their deviation, both relative to their mean."""
    table, mean = np.array(problem.seconds), np.maximum(mean_n, _TINY)
    return np.where(mean_n > 0, table.min(axis=1) / mean, 1.0), table.std(axis=1) / mean


def _memory_shares(problem: PlacementProblem) -> tuple[Floats, Floats]:
    """By operator, its own weights in mean budgets; and all weights over all budgets."""
    budget, shared = max(sum(problem.budget_bytes), 1), sum(group.num_bytes for group in problem.shared)
    own = np.array(problem.memory_bytes, dtype=float)
    return own * (problem.num_devices / budget), np.full(len(own), (own.sum() + shared) / budget)


def longest_paths(
    problem: PlacementProblem, compute: Floats, transfers: Floats
) -> tuple[Floats, Floats, list[int], list[int]]:
    """By operator: b-level, t-level, and the next operator on the longest path to an exit and to an entry (or n).

    The b-level includes the operator itself, the t-level does not. `transfers` are those of the flows.
    """
    n = problem.num_operators
    b_level, t_level = [0.0] * n, [0.0] * n
    following, preceding = [n] * n, [n] * n
    for i in reversed(range(n)):
        ways = [(transfers[f] + b_level[t], -t) for f in problem.outgoing[i] for t in problem.flows[f].targets]
        rest, target = max(ways, default=(0.0, -n))
        b_level[i], following[i] = compute[i] + rest, -target
    for i in range(n):
        sources = [(problem.flows[f].source, transfers[f]) for f in problem.incoming[i]]
        t_level[i], source = max(((t_level[u] + compute[u] + each, -u) for u, each in sources), default=(0.0, -n))
        preceding[i] = -source
    return np.array(b_level), np.array(t_level), following, preceding
