"""Plans after the loss of a device: doppler is asked first, from what is left of the deployed plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.graphs import chain, cluster_of, two_branches
from support.step_clock import StepClock

pytest.importorskip("ortools")

from coordinator.plan.graph import auto
from coordinator.plan.graph.auto import plan_graph
from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy
from coordinator.plan.graph.latency.problem import placement_problem
from coordinator.plan.graph.latency.search import repaired
from coordinator.plan.graph.request import GraphRequest, held_devices
from coordinator.plan.methods import Method
from coordinator.plan.solution import Candidate, SearchOptions
from hearth.plan.plan import GraphPlan

SPEC = two_branches()
REQUEST = GraphRequest(SPEC, cluster_of(SPEC, [1.0, 3.0, 2.0], 50.0), time_limit_seconds=60.0)


def asked(request: GraphRequest) -> list[str]:
    """The strategies that are asked for a plan."""
    names: list[str] = []
    plan_graph(request, StepClock(0.01), names.append)
    return names


def test_recovery_asks_doppler_alone() -> None:
    assert asked(replace(REQUEST, recovering=True)) == ["doppler"]
    assert asked(replace(REQUEST, recovering=True, strategy="heft")) == ["heft"]
    assert "pipeline-exact" in asked(replace(REQUEST, recovering=True, objective="throughput"))


def test_recovery_limits_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[str, float]] = []
    run = auto.try_method

    def recorded(
        request: GraphRequest, method: Method, options: SearchOptions, home: HomePolicy | None
    ) -> Candidate[GraphPlan]:
        limits.append((method.name, options.time_limit_seconds))
        if request.recovering:
            return Candidate(method.name, method.name, reason="none")
        return run(request, method, options, home)

    monkeypatch.setattr(auto, "try_method", recorded)
    monkeypatch.setattr(auto, "local_candidates", lambda request: iter(()))
    assert plan_graph(replace(REQUEST, recovering=True), StepClock(0.01)).plan.planner == "blocks"
    assert limits[0] == ("doppler", 0.52)
    assert ("moirai", 60.0) in limits  # asked next, since doppler found no plan
    assert len({name for name, _ in limits}) == len(limits)


def test_auto_asks_doppler_for_five_seconds_unless_an_optimum_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "moirai" in asked(REQUEST)
    assert "doppler" not in asked(REQUEST)
    unproven = replace(REQUEST, time_limit_seconds=0.0)
    assert "doppler" in asked(unproven)
    method = next(each for each in auto.GRAPH_METHODS if each.name == "doppler")
    assert auto._time_limit(method, "auto", 60.0) == 5.0
    assert auto._time_limit(method, "doppler", 60.0) == 60.0


def test_held_devices_are_those_that_are_left() -> None:
    spec = chain(1, [1, 1, 1], weights=[100, 100, 100])
    request = GraphRequest(spec, cluster_of(spec, [1.0, 1.0, 1.0], 1e9, 120), time_limit_seconds=0.0)
    plan = plan_graph(request, StepClock(0.01)).plan
    assert held_devices(request) == {}
    ids = [device.device_id for device in request.cluster.devices]
    by_rank = [plan.devices[segment.rank].device_id for segment in plan.body.segments for _ in segment.operators]
    left = replace(request, cluster=request.cluster.subset([ids[2], ids[0]]), held=plan)
    expected = {ids[2]: 0, ids[0]: 1}
    assert held_devices(left) == {i: expected[each] for i, each in enumerate(by_rank) if each in expected}
    assert len(held_devices(left)) == 2


def test_repaired_plan_keeps_the_devices_that_are_left() -> None:
    problem = placement_problem(SPEC, [[1.0, 1.0]] * 6, [60, 60], [[50.0, 50.0]] * 2, [[0.0, 0.0]] * 2)
    (start,) = repaired(problem, {0: 1, 2: 0, 5: 1})
    assert [start.schedule.assignment[i] for i in (0, 2, 5)] == [1, 0, 1]
    assert problem.overflow_bytes(start.schedule.assignment) == 0
    assert repaired(replace(problem, budget_bytes=(9, 9)), {0: 1}) == []
