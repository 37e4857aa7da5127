"""Graphs of the links that are fast enough, by threshold. Pure. A graph is one bit mask of receivers per sender."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from coordinator.plan.graph.throughput.k_path import AdjacencyMasks
from coordinator.plan.graph.throughput.problem import PipelineProblem


class Links:
    """The communication graph of some devices. `thresholds` are its distinct rates in bytes per second, fastest first."""

    def __init__(self, problem: PipelineProblem, devices: Sequence[int]) -> None:
        self.devices = sum(1 << device for device in devices)
        self._rates = problem.link_rates
        chosen = problem.link_rates[np.ix_(devices, devices)]
        self.thresholds: list[float] = sorted(set(chosen[chosen > 0].tolist()), reverse=True)
        self._graphs: dict[int, AdjacencyMasks] = {}

    def graph_at_threshold(self, index: int) -> AdjacencyMasks:
        """Links at least as fast as the threshold of this index; -1: no link at all."""
        if index not in self._graphs:
            fast = self._rates >= self.thresholds[index] if index >= 0 else np.zeros_like(self._rates, dtype=bool)
            rows = np.packbits(fast, axis=1, bitorder="little")
            self._graphs[index] = [int.from_bytes(row.tobytes(), "little") & self.devices for row in rows]
        return self._graphs[index]

    def slowest_threshold_within(self, num_bytes: float, seconds: float) -> int:
        """Index of the slowest threshold at which `num_bytes` take at most `seconds`; -1 if none is fast enough."""
        return bisect_right(self.thresholds, seconds, key=lambda rate: num_bytes / rate) - 1
