"""Scheduling of segments on a rank of a graph. Pure, without onnxruntime."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graph_plans import make_graph_plan

from agent.worker.graph.schedule import GraphSchedule, OverdueStep, ReadySegment, routes_for
from hearth.errors import BadPlan, BadRequest, QueueFull
from hearth.plan.plan import GraphPlan

# Rank 0 splits x into a and b; rank 1 computes c from a, rank 0 d from b, rank 1 y from c, d and x itself.
DIAMOND = make_graph_plan(
    [(0, ("x",), ("a", "b")), (1, ("a",), ("c",)), (0, ("b",), ("d",)), (1, ("c", "d", "x"), ("y",))],
    inputs=("x",),
    outputs=("y", "d"),
)
FAR = 1e9


def schedule(rank: int, plan: GraphPlan = DIAMOND, max_in_flight: int = 4) -> GraphSchedule:
    return GraphSchedule(routes_for(plan, rank), max_in_flight)


def test_routes_list_sources_targets_and_results() -> None:
    first, second = routes_for(DIAMOND, 0), routes_for(DIAMOND, 1)
    assert [segment.number for segment in first.segments] == [0, 2]
    assert (first.graph_inputs, first.sources) == ({"x"}, {})
    assert first.targets == {"a": (1,), "d": (1,)}
    assert first.graph_outputs == ("d",)
    assert (second.graph_inputs, second.sources, second.targets, second.graph_outputs) == (
        {"x"},
        {"a": 0, "d": 0},
        {},
        ("y",),
    )
    assert first.sent_tensors == second.sent_tensors == ("a", "d")


def test_tensor_with_two_producers_is_rejected() -> None:
    segments = DIAMOND.body.segments
    body = DIAMOND.body.model_copy(update={"segments": (*segments, segments[1])})
    plan = DIAMOND.model_copy(update={"body": body})
    with pytest.raises(BadPlan, match="two segments produce the tensor c"):
        routes_for(plan, 0)


def test_segment_starts_when_all_inputs_have_arrived() -> None:
    second = schedule(1)
    second.open(1, FAR)
    assert second.start_next() is None
    assert second.add_tensor(1, "x", FAR)
    assert second.start_next() is None
    assert second.add_tensor(1, "a", FAR)
    assert second.start_next() == ReadySegment(1, 0)
    assert second.start_next() is None
    assert second.finish(ReadySegment(1, 0)) == (("a",), False)  # the other segment needs c
    assert second.add_tensor(1, "d", FAR)
    assert second.start_next() == ReadySegment(1, 1)
    released, last = second.finish(ReadySegment(1, 1))
    assert last
    assert set(released) == {"c", "d", "x", "y"}


def test_oldest_runnable_request_goes_first_then_plan_order() -> None:
    first = schedule(0)
    for step in (7, 8):
        first.open(step, FAR)
        first.add_tensor(step, "x", FAR)
    assert first.start_next() == ReadySegment(7, 0)
    assert first.start_next() == ReadySegment(8, 0)  # no segment of step 7 is runnable, and the device must not idle
    first.finish(ReadySegment(8, 0))
    first.finish(ReadySegment(7, 0))
    assert [first.start_next(), first.start_next(), first.start_next()] == [
        ReadySegment(7, 1),
        ReadySegment(8, 1),
        None,
    ]


def test_early_tensors_wait_for_their_request() -> None:
    second = schedule(1)
    assert second.add_tensor(3, "a", 10.0)
    assert second.start_next() is None
    second.open(3, FAR)
    assert second.start_next() == ReadySegment(3, 0)


def test_duplicate_late_and_unexpected_tensors_are_rejected() -> None:
    second = schedule(1)
    second.open(1, FAR)
    assert second.add_tensor(1, "a", FAR)
    assert not second.add_tensor(1, "a", FAR)
    assert not second.accepts(1, "y")
    second.end(1)
    assert not second.add_tensor(1, "d", FAR)
    second.end(5)  # aborted before it arrived
    assert not second.add_tensor(5, "a", FAR)
    with pytest.raises(BadRequest, match="already started, or has ended"):
        second.open(5, FAR)


def test_old_steps_count_as_ended() -> None:
    second = schedule(1)
    for step in range(5000):
        second.open(step, FAR)
        second.end(step)
    assert not second.accepts(0, "a")
    assert second.accepts(5000, "a")
    with pytest.raises(BadRequest):
        second.open(3, FAR)


def test_held_steps_are_bounded() -> None:
    second = schedule(1, max_in_flight=2)
    second.open(1, FAR)
    second.open(2, FAR)
    with pytest.raises(QueueFull) as full:
        second.open(3, FAR)
    assert full.value.limit == 2
    assert second.add_tensor(3, "a", FAR)
    assert second.add_tensor(4, "a", FAR)
    assert not second.add_tensor(5, "a", FAR)  # two early steps are held, besides two open ones
    second.end(1)
    second.open(3, FAR)


def test_late_step_names_its_missing_tensor() -> None:
    second = schedule(1)
    second.open(1, 5.0)
    second.add_tensor(1, "x", 5.0)
    second.add_tensor(1, "a", 5.0)
    assert second.next_deadline == 5.0
    assert second.overdue(4.9) == []
    assert second.overdue(5.0) == [OverdueStep(1, "d", 0)]
    second.add_tensor(1, "d", 5.0)
    assert second.overdue(5.0) == [OverdueStep(1, None, None)]
    second.end(1)
    assert second.overdue(9.0) == []
    assert second.next_deadline is None


# ---- any plan, any order of arrival -----------------------------------------------------------------------------------


@dataclass
class Rank:
    schedule: GraphSchedule
    held: set[tuple[int, str]] = field(default_factory=set)
    ran: list[ReadySegment] = field(default_factory=list)


@st.composite
def plans(draw: st.DrawFn) -> GraphPlan:
    """Segments with one or two outputs and any earlier tensors as inputs, on up to three ranks."""
    num_ranks = draw(st.integers(1, 3))
    known, segments = ["x"], []
    for index in range(draw(st.integers(num_ranks, 8))):
        taken = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
        made = [f"s{index}", f"s{index}b"][: draw(st.integers(1, 2))]
        rank = index if index < num_ranks else draw(st.integers(0, num_ranks - 1))
        segments.append((rank, taken, made))
        known += made
    return make_graph_plan(segments, inputs=("x",), outputs=draw(st.sets(st.sampled_from(known[1:]), min_size=1)))


@given(plans(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_random_plans_run_every_segment_once_in_any_arrival_order(
    plan: GraphPlan, num_steps: int, rng: random.Random
) -> None:
    """Requests, tensors and segments arrive or run in random order, as network and devices may choose."""
    routes = [routes_for(plan, rank) for rank in range(plan.num_ranks)]
    ranks = [Rank(GraphSchedule(each, 4)) for each in routes]
    events = [("open", rank, step, "") for rank in range(plan.num_ranks) for step in range(num_steps)]
    ended: set[tuple[int, int]] = set()
    while len(ended) < plan.num_ranks * num_steps:
        tasks = [("run", rank, 0, "") for rank in range(plan.num_ranks)]
        kind, rank, step, name = rng.choice(events or tasks) if rng.random() < 0.7 else rng.choice(tasks)
        here, route = ranks[rank], routes[rank]
        if kind == "open":
            events.remove((kind, rank, step, name))
            here.schedule.open(step, FAR)
            for fed in route.graph_inputs:
                assert here.schedule.add_tensor(step, fed, FAR)
                here.held.add((step, fed))
        elif kind == "arrive":
            events.remove((kind, rank, step, name))
            assert here.schedule.add_tensor(step, name, FAR)
            here.held.add((step, name))
        else:
            task = here.schedule.start_next()
            if task is None:
                continue
            segment = route.segments[task.segment]
            assert {(task.step, taken) for taken in segment.inputs} <= here.held
            here.ran.append(task)
            here.held |= {(task.step, made) for made in segment.outputs}
            released, last = here.schedule.finish(task)
            here.held -= {(task.step, name) for name in released}
            events += [
                ("arrive", to, task.step, made) for made in segment.outputs for to in route.targets.get(made, ())
            ]
            if last:
                here.schedule.end(task.step)
                ended.add((rank, task.step))
    assert not events
    for here, route in zip(ranks, routes, strict=True):
        assert sorted(here.ran) == [ReadySegment(s, i) for s in range(num_steps) for i in range(len(route.segments))]
        assert not here.held
        assert here.schedule.num_open == 0


def test_source_of_a_missing_tensor_is_late_after_a_time() -> None:
    second = schedule(1)
    second.add_tensor(1, "a", FAR)
    assert second.late_source(FAR - 1) is None  # the step is not open here: its request may be on its way
    second.open(1, FAR, late_at=10.0)
    second.add_tensor(1, "x", FAR)
    assert second.late_source(9.9) is None
    assert second.late_source(10.0) == 0
    second.add_tensor(1, "d", FAR)
    assert second.late_source(10.0) is None
