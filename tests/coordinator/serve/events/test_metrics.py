"""Metrics, how requests are recorded, and what a life cycle's steps mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.plans import BERT_LARGE, make_plan

from coordinator.serve.events.metrics import HomeMetrics
from coordinator.serve.events.requests import RequestRecorder
from coordinator.serve.model import lifecycle as cycle
from coordinator.serve.model.lifecycle_text import lifecycle_events
from hearth.errors import ContextTooLong, DeviceLost, HearthError
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply

PLAN = make_plan(BERT_LARGE, "hmp", (2, 1))
LOST = DeviceLost(device="attic", reason="no answer")
END = wire.TextEnded(
    text=".", reason="length", num_prompt_tokens=9, num_cached_tokens=4, num_tokens=5, queued_seconds=0.25,
    first_token_seconds=0.5, decode_seconds=2.0,
)  # fmt: skip


def controller(**parts: Any) -> Any:
    requests = SimpleNamespace(admission=SimpleNamespace(num_running=1, num_waiting=2), last_latency_seconds=0.5)
    given = {"plan": PLAN, "deployment": None, "goal": SimpleNamespace(path="/srv/tiny", weights="int8"), **parts}
    return SimpleNamespace(**{"name": "tiny", "requests": requests, **given})


def metrics(*controllers: Any, devices: dict[str, Any] | None = None) -> HomeMetrics:
    fleet, profiler = SimpleNamespace(devices=devices or {}), SimpleNamespace(links={})
    return HomeMetrics(cast(Any, fleet), cast(Any, profiler), {each.name: each for each in controllers})


def samples(of: HomeMetrics) -> dict[tuple[str, ...], float]:
    """Values by the sample's name and its labels' values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(of.text().decode())
        for sample in family.samples
    }


# ---- requests -----------------------------------------------------------------------------------------------------------


def ended(answer: Any, message: wire.ModelRequest, leave_after: int | None = None) -> wire.RequestEnded:
    """The one event of a request with this answer, an error, or a list of a stream's messages."""
    events: list[wire.Event] = []

    async def stream() -> AsyncGenerator[Any, None]:
        for each in answer:
            if isinstance(each, HearthError):
                raise each
            yield each

    async def handler() -> Any:
        if isinstance(answer, HearthError):
            raise answer
        return stream() if isinstance(answer, list) else answer

    async def main() -> None:
        recorder = RequestRecorder(message, "lamp", CONTROLLER, events.append)
        response: Any = await recorder.watch(handler())
        if isinstance(response, AsyncGenerator):
            count = 0
            async for _ in response:
                count += 1
                if count == leave_after:
                    break
            await response.aclose()

    try:
        asyncio.run(main())
    except HearthError:
        pass
    (event,) = events
    assert isinstance(event, wire.RequestEnded)
    return event


CONTROLLER: Any = SimpleNamespace(name="tiny", goal=SimpleNamespace(path="/srv/tiny"), plan=PLAN)
TOKEN = wire.TextGenerated(token_ids=(1,), text="a")
ASKED = wire.Generate(prompt="p", request_id="r")


def test_answered_stream_is_recorded_with_its_times() -> None:
    event = ended([TOKEN, END], ASKED)
    assert (event.outcome, event.app, event.model, event.finish_reason) == ("served", "lamp", "tiny", "length")
    assert (event.num_prompt_tokens, event.num_cached_tokens, event.num_tokens) == (9, 4, 5)
    assert (event.queued_seconds, event.first_token_seconds, event.tokens_per_second) == (0.25, 0.5, 2.0)
    assert event.devices == tuple(device.name for device in PLAN.devices)


def test_rest_of_a_broken_stream_counts_only_its_own_tokens() -> None:
    assert ended([TOKEN, END], ASKED.model_copy(update={"generated": (1, 2)})).num_tokens == 3


@pytest.mark.parametrize(
    ("answer", "outcome", "error"),
    [
        ([TOKEN, LOST], "failed", "DeviceLost"),
        (LOST, "failed", "DeviceLost"),
        ([ContextTooLong(num_prompt_tokens=9, max_tokens=4, context_tokens=8)], "refused", "ContextTooLong"),
    ],
)
def test_errors_are_recorded_with_their_advice(answer: Any, outcome: str, error: str) -> None:
    event = ended(answer, ASKED)
    assert (event.outcome, event.error) == (outcome, error)
    assert event.message
    assert event.advice


def test_client_that_leaves_is_recorded_unless_it_had_the_whole_answer() -> None:
    assert ended([TOKEN, TOKEN, END], ASKED, leave_after=1).outcome == "cancelled"
    assert ended([TOKEN, END], ASKED, leave_after=2).outcome == "served"


def test_vectors_are_recorded() -> None:
    event = ended(Reply(wire.Vectors(latency_seconds=0.5, num_tokens=7)), wire.Embed(texts=("a",)))
    assert (event.operation, event.outcome, event.num_prompt_tokens, event.tokens_per_second) == (
        "embed", "served", 7, 14.0,
    )  # fmt: skip


# ---- metrics ------------------------------------------------------------------------------------------------------------


def test_requests_are_counted() -> None:
    of = metrics(controller())
    of.count(ended([TOKEN, END], ASKED))
    of.count(ended([TOKEN, END], ASKED))
    of.count(ended(LOST, ASKED))
    found = samples(of)
    assert found["hearth_requests_total", "generate", "tiny", "served"] == 2
    assert found["hearth_requests_total", "generate", "tiny", "failed"] == 1
    assert found["hearth_generated_tokens_total", "tiny"] == 10
    assert found["hearth_prefix_cache_hits_total", "tiny"] == 8
    assert found["hearth_time_to_first_token_seconds_count", "tiny"] == 2
    assert found["hearth_time_to_first_token_seconds_sum", "tiny"] == 1.5
    assert found["hearth_time_per_output_token_seconds_sum", "tiny"] == 1.0
    assert (found["hearth_requests_running", "tiny"], found["hearth_requests_waiting", "tiny"]) == (1, 2)


def test_names_are_escaped() -> None:
    odd = controller(name='a "b"\n\\c')
    assert samples(metrics(odd))["hearth_requests_running", 'a "b"\n\\c'] == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), max_size=30))
def test_counters_of_workers_never_fall_over_changes_of_plan_and_restarts(steps: list[tuple[int, int]]) -> None:
    """Each step is a scrape: how many plans later, and what the workers of the plan report then."""
    one = controller()
    of = metrics(one)
    epoch, before = 0, 0.0
    for later, sent in steps:
        epoch += later
        stats = wire.WireStats(raw_bytes=2 * sent, sent_bytes=sent)
        one.deployment = SimpleNamespace(epoch=epoch, wire=stats, dropped_messages=sent)
        now = samples(of)["hearth_wire_bytes_total", "sent"]
        assert now >= max(before, sent)
        before = now


# ---- plans --------------------------------------------------------------------------------------------------------------


def events_of(*happened: cycle.Event) -> list[wire.Event]:
    state, events = cycle.Lifecycle(), []
    for each in happened:
        after, _ = cycle.step(state, each, 0.0)
        events += lifecycle_events("default", state, after)
        state = after
    return events


START = (
    cycle.GoalSet(), cycle.DevicesSettled(()), cycle.DevicesProfiled(None), cycle.PlanMade(PLAN, 0),
    cycle.ChunksPushed(1), cycle.WorkersLoaded(1), cycle.WarmedUp(1),
)  # fmt: skip


def test_life_cycle_is_recorded_and_says_why_the_plan_changed() -> None:
    lost = cycle.DeploymentLost(1, LOST)
    again = (
        lost, cycle.PreparedPlanFound(PLAN, 1), cycle.ChunksPushed(2), cycle.WorkersLoaded(2), cycle.WarmedUp(2),
        cycle.BetterPlanMade(PLAN, 2, 2), cycle.Drained(), cycle.ChunksPushed(3), cycle.WorkersLoaded(3), cycle.WarmedUp(3),
    )  # fmt: skip
    events = events_of(*START, *again)
    changes = [(each.reason, each.epoch) for each in events if isinstance(each, wire.PlanChanged)]
    assert changes == [("start", 1), ("DeviceLost", 2), ("better_plan", 3)]
    phases = [each.phase for each in events if isinstance(each, wire.PhaseChanged)]
    assert phases[:7] == ["settling", "profiling", "planning", "pushing", "loading", "warming", "serving"]
    of = metrics()
    for each in events:
        of.count(each)
    found = samples(of)
    assert found["hearth_replans_total", "DeviceLost"] == found["hearth_replans_total", "better_plan"] == 1
    assert found["hearth_recoveries_total",] == 1


def test_model_that_is_loaded_on_demand_or_made_room_has_recovered_from_no_loss() -> None:
    loaded = (cycle.ChunksPushed(2), cycle.WorkersLoaded(2), cycle.WarmedUp(2))
    for reason, happened in (
        ("unloaded", (cycle.WentIdle(1), cycle.RequestWaits(), cycle.SavedPlanAccepted(1), *loaded)),
        ("room_claimed", (cycle.RoomClaimed("chat"), cycle.RetryDue(), cycle.PreparedPlanFound(PLAN, 1), *loaded)),
    ):
        of = metrics()
        for each in events_of(*START, *happened):
            of.count(each)
        found = samples(of)
        assert found["hearth_replans_total", reason] == 1
        assert found["hearth_recoveries_total",] == 0
