"""Random placement problems for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from coordinator.plan.graph.latency.problem import Flow, PlacementProblem, SharedWeights


@st.composite
def problems(draw: st.DrawFn, most: int = 5, memory: bool = True) -> PlacementProblem:
    """Small graphs with integer times, tensors with several consumers, and devices that may lack memory."""
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
    return PlacementProblem(
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
