"""The life cycle of a worker process as a state machine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hearth.wire.messages import WorkerState

WorkerEvent: TypeAlias = Literal[
    "start_requested", "spawned", "loaded", "connected", "reload_requested", "failed", "stopped"
]

_ALIVE: tuple[WorkerState, ...] = ("starting", "loading", "bound", "ready")
TRANSITIONS: Mapping[tuple[WorkerState, WorkerEvent], WorkerState] = {
    ("none", "start_requested"): "starting",
    ("starting", "spawned"): "loading",
    ("loading", "loaded"): "bound",
    ("bound", "connected"): "ready",
    ("loading", "reload_requested"): "loading",  # after that load was given up
    ("bound", "reload_requested"): "loading",
    ("ready", "reload_requested"): "loading",
    **{(state, "failed"): "failed" for state in _ALIVE},
    **{(state, "stopped"): "stopped" for state in ("none", *_ALIVE, "failed", "stopped")},
}


class IllegalWorkerTransition(Exception):
    """A programming error: an event that is not possible in the current state."""


@dataclass(frozen=True)
class WorkerStateMachine:
    """The current state of a worker process, and how it got there."""

    state: WorkerState = "none"
    history: tuple[str, ...] = ()  # all transitions so far

    def after(self, event: WorkerEvent) -> WorkerStateMachine:
        """Apply an event. Raises IllegalMove, with the history."""
        next_state = TRANSITIONS.get((self.state, event))
        if next_state is None:
            raise IllegalWorkerTransition(
                f"a worker that is {self.state} cannot be {event}; so far: {', '.join(self.history)}"
            )
        return WorkerStateMachine(next_state, (*self.history, f"{self.state} -> {next_state} ({event})"))
