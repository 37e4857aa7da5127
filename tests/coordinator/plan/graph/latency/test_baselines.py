"""List schedules where memory is tight: every scheduler keeps room for an assignment that fits, and so finds one itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ortools")

from support.placement_problems import problems
from support.schedule_checker import violations

from coordinator.plan.graph.latency.baselines import BASELINES, solve_baseline
from coordinator.plan.graph.latency.list_scheduling import contended_heft
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem
from coordinator.plan.solution import SearchOptions
from hearth.errors import NoPlacement
from tools.research.graphs import HOMES, tensor_graph
from tools.research.moirai import LISTS

SCHEDULERS = {name: each for name, each in LISTS.items() if name != "local"} | {"contended-heft": contended_heft}


@given(problems(most=6), st.data())
def test_schedulers_find_a_placement_that_leaves_no_byte_free(problem: PlacementProblem, data: st.DataObject) -> None:
    devices = st.integers(0, problem.num_devices - 1)
    fitting = tuple(data.draw(devices) for _ in problem.operators)
    tight = replace(problem, budget_bytes=problem.used_bytes(fitting), fitting=fitting)
    for scheduler in SCHEDULERS.values():
        found = scheduler(tight)
        assert tight.overflow_bytes(found.assignment) == 0
        assert violations(tight, found) == []


@pytest.mark.parametrize("name", sorted(SCHEDULERS.keys() & BASELINES.keys()))
def test_baselines_place_a_chain_of_products_in_little_memory(name: str) -> None:
    """Each device holds 0.3 of the weights, many of which several tiles share."""
    problem = HOMES["gigabit"].problem(tensor_graph("chain-mm"), 0.3)
    with pytest.raises(NoPlacement):
        BASELINES[name](problem)
    found = solve_baseline(name, problem, SearchOptions(10.0, 0, lambda: 0.0)).assignment
    assert problem.overflow_bytes(found.assignment) == 0
    assert found.makespan < 1.01


@pytest.mark.parametrize(("media", "device", "makespan"), [(False, 3, 2.0), (True, 2, 2.5)])
def test_contended_heft_books_the_medium(media: bool, device: int, makespan: float) -> None:
    # Devices 1 and 2 are on one medium, 0 and 3 on wires. Operator 0 is on device 1 and its consumer on 0; operator 2 is on
    # device 2, and its consumer takes 1 s on device 3, after a transfer of 1 s, or 2.5 s without one.
    far = 100.0
    flow = tuple(tuple(0.0 if a == b else 1.0 for b in range(4)) for a in range(4))
    crossed = tuple(tuple((0,) if {1, 2} & {a, b} else () for b in range(4)) for a in range(4))
    problem = PlacementProblem(
        name="two pairs", operators=("a", "b", "c", "d"), devices=("0", "1", "2", "3"),
        seconds=((far, 0, far, far), (1.5, far, far, far), (far, far, 0, far), (far, far, 2.5, 1.0)),
        memory_bytes=(0,) * 4, budget_bytes=(1,) * 4, flows=(Flow(0, (1,), flow), Flow(2, (3,), flow)),
        latency=((0.0,) * 4,) * 4, media=crossed if media else (),
    )  # fmt: skip
    found = contended_heft(problem)
    assert found.assignment == (1, 0, 2, device)
    assert found.ends[3] == makespan
