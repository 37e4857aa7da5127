"""The life of a worker process."""

from __future__ import annotations

from typing import get_args

import pytest

from agent.daemon.worker_state import TRANSITIONS, IllegalMove, WorkerEvent, WorkerLife
from hearth.wire.messages import WorkerState


def after(*events: WorkerEvent) -> WorkerLife:
    life = WorkerLife()
    for event in events:
        life = life.after(event)
    return life


def test_a_worker_starts_loads_connects_and_stops() -> None:
    states = []
    life = WorkerLife()
    for event in ("start_requested", "spawned", "loaded", "connected", "stopped"):
        life = life.after(event)  # type: ignore[arg-type]
        states.append(life.state)
    assert states == ["starting", "loading", "bound", "ready", "stopped"]


@pytest.mark.parametrize("state", get_args(WorkerState))
@pytest.mark.parametrize("event", get_args(WorkerEvent))
def test_every_other_move_raises(state: WorkerState, event: WorkerEvent) -> None:
    life = WorkerLife(state)
    if (state, event) in TRANSITIONS:
        assert life.after(event).state == TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalMove):
            life.after(event)


def test_a_worker_can_always_be_stopped_and_fails_once() -> None:
    assert all((state, "stopped") in TRANSITIONS for state in get_args(WorkerState))
    assert {state for state, event in TRANSITIONS if event == "failed"} == {"starting", "loading", "bound", "ready"}


def test_an_illegal_move_tells_the_history() -> None:
    with pytest.raises(
        IllegalMove, match=r"loading cannot be connected; so far: none -> starting .*, starting -> loading"
    ):
        after("start_requested", "spawned", "connected")
