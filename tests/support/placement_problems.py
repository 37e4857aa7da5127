"""Random placement problems: for property tests, and from a generator; the same problem with other labels or units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from numpy.random import Generator

from coordinator.plan.graph.latency.problem import FloatTable, Flow, PlacementProblem, SharedWeights
from hearth.plan.profile import SharedMedium, media_between


@st.composite
def problems(draw: st.DrawFn, most: int = 5, memory: bool = True, media: bool = True) -> PlacementProblem:
    """Small graphs with integer times, tensors with several consumers, and devices that may lack memory or share a medium."""
    n, k = draw(st.integers(2, most)), draw(st.integers(1, 3))
    matrix = st.lists(st.integers(0, 6), min_size=k * k, max_size=k * k)

    def square(values: list[int]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(0.0 if a == b else float(values[a * k + b]) for b in range(k)) for a in range(k))

    flows = []
    for source in range(n - 1):
        targets = draw(st.sets(st.integers(source + 1, n - 1), max_size=3))
        if targets:
            flows.append(Flow(source, tuple(sorted(targets)), square(draw(matrix))))
    sizes = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    loose = st.just(100)
    budgets = draw(st.lists(st.one_of(loose, st.integers(0, 8)) if memory else loose, min_size=k, max_size=k))
    shared = [SharedWeights(2, (0, n - 1))] if draw(st.booleans()) else []
    problem = PlacementProblem(
        name="random",
        operators=tuple(f"op{i}" for i in range(n)),
        devices=tuple(f"device{d}" for d in range(k)),
        seconds=tuple(tuple(float(draw(st.integers(0, 8))) for _ in range(k)) for _ in range(n)),
        memory_bytes=tuple(sizes),
        budget_bytes=tuple(budgets),
        flows=tuple(flows),
        latency=square([draw(st.integers(0, 2))] * (k * k)),
        congestion=draw(st.booleans()),
        shared=tuple(shared),
    )
    on_air = draw(st.sets(st.integers(0, k - 1))) if media else ()
    return on_media(problem, sorted(on_air)) if on_air else problem


def on_media(problem: PlacementProblem, *media: Sequence[int]) -> PlacementProblem:
    """The problem with the devices of these numbers on shared media."""
    shared = [SharedMedium(device_ids=tuple(problem.devices[device] for device in each)) for each in media]
    crossed = tuple(tuple(media_between(shared, a, b) for b in problem.devices) for a in problem.devices)
    return replace(problem, media=crossed)


def random_problem(
    rng: Generator, num_operators: int = 12, num_devices: int = 3, congestion: bool = True, spare_memory: float = 9.0
) -> PlacementProblem:
    """Unequal operators, flows with several consumers, unequal links and devices, shared weights.

    The budgets are (1 + spare_memory) times all weights together, divided by the devices at random.
    """
    n, K = num_operators, num_devices

    def square(scale: float) -> FloatTable:
        return tuple(tuple(0.0 if a == b else float(rng.uniform(0.2, 1) * scale) for b in range(K)) for a in range(K))

    flows = []
    for source in range(n - 1):
        targets = {int(t) for t in rng.integers(source + 1, n, size=rng.integers(0, 4))}
        if targets:
            flows.append(Flow(source, tuple(sorted(targets)), square(float(rng.choice([0.2, 1, 3])))))
    memory = tuple(int(m) for m in rng.integers(0, 50, n))
    shared = (SharedWeights(40, (0, n // 2, n - 1)), SharedWeights(15, (1, n - 1)))
    total = sum(memory) + sum(group.num_bytes for group in shared)
    return PlacementProblem(
        name="random",
        operators=tuple(f"op{i}" for i in range(n)),
        devices=tuple(f"device{k}" for k in range(K)),
        seconds=tuple(tuple(map(float, row)) for row in rng.uniform(0.1, 2, (n, 1)) * rng.uniform(0.7, 1.6, (n, K))),
        memory_bytes=memory,
        budget_bytes=tuple(int(share) for share in rng.dirichlet(np.full(K, 20.0)) * (1 + spare_memory) * total),
        flows=tuple(flows),
        latency=square(0.05),
        congestion=congestion,
        shared=shared,
    )


def relabelled(problem: PlacementProblem, operators: Sequence[int], devices: Sequence[int]) -> PlacementProblem:
    """The problem whose operator i and device k are `operators[i]` and `devices[k]` of the original.

    `operators` must be a topological order.
    """
    new_label = {old: new for new, old in enumerate(operators)}

    def square(table: FloatTable) -> FloatTable:
        return tuple(tuple(table[a][b] for b in devices) for a in devices)

    flows = [
        Flow(new_label[flow.source], tuple(sorted(new_label[t] for t in flow.targets)), square(flow.seconds))
        for flow in problem.flows
    ]
    return replace(
        problem,
        operators=tuple(problem.operators[i] for i in operators),
        devices=tuple(problem.devices[k] for k in devices),
        seconds=tuple(tuple(problem.seconds[i][k] for k in devices) for i in operators),
        memory_bytes=tuple(problem.memory_bytes[i] for i in operators),
        budget_bytes=tuple(problem.budget_bytes[k] for k in devices),
        flows=tuple(sorted(flows, key=lambda flow: flow.source)),
        latency=square(problem.latency),
        shared=tuple(
            SharedWeights(group.num_bytes, tuple(sorted(new_label[i] for i in group.operators)))
            for group in problem.shared
        ),
    )


def in_other_unit(problem: PlacementProblem, factor: float) -> PlacementProblem:
    """The problem with all times multiplied by a factor."""

    def scaled(table: FloatTable) -> FloatTable:
        return tuple(tuple(factor * seconds for seconds in row) for row in table)

    return replace(
        problem,
        seconds=scaled(problem.seconds),
        latency=scaled(problem.latency),
        flows=tuple(flow._replace(seconds=scaled(flow.seconds)) for flow in problem.flows),
    )


def layered_problem(num_operators: int, fan_out: bool = False, num_devices: int = 3) -> PlacementProblem:
    """Unequal devices. Operators read one or two of the 20 before them, or the last reads all and these the first."""
    rng, n, ranks = np.random.default_rng(0), num_operators, range(num_devices)
    speeds = rng.uniform(0.5, 2, num_devices)

    def transfer(seconds: float) -> FloatTable:
        return tuple(tuple(0.0 if a == b else seconds for b in ranks) for a in ranks)

    targets: list[set[int]] = [set() for _ in range(n)]
    for target in range(1, n):
        count = int(rng.integers(1, 3))
        sources = [0] if fan_out else rng.integers(max(0, target - 20), target, count).tolist()
        for source in range(1, n - 1) if fan_out and target == n - 1 else sources:
            targets[source].add(target)
    slow, fast = transfer(0.01), transfer(0.0005)
    return PlacementProblem(
        name="layered",
        operators=tuple(f"op{i}" for i in range(n)),
        devices=tuple(f"device{k}" for k in ranks),
        seconds=tuple(tuple(map(float, work * speeds)) for work in rng.uniform(0.001, 0.02, n)),
        memory_bytes=(1,) * n,
        budget_bytes=(n,) * num_devices,
        flows=tuple(
            Flow(i, tuple(sorted(each)), slow if i % 7 == 0 else fast) for i, each in enumerate(targets) if each
        ),
        latency=transfer(0.0001),
    )
