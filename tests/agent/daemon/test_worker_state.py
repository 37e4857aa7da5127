"""The state machine of a worker process."""

from __future__ import annotations

from typing import get_args

import pytest

from agent.daemon.supervisor import TRANSITIONS, IllegalWorkerTransition, WorkerEvent, WorkerStateMachine
from hearth.wire.messages import WorkerState


def after(*events: WorkerEvent) -> WorkerStateMachine:
    life = WorkerStateMachine()
    for event in events:
        life = life.after(event)
    return life


def test_worker_starts_loads_connects_and_stops() -> None:
    states = []
    life = WorkerStateMachine()
    for event in ("start_requested", "spawned", "loaded", "connected", "stopped"):
        life = life.after(event)  # type: ignore[arg-type]
        states.append(life.state)
    assert states == ["starting", "loading", "bound", "ready", "stopped"]


@pytest.mark.parametrize("state", get_args(WorkerState))
@pytest.mark.parametrize("event", get_args(WorkerEvent))
def test_illegal_transitions_raise(state: WorkerState, event: WorkerEvent) -> None:
    life = WorkerStateMachine(state)
    if (state, event) in TRANSITIONS:
        assert life.after(event).state == TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalWorkerTransition):
            life.after(event)


def test_stop_is_always_legal_and_failure_only_in_live_states() -> None:
    assert all((state, "stopped") in TRANSITIONS for state in get_args(WorkerState))
    assert {state for state, event in TRANSITIONS if event == "failed"} == {"starting", "loading", "bound", "ready"}


def test_illegal_transition_error_shows_the_history() -> None:
    with pytest.raises(
        IllegalWorkerTransition, match=r"loading cannot be connected; so far: none -> starting .*, starting -> loading"
    ):
        after("start_requested", "spawned", "connected")
