"""Latency-optimal placement: exact on small graphs, never worse than a baseline, verified by an independent checker."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ortools")

from support.placement_problems import problems
from support.schedule_checker import violations
from support.step_clock import StepClock

from coordinator.devices.cluster_file import read_instance
from coordinator.plan.graph.latency.baselines import BASELINES, list_schedules
from coordinator.plan.graph.latency.cpsat import SolverLimits, SolverResult, solve_placement_model
from coordinator.plan.graph.latency.decomposition import Reachability, cut_segments, exact_cuts
from coordinator.plan.graph.latency.list_scheduling import contended_heft, critical_path, ranks_from_schedule
from coordinator.plan.graph.latency.paths import segment_patterns, shortest_paths
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem, in_ticks
from coordinator.plan.graph.latency.schedule import Schedule, Send, best_schedule, schedule, with_required_sends
from coordinator.plan.graph.latency.search import solve_moirai
from coordinator.plan.solution import SearchOptions
from hearth.errors import BadGraph, ModelDoesNotFit, NoPlacement
from tools.research.graphs import HOMES, tensor_graph


def brute_force(problem: PlacementProblem) -> float | None:
    """The optimum over all assignments and all orders of operators and transfers; None if nothing fits."""
    best = None
    n = problem.num_operators
    for where in itertools.product(range(problem.num_devices), repeat=n):
        if problem.overflow_bytes(where):
            continue
        for order in orders(problem, with_required_sends(problem, where, range(n)), where):
            found = schedule(problem, where, order, in_order=True).makespan
            best = found if best is None else min(best, found)
    return best


def orders(problem: PlacementProblem, items: list, where: tuple[int, ...]):
    """All orders that respect dependencies."""

    def needs(item: int | Send) -> set:
        if isinstance(item, Send):
            return {problem.flows[item.flow].source}
        found: set = set()
        for f in problem.incoming[item]:
            source = problem.flows[f].source
            found.add(source if where[source] == where[item] else Send(f, where[item]))
        return found

    def extend(done: list, left: list):
        if not left:
            yield list(done)
        for item in left:
            if needs(item) <= set(done):
                yield from extend([*done, item], [other for other in left if other != item])

    yield from extend([], items)


def test_time_for_building_a_model_counts_in_the_limit_of_its_solver() -> None:
    free = ((0.0, 0.0),) * 2
    problem = PlacementProblem("two", ("a", "b"), ("0", "1"), ((1.0, 1.0),) * 2, (0,) * 2, (0,) * 2, (), free)
    assert solve_placement_model(problem, SolverLimits(20, clock=StepClock(1.0)), 9).bound == 1
    assert solve_placement_model(problem, SolverLimits(20, clock=StepClock(30.0)), 9).schedule is None


def solve_whole(problem: PlacementProblem) -> SolverResult:
    """The optimum of one model for the whole graph, bounded by the makespan on the first device alone."""
    n = problem.num_operators
    return solve_placement_model(
        problem, SolverLimits(20), round(best_schedule(problem, [0] * n, range(n)).makespan) + 1
    )


@given(problems(most=4))
def test_optimum_equals_brute_force_on_small_graphs(problem: PlacementProblem) -> None:
    best = brute_force(problem)
    if best is None:
        with pytest.raises(ModelDoesNotFit):
            solve_moirai(problem, SearchOptions(20, 0, time.monotonic))
        return
    found = solve_moirai(problem, SearchOptions(20, 0, time.monotonic))
    assert found.proven
    assert found.value == found.bound == best
    assert violations(problem, found.assignment) == []


@pytest.mark.parametrize("reverse", [False, True], ids=["receiving", "sending"])
def test_model_excludes_transfers_that_share_a_side(reverse: bool) -> None:
    """Two transfers of 2 s meet at device 2: they are received there, or sent from there, one after the other."""
    far, link = 99.0, tuple(tuple(0.0 if a == b else 2.0 for b in range(3)) for a in range(3))
    ends = ((1.0, far, far), (far, 1.0, far))
    middle = ((far, far, 0.0),) * 2
    problem = PlacementProblem(
        "meeting", tuple("abcd"), ("0", "1", "2"), middle + ends if reverse else ends + middle, (0,) * 4, (0,) * 3,
        (Flow(0, (2,), link), Flow(1, (3,), link)), ((0.0,) * 3,) * 3,
    )  # fmt: skip
    found = solve_placement_model(problem, SolverLimits(20), 98)
    assert found.schedule is not None
    assert found.bound == found.schedule.makespan == 5.0


@given(problems(most=7))
def test_planner_is_never_worse_than_a_baseline(problem: PlacementProblem) -> None:
    baselines = []
    for name, baseline in BASELINES.items():
        try:
            found = baseline(problem)
        except NoPlacement as error:
            assert error.strategy == name
            continue
        assert violations(problem, found) == []
        baselines.append(found.makespan)
    if not baselines:
        return
    best = solve_moirai(problem, SearchOptions(10, 0, time.monotonic))
    assert best.value <= min(baselines)
    assert best.bound <= best.value
    assert violations(problem, best.assignment) == []


@given(problems(most=6, memory=False))
def test_shortest_path_over_cut_vertices_is_optimal(problem: PlacementProblem) -> None:
    ticked, _ = in_ticks(problem)
    reachability = Reachability(ticked)
    segments = cut_segments(ticked, exact_cuts(ticked, reachability), reachability)
    *_, path = shortest_paths(ticked, segments, lambda: 0.0, 1.0)
    whole = solve_whole(ticked)
    assert whole.schedule is not None
    assert path.lower == path.upper == whole.bound == whole.schedule.makespan


@st.composite
def repeating(draw: st.DrawFn) -> PlacementProblem:
    """Consecutive blocks of two branches whose times differ slightly."""
    num_blocks, k = 3, draw(st.integers(2, 3))

    def times(base: int) -> tuple[float, ...]:
        return tuple(float(base + draw(st.integers(0, 2))) for _ in range(k))

    ways = tuple(tuple(0.0 if a == b else float(draw(st.integers(20, 90))) for b in range(k)) for a in range(k))
    base = [draw(st.integers(50, 120)) for _ in range(3)]
    seconds, flows = [times(50)], []
    for block in range(num_blocks):
        first = 3 * block
        seconds += [times(each) for each in base]
        flows += [Flow(first, (first + 1, first + 2), ways), Flow(first + 1, (first + 3,), ways)]
        flows += [Flow(first + 2, (first + 3,), ways)]
    n = len(seconds)
    return PlacementProblem(
        name="repeating",
        operators=tuple(f"op{i}" for i in range(n)),
        devices=tuple(f"device{d}" for d in range(k)),
        seconds=tuple(seconds),
        memory_bytes=(0,) * n,
        budget_bytes=(0,) * k,
        flows=tuple(flows),
        latency=((0.0,) * k,) * k,
        congestion=draw(st.booleans()),
    )


@given(repeating())
def test_path_is_optimal_for_nearly_equal_blocks(
    problem: PlacementProblem,
) -> None:
    ticked, _ = in_ticks(problem)
    reachability = Reachability(ticked)
    segments = cut_segments(ticked, exact_cuts(ticked, reachability), reachability)
    for segment, pattern in zip(segments, segment_patterns([each.problem for each in segments]), strict=True):
        if pattern is not None:
            assert all(
                ours <= theirs
                for rows in zip(pattern.seconds, segment.problem.seconds, strict=True)
                for ours, theirs in zip(*rows, strict=True)
            )
    *_, path = shortest_paths(ticked, segments, lambda: 0.0, 1.0)
    whole = solve_whole(ticked)
    assert whole.schedule is not None
    assert path.lower == path.upper == whole.bound == whole.schedule.makespan


def test_only_similar_blocks_share_a_pattern(two_branches: PlacementProblem) -> None:
    slower = replace(two_branches, seconds=((1.0, 1.0), (4.1, 4.1), (4.0, 4.0), (1.0, 1.0)))
    other = replace(two_branches, seconds=((1.0, 1.0), (9.0, 9.0), (4.0, 4.0), (1.0, 1.0)))
    assert segment_patterns([two_branches, slower, other]) == [two_branches, two_branches, None]
    # identical blocks need no pattern: one arc serves both
    assert segment_patterns([two_branches, two_branches]) == [None, None]


@given(problems(most=7, memory=False), st.data())
def test_contended_heft_gives_valid_schedules_and_respects_pins(problem: PlacementProblem, data: st.DataObject) -> None:
    operators, devices = range(problem.num_operators), st.integers(0, problem.num_devices - 1)
    pins = data.draw(st.dictionaries(st.sampled_from(operators), devices))
    found = contended_heft(problem, pins)
    assert violations(problem, found) == []
    assert all(found.assignment[operator] == device for operator, device in pins.items())


def test_critical_path_is_the_best_run_as_simulated() -> None:
    problem, rng = HOMES["wifi"].problem(tensor_graph("chain-mm")), Random(0)
    makespans = [critical_path(problem, rng, runs=1).makespan for _ in range(10)]
    assert critical_path(problem, Random(0), runs=10).makespan == min(makespans) < makespans[0]


def test_contended_heft_runs_on_the_exact_times_too() -> None:
    """Sevenths are rounded down to ticks, which breaks ties in another way: there contended HEFT finds 2 s."""

    def flow(source: int, targets: tuple[int, ...], sevenths: int) -> Flow:
        return Flow(source, targets, ((0.0, sevenths / 7), (sevenths / 7, 0.0)))

    problem = PlacementProblem(
        name="sevenths",
        operators=tuple(f"op{i}" for i in range(9)),
        devices=("a", "b"),
        seconds=tuple((sevenths / 7,) * 2 for sevenths in (2, 3, 2, 3, 2, 2, 2, 3, 2)),
        memory_bytes=(0,) * 9,
        budget_bytes=(0, 0),
        flows=(
            flow(0, (2, 8), 6),
            flow(1, (5,), 5),
            flow(4, (5,), 3),
            flow(5, (7, 8), 3),
            flow(6, (7, 8), 3),
            flow(7, (8,), 6),
        ),
        latency=((0.0, 0.0), (0.0, 0.0)),
    )
    ticked, ticks_per_second = in_ticks(problem)
    assert contended_heft(ticked).makespan / ticks_per_second == pytest.approx(2.0)
    assert contended_heft(problem).makespan == pytest.approx(13 / 7)
    assert contended_heft(problem) in list(list_schedules(problem, 0.0, "moirai"))


def test_chain_of_products_over_slow_links_starts_from_the_better_of_both_hefts() -> None:
    problem = HOMES["wifi"].problem(tensor_graph("chain-mm"))
    ticked, ticks_per_second = in_ticks(problem)
    assert contended_heft(problem).makespan == pytest.approx(1.482, abs=1e-3)
    assert contended_heft(ticked).makespan / ticks_per_second == pytest.approx(1.552, abs=1e-3)
    assert contended_heft(problem) in list(list_schedules(problem, 0.0, "moirai"))


def test_ticks_stay_finite_where_operators_take_next_to_nothing() -> None:
    delay = ((0.0, 1.7e-4), (1.7e-4, 0.0))
    flow = Flow(0, (1,), ((0.0, 6.4e-8), (6.4e-8, 0.0)))
    problem = PlacementProblem(
        "tiny", ("a", "b"), ("x", "y"), ((0.0, 0.0), (2e-307, 3e-307)), (0, 0), (9, 9), (flow,), delay
    )
    ticked, _ = in_ticks(problem)
    assert 0 < ticked.latency[0][1] <= 1 << 41
    assert solve_moirai(problem, SearchOptions(1.0, 0, StepClock(0.001))).value == pytest.approx(2e-307)


def test_operators_off_the_path_are_scheduled_in_parallel() -> None:
    """0 and 1 are on the path; 2 runs on the other device and must end before 1 does, so as not to delay the sink."""
    ways = ((0.0, 1.0), (1.0, 0.0))
    problem = PlacementProblem(
        name="beside",
        operators=("first", "second", "beside", "last"),
        devices=("a", "b"),
        seconds=((5.0, 5.0), (5.0, 5.0), (8.0, 8.0), (1.0, 1.0)),
        memory_bytes=(0,) * 4,
        budget_bytes=(0, 0),
        flows=(Flow(0, (1,), ways), Flow(1, (3,), ways), Flow(2, (3,), ways)),
        latency=((0.0, 0.0), (0.0, 0.0)),
    )
    starts = {0: 0.0, 1: 5.0, 3: 10.0}
    found = contended_heft(problem, dict.fromkeys(starts, 0), ranks_from_schedule(problem, starts, 11.0))
    assert found.assignment == (0, 0, 1, 0)
    assert found.makespan == 11.0


@given(problems(most=6, memory=False))
def test_schedule_in_its_own_order_is_unchanged(problem: PlacementProblem) -> None:
    where = [i % problem.num_devices for i in range(problem.num_operators)]
    once = best_schedule(problem, where, range(problem.num_operators))
    again = schedule(problem, where, once.order, in_order=True)
    assert again.starts == once.starts
    assert again.makespan == once.makespan


# ---- the checker ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_branches() -> PlacementProblem:
    """0 feeds 1 and 2, both feed 3."""
    ways = ((0.0, 1.0), (1.0, 0.0))
    return PlacementProblem(
        name="branches",
        operators=("in", "left", "right", "out"),
        devices=("a", "b"),
        seconds=((1.0, 1.0), (4.0, 4.0), (4.0, 4.0), (1.0, 1.0)),
        memory_bytes=(0, 3, 3, 0),
        budget_bytes=(4, 4),
        flows=(Flow(0, (1, 2), ways), Flow(1, (3,), ways), Flow(2, (3,), ways)),
        latency=((0.0, 0.0), (0.0, 0.0)),
    )


def split(problem: PlacementProblem) -> Schedule:
    return best_schedule(problem, [0, 0, 1, 0], range(4))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda s: {"starts": (0.0, 1.0, 1.0, 7.0), "ends": (1.0, 5.0, 5.0, 8.0)}, "its input is there"),
        (lambda s: {"ends": (1.0, 4.0, 6.0, 8.0)}, "does not take the time"),
        (lambda s: {"makespan": s.makespan - 1}, "the makespan is"),
        (lambda s: {"transfers": ()}, "nothing is sent"),
        (lambda s: {"transfers": tuple(t._replace(end=t.end + 1) for t in s.transfers)}, "channel needs"),
        (lambda s: {"transfers": tuple(t._replace(start=0.0, end=1.0) for t in s.transfers)}, "something to send"),
        (lambda s: {"assignment": (0, 0, 0, 0)}, "overlap on a"),
        (lambda s: {"assignment": (0, 0, 0, 0)}, "holds 6 of 4 bytes"),
        (lambda s: {"assignment": (0, 0, 5, 0)}, "does not exist"),
        (lambda s: {"starts": s.starts[:2]}, "does not place every operator"),
    ],
)
def test_checker_rejects_corrupted_schedules(two_branches: PlacementProblem, change, word: str) -> None:
    good = split(two_branches)
    assert violations(two_branches, good) == []
    found = violations(two_branches, replace(good, **change(good)))
    assert any(word in each for each in found), found


def test_checker_rejects_concurrent_transfers_only_with_congestion() -> None:
    ways = ((0.0, 2.0), (2.0, 0.0))
    problem = PlacementProblem(
        name="fan",
        operators=("x", "y", "z"),
        devices=("a", "b"),
        seconds=((1.0, 1.0),) * 3,
        memory_bytes=(0,) * 3,
        budget_bytes=(0, 0),
        flows=(Flow(0, (1,), ways), Flow(0, (2,), ways)),
        latency=((0.0, 0.0), (0.0, 0.0)),
        congestion=False,
    )
    at_once = best_schedule(problem, [0, 1, 1], range(3))
    assert violations(problem, at_once) == []
    found = violations(replace(problem, congestion=True), at_once)
    assert any("way out of a" in each for each in found)
    assert any("way into b" in each for each in found)


# ---- published instances --------------------------------------------------------------------------------------------


def instances() -> Path:
    folder = os.environ.get("HEARTH_GRAPHS")
    if not folder or not (Path(folder) / "moirai").is_dir():
        pytest.skip("HEARTH_GRAPHS does not name a folder with moirai/ in it")
    return Path(folder) / "moirai"


@pytest.mark.parametrize("congestion", [False, True])
@pytest.mark.parametrize("name", ["example-1", "GoogLeNet", "transformer"])
def test_schedules_of_published_instances_pass_the_checker(name: str, congestion: bool) -> None:
    problem = read_instance(instances() / f"{name}.json", congestion)
    best = solve_moirai(problem, SearchOptions(10, 0, time.monotonic))
    assert violations(problem, best.assignment) == []
    for baseline in BASELINES.values():
        try:
            found = baseline(problem)
        except NoPlacement:
            continue
        assert violations(problem, found) == []
        assert best.bound <= best.value <= found.makespan


@pytest.mark.parametrize("congestion", [False, True])
def test_published_example_has_optimum_30_with_tight_memory(congestion: bool) -> None:
    problem = read_instance(instances() / "example-1.json", congestion)
    found = solve_moirai(problem, SearchOptions(20, 0, time.monotonic))
    assert (found.value, found.bound, found.proven) == (30.0, 30.0, True)
    assert violations(problem, found.assignment) == []
    assert problem.used_bytes(found.assignment.assignment) == problem.budget_bytes


def _instance(time: Sequence[float] = (1, 2), edge: Sequence[object] = (0, 1, 0, None)) -> str:
    """Two operators on two devices."""
    nodes = [{"name": name, "time": list(time), "memory": 1} for name in "xy"]
    devices = [{"name": name, "mem": 2} for name in "ab"]
    return json.dumps({"name": "x", "devices": devices, "nodes": nodes, "edges": [list(edge)]})


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "is not JSON"),
        ("[]", "not a placement instance"),
        ('{"name": "x"}', "'devices' is missing"),
        (
            json.dumps({"name": "x", "devices": [{"name": "a", "mem": 1}], "nodes": [], "edges": []}),
            "one operator and one device",
        ),
        (_instance(time=[1, 2, 3]), "2 operators on 2 devices need 2 x 2 times"),
        (_instance(time=[1, -2]), "a time is negative"),
        (_instance(edge=[1, 0, 0, None]), "the edge 1 -> 0 is not in topological order"),
        (_instance(edge=[0, 2, 0, None]), "the edge 0 -> 2 is not in topological order"),
        (_instance(edge=[0, 1, 0, [0, 1, 1]]), "has 3 times for 2 devices"),
        (_instance(edge=[0, 1, 0, [1, 1, 1, 0]]), "takes time although both its ends are on one device"),
    ],
)
def test_invalid_instance_file_is_reported(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(BadGraph, match=word):
        read_instance(path)


def test_missing_bytes_are_reported_if_nothing_fits(two_branches: PlacementProblem) -> None:
    for budgets, missing in (((4, 1), 2), ((2, 2), 2), ((0, 0), 6)):
        with pytest.raises(ModelDoesNotFit) as caught:
            solve_moirai(replace(two_branches, budget_bytes=budgets), SearchOptions(10, 0, time.monotonic))
        assert caught.value.missing_bytes == missing


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadGraph):
        read_instance(tmp_path / "none.json")
