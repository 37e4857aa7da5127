"""The task graphs as placement problems of a home: four or eight devices, and transfers that share links. Pure.

A vertex takes as long as its floating point operations, or as reading and writing as much as it produces, whichever is
longer, and the start of an operator. Links are full duplex.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster
from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from tools.research.sharding import ShardedGraph

_FLOPS_PER_SECOND = 15e9  # of a device of speed 1: 0.45 core of the testbed
_MEMORY_BYTES_PER_SECOND = 3e9  # of a device of speed 1
_START_SECONDS = 20e-6  # of every vertex, on every device
_LATENCY_SECONDS = 0.2e-3
_GIGABIT_MBIT, _WIFI_MBIT = 940.0, 190.0


@dataclass(frozen=True)
class TensorHome:
    """Devices, by relative speed, and the rate of transfers between the two halves of them and within a half."""

    speeds: tuple[float, ...]
    mbit: float
    mbit_between: float | None = None  # None: as within

    def doubled(self) -> TensorHome:
        """Two such homes. Between them, the paper's eight GPUs have four links for sixteen pairs: a quarter of the rate."""
        return TensorHome(self.speeds * 2, self.mbit, self.mbit / 4)

    def problem(self, graph: ShardedGraph, budget_share: float = 1.0) -> PlacementProblem:
        """The graph's vertices on these devices, as `cluster`."""
        cluster = self.cluster(graph, budget_share)
        budgets = [device.budget_bytes for device in cluster.devices]
        return placement_problem(
            graph.spec(), cluster.seconds, budgets, cluster.bytes_per_second, cluster.latency_seconds
        )

    def cluster(self, graph: ShardedGraph, budget_share: float = 1.0) -> GraphCluster:
        """These devices, each with a memory budget of this share of all weights."""
        spec, ranks = graph.spec(), range(len(self.speeds))
        works = [
            max(operator.flops / _FLOPS_PER_SECOND, 2 * block.num_bytes / _MEMORY_BYTES_PER_SECOND)
            for operator, (block,) in zip(spec.operators, spec.produced, strict=True)
        ]
        half, between = len(ranks) // 2, self.mbit if self.mbit_between is None else self.mbit_between
        mbit = [[between if (a < half) != (b < half) else self.mbit for b in ranks] for a in ranks]
        budget = round(budget_share * sum(parameter.num_bytes for parameter in spec.parameters))
        return GraphCluster(
            devices=tuple(ClusterDevice(f"device{k}", f"device{k}", budget) for k in ranks),
            seconds=tuple(tuple(work / speed + _START_SECONDS for speed in self.speeds) for work in works),
            bytes_per_second=tuple(tuple(each * 1e6 / 8 for each in row) for row in mbit),
            latency_seconds=tuple(tuple(_LATENCY_SECONDS for _ in ranks) for _ in ranks),
        )


HOMES: Mapping[str, TensorHome] = {
    "gigabit": TensorHome((1, 1, 1, 1), _GIGABIT_MBIT),
    "wifi": TensorHome((1, 1, 1, 1), _WIFI_MBIT),
    "unequal": TensorHome((1, 1, 1 / 2, 1 / 4), _GIGABIT_MBIT),
    "unequal-wifi": TensorHome((1, 1, 1 / 2, 1 / 4), _WIFI_MBIT),
}
