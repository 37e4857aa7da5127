"""The state machine of a deployment: its table of transitions, and invariants under random events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import ready_device
from support.plans import BERT_LARGE, make_plan

from coordinator.serve.model.lifecycle import (
    HISTORY_LENGTH,
    RETRY_SECONDS,
    Action,
    ActionFailed,
    Actions,
    BetterPlanMade,
    ChunksPushed,
    DeploymentLost,
    DeploymentPhase,
    DevicesProfiled,
    DevicesSettled,
    Drained,
    DrainTimedOut,
    Event,
    GoalSet,
    IllegalEvent,
    Lifecycle,
    PlanMade,
    PreparedPlanFound,
    RequestWaits,
    RetryDue,
    RoomClaimed,
    SavedPlanAccepted,
    SavedPlanRejected,
    StopRequested,
    TakeOverFailed,
    WarmedUp,
    WentIdle,
    WorkersLoaded,
    WorkersTakenOver,
    retry_seconds,
    step,
)
from coordinator.serve.model.lifecycle_text import describe_cause
from hearth.errors import BadSetting, ChunkMissing, DeviceLost, LeaseLost, NoDevices, StoreFull, WorkerDied

LOST = DeviceLost(device="b", reason="no answer")
DIED = WorkerDied(device="b", reason="killed")
UNLEASED = LeaseLost(device="most devices of this home")
EVICTED = ChunkMissing(chunk="ab12", device="a")
FULL = StoreFull(device="b", needed_bytes=2, free_bytes=1)
WRONG = BadSetting(setting="--strategy", reason="no")


@dataclass(frozen=True)
class FakePlan:
    """The interface of a plan that the state machine uses."""

    name: str
    epoch: int = 0

    def with_epoch(self, epoch: int) -> FakePlan:
        return replace(self, epoch=epoch)


def plan(name: str = "p", epoch: int = 0) -> Any:
    return FakePlan(name, epoch)


def run(*events: Event, state: Lifecycle | None = None) -> tuple[Lifecycle, list[Actions]]:
    """The state after these events, one second apart, and the actions of each."""
    state = state or Lifecycle()
    taken = []
    for now, event in enumerate(events, start=1):
        state, actions = step(state, event, float(now))
        taken.append(actions)
    return state, taken


UP_TO_PLANNING = (GoalSet(), DevicesSettled(("a",)), DevicesProfiled("cluster"))
UP_TO_PUSHING = (*UP_TO_PLANNING, PlanMade(plan(), 0))
UP_TO_LOADING = (*UP_TO_PUSHING, ChunksPushed(1))
UP_TO_WARMING = (*UP_TO_LOADING, WorkersLoaded(1))
UP_TO_SERVING = (*UP_TO_WARMING, WarmedUp(1))
UP_TO_SWAP = (*UP_TO_SERVING, BetterPlanMade(plan("better"), 1, 0))
UP_TO_STOP = (*UP_TO_SERVING, StopRequested())


def test_first_start_passes_every_phase_with_one_action_each() -> None:
    state, taken = run(*UP_TO_SERVING)
    assert [move.phase for move in state.history] == [
        "settling", "profiling", "planning", "pushing", "loading", "warming", "serving",
    ]  # fmt: skip
    assert taken == [("settle",), ("profile",), ("make_plan",), ("push",), ("load",), ("warm_up",),
                     ("release_workers", "serve")]  # fmt: skip
    assert (state.devices, state.cluster, state.plan) == (("a",), "cluster", plan(epoch=1))
    assert (state.epoch, state.has_served, [move.at for move in state.history]) == (1, True, [1, 2, 3, 4, 5, 6, 7])


# (earlier events, event, phase afterwards, actions, plan of the deployment afterwards)
TABLE: list[tuple[tuple[Event, ...], Event, DeploymentPhase, Actions, Any]] = [
    ((), GoalSet(plan("old", 7)), "settling", ("await_devices",), None),
    ((GoalSet(plan("old", 7)),), SavedPlanAccepted(41), "pushing", ("push",), plan("old", 42)),
    ((GoalSet(plan("old", 7)),), SavedPlanRejected("a device did not come"), "settling", ("settle",), None),
    ((), GoalSet(None, plan("old", 7)), "adopting", ("take_over",), plan("old", 7)),
    ((GoalSet(None, plan("old", 7)),), WorkersTakenOver(7), "warming", ("warm_up",), plan("old", 7)),
    ((GoalSet(None, plan("old", 7)),), TakeOverFailed("no worker"), "settling", ("settle",), None),
    ((GoalSet(plan("o", 7), plan("o", 7)),), TakeOverFailed("no worker"), "settling", ("await_devices",), None),
    (
        (GoalSet(plan("o", 7), plan("o", 7)),), TakeOverFailed("one is missing", any_runs=True), "settling",
        ("retire_workers", "settle"), None,
    ),
    (
        (GoalSet(None, plan("old", 7)), WorkersTakenOver(7)), DeploymentLost(7, LOST), "settling",
        ("record_loss", "retire_workers", "settle"), None,
    ),
    (UP_TO_SERVING, BetterPlanMade(plan("better"), 1, 5), "draining", ("stop_admitting", "drain"), plan(epoch=1)),
    (UP_TO_SWAP, Drained(), "pushing", ("retire_workers", "push"), plan("better", 2)),
    (UP_TO_SWAP, DrainTimedOut(), "pushing", ("retire_workers", "push"), plan("better", 2)),
    (UP_TO_SWAP, DeploymentLost(1, LOST), "settling", ("record_loss", "retire_workers", "settle"), None),
    (UP_TO_SWAP, StopRequested(), "draining", ("refuse_requests", "drain"), plan(epoch=1)),
    (
        UP_TO_SERVING, DeploymentLost(1, LOST), "settling",
        ("stop_admitting", "record_loss", "retire_workers", "settle"), None,
    ),
    (UP_TO_SERVING, DeploymentLost(1, UNLEASED), "adopting", ("stop_admitting", "resume"), plan(epoch=1)),
    ((*UP_TO_SERVING, DeploymentLost(1, UNLEASED)), WorkersTakenOver(1), "warming", ("warm_up",), plan(epoch=1)),
    (
        (*UP_TO_SERVING, DeploymentLost(1, UNLEASED)), DeploymentLost(1, LOST), "settling",
        ("record_loss", "retire_workers", "settle"), None,
    ),
    (UP_TO_SWAP, DeploymentLost(1, UNLEASED), "settling", ("record_loss", "retire_workers", "settle"), None),
    (UP_TO_WARMING, ActionFailed(UNLEASED), "adopting", ("resume",), plan(epoch=1)),
    (UP_TO_LOADING, ActionFailed(UNLEASED), "settling", ("retire_workers", "settle"), None),
    (UP_TO_PLANNING, ActionFailed(UNLEASED), "settling", ("settle",), None),
    (UP_TO_SERVING, StopRequested(), "draining", ("refuse_requests", "drain"), plan(epoch=1)),
    (
        (*UP_TO_SERVING, DeploymentLost(1, LOST)), PreparedPlanFound(plan("ahead"), 5), "pushing", ("push",),
        plan("ahead", 6),
    ),
    (UP_TO_STOP, Drained(), "idle", ("stop_workers", "finish"), None),
    (UP_TO_STOP, DrainTimedOut(), "idle", ("stop_workers", "finish"), None),
    (UP_TO_STOP, DeploymentLost(1, LOST), "idle", ("record_loss", "stop_workers", "finish"), None),
    (UP_TO_STOP, StopRequested(), "idle", ("refuse_requests", "stop_workers", "finish"), None),
    (UP_TO_PLANNING, StopRequested(), "idle", ("refuse_requests", "stop_workers", "finish"), None),
    (UP_TO_PUSHING, DeploymentLost(1, LOST), "settling", ("record_loss", "settle"), None),
    (UP_TO_PUSHING, ActionFailed(LOST), "settling", ("record_loss", "settle"), None),
    (UP_TO_LOADING, DeploymentLost(1, LOST), "settling", ("record_loss", "retire_workers", "settle"), None),
    (UP_TO_LOADING, ActionFailed(EVICTED), "settling", ("record_loss", "retire_workers", "settle"), None),
    (UP_TO_LOADING, ActionFailed(DIED), "settling", ("record_loss", "retire_workers", "settle"), None),
    (UP_TO_WARMING, DeploymentLost(1, LOST), "settling", ("record_loss", "retire_workers", "settle"), None),
    (UP_TO_WARMING, DeploymentLost(1, FULL), "failed", ("record_loss", "stop_workers", "wait_to_retry"), None),
    (UP_TO_PLANNING, ActionFailed(LOST), "failed", ("record_loss", "stop_workers", "wait_to_retry"), None),
    (UP_TO_WARMING, ActionFailed(FULL), "failed", ("record_loss", "stop_workers", "wait_to_retry"), None),
    (UP_TO_PLANNING, ActionFailed(NoDevices(seconds=1)), "failed", ("record_loss", "stop_workers", "wait_to_retry"),
     None),
    (UP_TO_PLANNING, ActionFailed(WRONG), "failed", ("record_loss", "stop_workers", "finish"), None),
    ((*UP_TO_WARMING, ActionFailed(FULL)), RetryDue(), "settling", ("settle",), None),
    (
        UP_TO_SERVING, WentIdle(1), "unloaded",
        ("stop_admitting", "retire_workers", "stop_workers", "await_request"), None,
    ),
    ((*UP_TO_SERVING, WentIdle(1)), RequestWaits(), "settling", ("await_devices",), None),
    ((*UP_TO_SERVING, WentIdle(1)), StopRequested(), "idle", ("refuse_requests", "stop_workers", "finish"), None),
    (
        (*UP_TO_SERVING, WentIdle(1), RequestWaits()), SavedPlanAccepted(1), "pushing", ("push",), plan(epoch=2),
    ),
    *(
        (
            before, RoomClaimed("chat"), "failed", ("stop_admitting", "retire_workers", "stop_workers", "wait_to_retry"),
            None,
        )
        for before in (UP_TO_PLANNING, UP_TO_LOADING, UP_TO_SERVING, UP_TO_SWAP)
    ),
    ((*UP_TO_SERVING, RoomClaimed("chat")), RetryDue(), "settling", ("settle",), None),
    ((*UP_TO_SERVING, DeploymentLost(1, LOST), ActionFailed(FULL)), RetryDue(), "settling", ("settle",), None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "event", "phase", "actions", "deployed"),
    TABLE,
    ids=[f"{run(*before)[0].phase}-{type(event).__name__}" for before, event, *_ in TABLE],
)
def test_transition_table(
    before: tuple[Event, ...], event: Event, phase: DeploymentPhase, actions: Actions, deployed: Any
) -> None:
    state, _ = run(*before)
    after, taken = step(state, event, float(len(before) + 1))
    assert (after.phase, taken, after.plan) == (phase, actions, deployed)
    assert after.cause is event
    assert after.error is getattr(event, "error", None)
    served_before = isinstance(event, WorkersTakenOver) or getattr(event, "any_runs", False) or state.has_served
    assert after.has_served == (served_before or before[: len(UP_TO_SERVING)] == UP_TO_SERVING)


def test_unloaded_model_takes_requests_also_after_a_restart_until_it_cannot_be_loaded() -> None:
    state, taken = run(GoalSet(plan("old", 7), None, unloaded=True))
    assert (state.phase, state.takes_requests, taken[-1]) == ("unloaded", True, ("await_request",))
    state, taken = run(RequestWaits(), SavedPlanRejected("a device is gone"), state=state)
    assert (state.phase, state.takes_requests, taken[-1]) == ("settling", True, ("settle",))
    failed, _ = run(ActionFailed(NoDevices(seconds=1)), state=state)
    assert (failed.phase, failed.takes_requests) == ("failed", False)
    again = (DevicesSettled(("a",)), DevicesProfiled("cluster"), PlanMade(plan(), 7), ChunksPushed(8))
    served, _ = run(*again, WorkersLoaded(8), WarmedUp(8), DeploymentLost(8, LOST), state=state)
    assert (served.phase, served.takes_requests) == ("settling", False)


def test_model_that_ends_makes_no_room() -> None:
    for state in (run(*UP_TO_STOP)[0], run(*UP_TO_SERVING, WentIdle(1))[0], Lifecycle()):
        assert not state.may_make_room
        with pytest.raises(IllegalEvent):
            step(state, RoomClaimed("chat"), 9.0)


def test_pause_after_a_failure_grows_and_is_short_at_first_if_a_device_failed() -> None:
    pauses, events = [], [DeploymentLost(1, LOST)]
    state, _ = run(*UP_TO_SERVING)
    for _ in range(7):
        state, _ = run(*events, ActionFailed(FULL), state=state)
        pauses.append(retry_seconds(state))
        events = [RetryDue()]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, RETRY_SECONDS, RETRY_SECONDS]
    state, _ = run(*UP_TO_PLANNING, ActionFailed(NoDevices(seconds=1)))
    assert retry_seconds(state) == RETRY_SECONDS


def test_devices_that_are_lost_one_after_another_are_repaired_at_once_and_each_once() -> None:
    state, _ = run(*UP_TO_SERVING, DeploymentLost(1, LOST))
    again = (DevicesSettled(("a",)), DevicesProfiled("cluster"), PlanMade(plan(), 0))
    phases = []
    for epoch, name in enumerate("bcdbe", start=2):
        error = WorkerDied(device=name, reason="killed")
        state, taken = run(*again, ChunksPushed(epoch), DeploymentLost(epoch, error), state=state)
        phases.append(state.phase)
        assert ("stop_workers" in taken[-1]) == (state.phase == "failed")
        if state.phase == "failed":
            assert retry_seconds(state) == 0.1
            state, _ = run(RetryDue(), state=state)
    assert phases == ["settling", "settling", "settling", "failed", "settling"]
    state, _ = run(*again, ChunksPushed(7), WorkersLoaded(7), WarmedUp(7), DeploymentLost(7, LOST), state=state)
    state, _ = run(*again, ChunksPushed(8), ActionFailed(DIED), state=state)
    assert state.phase == "settling"  # the deployment has served since b was lost


def test_epochs_exceed_all_epochs_known_to_agents() -> None:
    state, _ = run(*UP_TO_PLANNING, PlanMade(plan(), last_epoch=30))
    assert state.epoch == 31
    state, _ = run(ChunksPushed(31), WorkersLoaded(31), WarmedUp(31), DeploymentLost(31, LOST), state=state)
    assert (state.epoch, state.last_epoch) == (None, 31)
    state, _ = run(DevicesSettled(()), DevicesProfiled(""), PlanMade(plan(), last_epoch=3), state=state)
    assert state.epoch == 32


def test_events_of_earlier_deployments_are_ignored() -> None:
    serving, _ = run(*UP_TO_SERVING, DeploymentLost(1, LOST), DevicesSettled(()), DevicesProfiled(""))
    for event in (DeploymentLost(1, LOST), WarmedUp(1), BetterPlanMade(plan(), 1, 0)):
        assert step(serving, event, 99.0) == (serving, ())


def test_illegal_transition_raises_with_the_history() -> None:
    state, _ = run(*UP_TO_PLANNING)
    with pytest.raises(IllegalEvent) as error:
        step(state, RetryDue(), 9.0)
    assert "RetryDue() cannot happen while planning" in str(error.value)
    assert "2.000 profiling x1: DevicesSettled(devices=('a',))" in str(error.value)


def test_contradiction_and_stop_are_final() -> None:
    contradicted, _ = run(*UP_TO_PLANNING, ActionFailed(WRONG))
    stopped, _ = run(StopRequested())
    for state in (contradicted, stopped):
        assert step(state, StopRequested(), 9.0) == (state, ())
        for event in (RetryDue(), GoalSet()):
            with pytest.raises(IllegalEvent):
                step(state, event, 9.0)


def test_repeated_failures_are_merged_in_the_history() -> None:
    attempt = (RetryDue(), DevicesSettled(("a",)), ActionFailed(NoDevices(seconds=0)))
    state, _ = run(*UP_TO_SERVING, DeploymentLost(1, LOST), ActionFailed(NoDevices(seconds=0)), *attempt * 1000)
    assert [(move.phase, move.times) for move in state.history[-3:]] == [
        ("serving", 1),
        ("settling", 1),
        ("failed", 1001),
    ]
    state, _ = run(RetryDue(), ActionFailed(FULL), *attempt, state=state)
    assert [(move.phase, move.times) for move in state.history if move.phase == "failed"] == [
        ("failed", 1001), ("failed", 1), ("failed", 1),
    ]  # fmt: skip


def test_history_is_bounded() -> None:
    again = (DeploymentLost, DevicesSettled(()), DevicesProfiled(""), PlanMade(plan(), 0))
    state, _ = run(*UP_TO_SERVING)
    for _ in range(30):
        epoch = state.epoch
        assert epoch is not None
        state, _ = run(again[0](epoch, LOST), *again[1:], state=state)
        state, _ = run(ChunksPushed(epoch + 1), WorkersLoaded(epoch + 1), WarmedUp(epoch + 1), state=state)
    assert len(state.history) == HISTORY_LENGTH
    assert state.history[-1].phase == "serving"


def test_every_event_has_a_description() -> None:
    examples: dict[type[Any], Event] = {
        TakeOverFailed: TakeOverFailed("gone"), SavedPlanRejected: SavedPlanRejected("gone"),
        DevicesSettled: DevicesSettled((ready_device("a"),)), RoomClaimed: RoomClaimed("chat"),
        PlanMade: PlanMade(make_plan(BERT_LARGE, "hmp", (1, 1)), 0),
        PreparedPlanFound: PreparedPlanFound(make_plan(BERT_LARGE, "hmp", (1, 1)), 0), ActionFailed: ActionFailed(FULL),
        BetterPlanMade: BetterPlanMade(make_plan(BERT_LARGE, "hmp", (1, 1)), 1, 0), DeploymentLost: DeploymentLost(1, LOST),
    }  # fmt: skip
    found = {kind: describe_cause(examples.get(kind) or object.__new__(kind)) for kind in get_args(Event)}
    assert len(set(found.values())) == len(found) - 1  # both plans have the same description
    assert found[SavedPlanRejected] == "the saved plan is not used: gone"
    assert found[WorkersLoaded] == "workers are loaded and connected"


# ---- random events --------------------------------------------------------------------------------------------------

EPOCHS = st.integers(1, 6)
PLANS = st.sampled_from("xyz").map(plan)
ERRORS = st.sampled_from([LOST, DIED, FULL, WRONG, UNLEASED])
EVENTS = st.one_of(
    st.builds(GoalSet, st.none() | PLANS, st.none() | st.builds(plan, st.sampled_from("xyz"), EPOCHS)),
    st.builds(TakeOverFailed, st.just("no worker"), st.booleans()),
    st.builds(SavedPlanAccepted, EPOCHS),
    st.just(SavedPlanRejected("gone")),
    st.just(DevicesSettled(("a", "b"))),
    st.just(DevicesProfiled("cluster")),
    st.builds(PlanMade, PLANS, EPOCHS),
    st.builds(PreparedPlanFound, PLANS, EPOCHS),
    st.builds(BetterPlanMade, PLANS, EPOCHS, EPOCHS),
    st.builds(DeploymentLost, EPOCHS, ERRORS),
    st.one_of(*(st.builds(event, EPOCHS) for event in (ChunksPushed, WorkersLoaded, WarmedUp, WorkersTakenOver))),
    st.builds(ActionFailed, ERRORS),
    st.builds(WentIdle, EPOCHS),
    st.sampled_from([RetryDue(), Drained(), DrainTimedOut(), StopRequested(), RequestWaits(), RoomClaimed("chat")]),
)
WORK: dict[DeploymentPhase, tuple[Action, ...]] = {
    "settling": ("await_devices", "settle"), "profiling": ("profile",), "planning": ("make_plan",), "pushing": ("push",),
    "loading": ("load",), "warming": ("warm_up",), "serving": ("serve",), "draining": ("drain",),
    "failed": ("wait_to_retry", "finish"), "idle": ("finish",), "adopting": ("take_over", "resume"),
    "unloaded": ("await_request",),
}  # fmt: skip


def reports(state: Lifecycle) -> list[Event]:
    """The completions that an executor of this phase's action could report."""
    epoch = state.epoch or 0
    return {
        "adopting": [WorkersTakenOver(epoch), TakeOverFailed("one is missing", any_runs=True)],
        "settling": [SavedPlanAccepted(0)] if state.saved_plan else [DevicesSettled(("a",))],
        "profiling": [DevicesProfiled("cluster")],
        "planning": [PlanMade(plan("new"), 0)],
        "pushing": [ChunksPushed(epoch)],
        "loading": [WorkersLoaded(epoch)],
        "warming": [WarmedUp(epoch)],
        "serving": [BetterPlanMade(plan("better"), epoch, 0), DeploymentLost(epoch, LOST), WentIdle(epoch)],
        "unloaded": [RequestWaits()],
        "draining": [Drained()],
        "failed": [RetryDue()],
        "idle": [GoalSet(), GoalSet(None, plan("running", 3)), GoalSet(plan("old"), unloaded=True)],
    }[state.phase]


@given(st.data())
def test_random_events_keep_all_invariants(data: st.DataObject) -> None:
    state = Lifecycle()
    completed: list[type[Event]] = []  # of the current epoch
    epochs: list[int] = []
    admitting = worker_runs = False
    lost_plan: Any = None
    for now in range(data.draw(st.integers(1, 60))):
        # Mostly reports of the executor, so that sequences reach late phases; or a completion at a wrong time.
        epoch = state.epoch or 1
        present = [ChunksPushed(epoch), WorkersLoaded(epoch), WarmedUp(epoch), DeploymentLost(epoch, LOST)]
        event = data.draw(st.sampled_from(reports(state)) | st.sampled_from(present) | EVENTS)
        try:
            after, actions = step(state, event, float(now))
        except IllegalEvent as error:
            assert error.state is state
            continue
        if not actions:
            assert after is state
            continue

        # The last action on entering a phase is the one that leads out of it.
        assert actions[-1] in WORK[after.phase]
        assert not any(action in work for action in actions[:-1] for work in WORK.values())
        assert ("finish" in actions) == after.finished
        assert after.history[-1].phase == after.phase
        assert len(after.history) <= HISTORY_LENGTH

        # Requests run only while serving, and the first action after serving stops admission.
        for action in actions:
            if action == "serve":
                admitting = True
                assert state.phase == "warming"
                assert completed == [ChunksPushed, WorkersLoaded]
                assert event == WarmedUp(after.epoch or 0)
            elif action in ("stop_admitting", "refuse_requests"):
                admitting = False
            elif action in ("stop_workers", "retire_workers"):
                assert not admitting
                worker_runs = False
            elif action == "release_workers":
                assert after.phase == "serving"
            elif action in ("load", "take_over"):
                worker_runs = True
            elif action == "push":
                assert not worker_runs  # the workers of the previous plan have stopped, or wait for this one
                assert after.epoch is not None
                epochs.append(after.epoch)
                completed = []
                assert lost_plan is None or lost_plan.epoch < after.epoch
        assert admitting == (after.phase == "serving")

        if state.phase == "serving" and isinstance(event, DeploymentLost) and event.error is UNLEASED:
            assert (after.phase, after.plan) == ("adopting", state.plan)  # its workers run on
        elif state.phase == "serving" and isinstance(event, DeploymentLost):
            # A lost plan is not deployed again unchanged: the coordinator looks for devices and plans.
            assert after.phase == "settling"
            assert (after.plan, after.saved_plan, after.next_plan) == (None, None, None)
            lost_plan = state.plan
        if isinstance(event, TakeOverFailed):
            worker_runs = False  # they are stopped, or there were none
        if isinstance(event, WorkersTakenOver):
            completed = [ChunksPushed, WorkersLoaded]
        if isinstance(event, ChunksPushed | WorkersLoaded):
            assert event.epoch == state.epoch
            completed.append(type(event))
        state = after
    assert epochs == sorted(set(epochs))


@given(st.lists(EVENTS, max_size=30))
def test_every_unfinished_state_can_stop_and_can_reach_serving(events: list[Event]) -> None:
    state = Lifecycle()
    for now, event in enumerate(events):
        try:
            state, _ = step(state, event, float(now))
        except IllegalEvent:
            continue
    if state.finished:
        return
    stopped, _ = step(state, StopRequested(), 100.0)
    if stopped.phase == "draining":
        stopped, _ = step(stopped, DrainTimedOut(), 101.0)
    assert (stopped.phase, stopped.finished, stopped.plan) == ("idle", True, None)
    for _ in range(12):
        if state.phase == "serving" or (state.phase == "draining" and state.next_plan is None):
            break
        state, _ = step(state, reports(state)[0], 100.0)
    else:
        raise AssertionError(f"{state.phase} leads nowhere")
