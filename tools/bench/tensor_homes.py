"""The task graphs as placement problems of a home: four devices, and transfers that share links. Pure.

A vertex takes as long as its floating point operations, or as reading and writing as much as it produces, whichever is
longer, and the start of an operator. Links are full duplex, with the same rate between all devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from tools.bench.sharding import ShardedGraph

_FLOPS_PER_SECOND = 15e9  # of a device of speed 1: 0.45 core of the testbed
_MEMORY_BYTES_PER_SECOND = 3e9  # of a device of speed 1
_START_SECONDS = 20e-6  # of every vertex, on every device
_LATENCY_SECONDS = 0.2e-3
_GIGABIT_MBIT, _WIFI_MBIT = 940.0, 190.0


@dataclass(frozen=True)
class TensorHome:
    """Devices, by relative speed, and the rate of every link."""

    speeds: tuple[float, ...]
    mbit: float

    def problem(self, graph: ShardedGraph, budget_share: float = 1.0) -> PlacementProblem:
        """The graph's vertices on these devices, each with a memory budget of this share of all weights."""
        spec, ranks = graph.spec(), range(len(self.speeds))
        works = [
            max(operator.flops / _FLOPS_PER_SECOND, 2 * block.num_bytes / _MEMORY_BYTES_PER_SECOND)
            for operator, (block,) in zip(spec.operators, spec.produced, strict=True)
        ]
        budget = round(budget_share * sum(parameter.num_bytes for parameter in spec.parameters))
        return placement_problem(
            spec,
            seconds=[[work / speed + _START_SECONDS for speed in self.speeds] for work in works],
            memory_bytes=[budget for _ in ranks],
            bytes_per_second=[[self.mbit * 1e6 / 8 for _ in ranks] for _ in ranks],
            latency_seconds=[[_LATENCY_SECONDS for _ in ranks] for _ in ranks],
        )


HOMES: Mapping[str, TensorHome] = {
    "gigabit": TensorHome((1, 1, 1, 1), _GIGABIT_MBIT),
    "wifi": TensorHome((1, 1, 1, 1), _WIFI_MBIT),
    "unequal": TensorHome((1, 1, 1 / 2, 1 / 4), _GIGABIT_MBIT),
    "unequal-wifi": TensorHome((1, 1, 1 / 2, 1 / 4), _WIFI_MBIT),
}
