"""The paper's graphs with the costs of the authors' files, for their simulator. Pure."""

from __future__ import annotations

from typing import Literal

from coordinator.plan.graph.latency.problem import Flow, PlacementProblem
from tools.bench.tensor.graphs import PAPER, GraphName, tensor_graph

_UNIT = 1e10  # elements of an index space that a device computes in a unit of time
_TRANSFER_FACTOR = 4.0  # cost of sending a result over the cost of its operator


def published_problem(name: GraphName, num_devices: Literal[4, 8]) -> PlacementProblem:
    """A graph cut for 4 or 8 equal devices with links of any capacity. Time is in units of 1e10 elements.

    A vertex costs the elements of its whole operator's index space, and sending its result costs four times as much.
    """
    graph = tensor_graph(name, PAPER, num_devices)
    spec, ranks = graph.spec(), range(num_devices)
    costs = [cost / _UNIT for cost in graph.published_costs]
    flows = [
        Flow(
            tensor.source,
            tuple(sorted(set(tensor.consumers))),
            tuple(tuple(0.0 if a == b else _TRANSFER_FACTOR * costs[tensor.source] for b in ranks) for a in ranks),
        )
        for tensor in spec.tensors
        if tensor.source is not None and tensor.consumers
    ]
    return PlacementProblem(
        name=f"{name}-published",
        operators=tuple(operator.name for operator in spec.operators),
        devices=tuple(f"device{k}" for k in ranks),
        seconds=tuple((cost,) * num_devices for cost in costs),
        memory_bytes=(0,) * spec.num_operators,
        budget_bytes=(0,) * num_devices,
        flows=tuple(flows),
        latency=tuple((0.0,) * num_devices for _ in ranks),
        congestion=False,
    )
