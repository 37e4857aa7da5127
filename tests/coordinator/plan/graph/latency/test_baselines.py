"""List schedules where memory is tight: every scheduler keeps room for an assignment that fits, and so finds one itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ortools")

from support.placement_problems import problems
from support.schedule_checker import violations

from coordinator.plan.graph.latency.baselines import BASELINES, solve_baseline
from coordinator.plan.graph.latency.contention import contended_heft
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.solution import SearchOptions
from hearth.errors import NoPlacement
from tools.bench.tensor.graphs import tensor_graph
from tools.bench.tensor.homes import HOMES

SCHEDULERS = {**{name: each for name, each in BASELINES.items() if name != "local"}, "contended-heft": contended_heft}


@settings(max_examples=40)
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
