"""Life cycle of one deployment as a pure state machine: `step(state, event, now)` returns the next state and actions.

Events report what happened; `controller` executes the actions. The phases of a start without failures: idle, settling
(waiting for devices), profiling, planning, pushing weights, loading, warming up, serving.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from hearth.errors import HearthError
from hearth.plan.plan import Plan
from hearth.wire.messages import DeploymentPhase

RETRY_SECONDS = 2.0  # pause after a failure: does not flood the log, and is short compared with planning and loading
HISTORY_LENGTH = 50  # moves kept: enough for several recoveries of about eight moves each
_BRING_UP = ("settling", "profiling", "planning", "pushing", "loading", "warming")


# ---- events: what happened ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GoalSet:
    """Serve a model. `plan`, for instance saved before a power cut, is tried first."""

    plan: Plan | None = None


@dataclass(frozen=True)
class PlanRestored:
    """All devices of the saved plan are available. `last_epoch` is the newest epoch that any agent has seen."""

    last_epoch: int


@dataclass(frozen=True)
class PlanSetAside:
    """The saved plan cannot be used: a device is missing, or it violates a limit of the user."""

    reason: str


@dataclass(frozen=True)
class DevicesSettled:
    """Devices that a plan may use are available; `devices` are `coordinator.devices.registry.Device`."""

    devices: tuple[Any, ...]


@dataclass(frozen=True)
class DevicesProfiled:
    """The devices are measured. `cluster` is the planner's input for this kind of model; failed devices are left out."""

    cluster: Any


@dataclass(frozen=True)
class PlanMade:
    plan: Plan
    last_epoch: int


@dataclass(frozen=True)
class ChunksPushed:
    epoch: int


@dataclass(frozen=True)
class WorkersLoaded:
    epoch: int


@dataclass(frozen=True)
class WarmedUp:
    epoch: int


@dataclass(frozen=True)
class BetterPlanMade:
    """The background search found a plan that is worth replacing the deployment `epoch`."""

    plan: Plan
    epoch: int
    last_epoch: int


@dataclass(frozen=True)
class DeploymentLost:
    """The deployment `epoch` failed: a device, a worker or the plan itself."""

    epoch: int
    error: HearthError


@dataclass(frozen=True)
class WorkFailed:
    """An action of the bring-up raised `error`."""

    error: HearthError


@dataclass(frozen=True)
class RetryDue:
    """The pause after a failure is over."""


@dataclass(frozen=True)
class Drained:
    """All running requests have finished."""


@dataclass(frozen=True)
class DrainTimedOut:
    """The drain timeout passed while requests were still running."""


@dataclass(frozen=True)
class StopRequested:
    """Stop serving. The first one drains running requests; the second ends at once."""


Event: TypeAlias = (
    GoalSet | PlanRestored | PlanSetAside | DevicesSettled | DevicesProfiled | PlanMade | ChunksPushed | WorkersLoaded
    | WarmedUp | BetterPlanMade | DeploymentLost | WorkFailed | RetryDue | Drained | DrainTimedOut | StopRequested
)  # fmt: skip


# ---- actions: what to do next ---------------------------------------------------------------------------------------

Action: TypeAlias = Literal[
    # Executed at once:
    "stop_admitting",  # requests wait for the next plan
    "refuse_requests",  # fail waiting and new requests with NotServing
    "record_loss",  # remember the lost device, so that plans avoid it for a while
    # Executed in order, after the previous actions have ended:
    "take_down",  # stop the deployment's workers, if there are any
    "finish",  # end `run`; in the phase `failed`, with an error that retrying cannot fix
    # Likewise, and each reports an event when done. Every phase except `idle` has one:
    "await_devices",  # wait for those of the saved plan
    "settle",  # wait until no new device joins; without the wait if requests were served before
    "profile",  # measure the devices
    "make_plan",  # with a short search if requests were served before, since clients are waiting
    "push",  # save goal, plan and epoch to disk before any device sees the epoch; then send the weights
    "load",  # start and connect the workers
    "warm_up",  # run a first small request
    "serve",  # admit requests, and look for a better plan
    "drain",  # wait for running requests, up to the drain timeout
    "wait_to_retry",
]
Actions: TypeAlias = tuple[Action, ...]


# ---- the state ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """At `at` seconds, `cause` moved the deployment to `phase`. A repeated failure is one move with a count, `times`."""

    at: float
    phase: DeploymentPhase
    cause: Event
    times: int = 1


@dataclass(frozen=True)
class Lifecycle:
    """State of one deployment."""

    phase: DeploymentPhase = "idle"
    devices: tuple[Any, ...] = ()  # that the next plan may use
    cluster: Any = None  # their profile
    plan: Plan | None = None  # of the deployment that is starting, serving or draining
    saved: Plan | None = None  # tried first, once
    following: Plan | None = None  # while draining: the plan to deploy next; None: stop
    last_epoch: int = 0  # the newest of all deployments of this home
    has_served: bool = False
    finished: bool = False  # final state
    history: tuple[Move, ...] = ()

    @property
    def epoch(self) -> int | None:
        """Epoch of the current deployment."""
        return self.plan.epoch if self.plan is not None else None

    @property
    def cause(self) -> Event | None:
        """The event that led to this phase."""
        return self.history[-1].cause if self.history else None

    @property
    def error(self) -> HearthError | None:
        """The error of `cause`, if it is a failure."""
        return self.cause.error if isinstance(self.cause, DeploymentLost | WorkFailed) else None


class IllegalMove(Exception):
    """A bug: the event cannot happen in this phase. The message contains the history."""

    def __init__(self, state: Lifecycle, event: Event) -> None:
        self.state = state
        moves = "\n".join(f"  {move.at:.3f} {move.phase} x{move.times}: {move.cause}" for move in state.history)
        super().__init__(f"{event} cannot happen while {state.phase}; history:\n{moves}")


def step(state: Lifecycle, event: Event, now: float) -> tuple[Lifecycle, Actions]:
    """The next state and the actions to execute. Events of earlier deployments are ignored. Raises IllegalMove."""
    if getattr(event, "epoch", state.epoch) != state.epoch or (state.finished and isinstance(event, StopRequested)):
        return state, ()
    moved = None if state.finished else _move(state, event)
    if moved is None:
        raise IllegalMove(state, event)
    after, actions = moved
    move = Move(now, after.phase, event)
    return replace(after, history=_remembered(state.history, move)), actions


def _move(state: Lifecycle, event: Event) -> tuple[Lifecycle, Actions] | None:
    """The transition table; None: the event is illegal in this phase."""

    def to(phase: DeploymentPhase, *actions: Action, **changes: Any) -> tuple[Lifecycle, Actions]:
        return replace(state, phase=phase, **changes), actions

    def deploy(plan: Plan, last_epoch: int, *first: Action) -> tuple[Lifecycle, Actions]:
        epoch = max(state.last_epoch, last_epoch) + 1
        return to("pushing", *first, "push", plan=plan.with_epoch(epoch), saved=None, following=None, last_epoch=epoch)

    def settle(*first: Action) -> tuple[Lifecycle, Actions]:
        return to("settling", *first, "settle", plan=None, saved=None, following=None)

    def fail(error: HearthError, *first: Action) -> tuple[Lifecycle, Actions]:
        last: Action = "finish" if error.contradiction else "wait_to_retry"
        return to("failed", *first, "take_down", last, plan=None, saved=None, finished=error.contradiction)

    def end(*first: Action) -> tuple[Lifecycle, Actions]:
        return to("idle", *first, "take_down", "finish", plan=None, saved=None, following=None, finished=True)

    match state.phase, event:
        case "idle", GoalSet(plan):
            return to("settling", "await_devices", saved=plan) if plan is not None else settle()
        case "settling", PlanRestored(last_epoch) if state.saved is not None:
            return deploy(state.saved, last_epoch)
        case "settling", PlanSetAside() if state.saved is not None:
            return settle()
        case "settling", DevicesSettled(devices) if state.saved is None:
            return to("profiling", "profile", devices=devices)
        case "profiling", DevicesProfiled(cluster):
            return to("planning", "make_plan", cluster=cluster)
        case "planning", PlanMade(plan, last_epoch):
            return deploy(plan, last_epoch)
        case "pushing", ChunksPushed():
            return to("loading", "load")
        case "loading", WorkersLoaded():
            return to("warming", "warm_up")
        case "warming", WarmedUp():
            return to("serving", "serve", has_served=True)

        case "serving", BetterPlanMade(plan, _, last_epoch):
            last_epoch = max(state.last_epoch, last_epoch)
            return to("draining", "stop_admitting", "drain", following=plan, last_epoch=last_epoch)
        case "draining", Drained() | DrainTimedOut():
            return deploy(state.following, 0, "take_down") if state.following is not None else end()

        case "pushing" | "loading" | "warming", DeploymentLost(_, error):
            return fail(error, "record_loss")
        case "serving", DeploymentLost():
            return settle("stop_admitting", "record_loss", "take_down")
        case "draining", DeploymentLost() if state.following is not None:
            return settle("record_loss", "take_down")
        case "draining", DeploymentLost():
            return end("record_loss")
        case phase, WorkFailed(error) if phase in _BRING_UP:
            return fail(error)
        case "failed", RetryDue():
            return settle()

        case "serving", StopRequested():
            return to("draining", "refuse_requests", "drain")
        case "draining", StopRequested() if state.following is not None:
            return to("draining", "refuse_requests", "drain", following=None)
        case _, StopRequested():
            return end("refuse_requests")
    return None


def _remembered(history: tuple[Move, ...], move: Move) -> tuple[Move, ...]:
    """The history with the newest move, bounded. A failure that repeats the last one only increases its count."""
    if isinstance(move.cause, WorkFailed):
        kept = list(history)
        while kept and kept[-1].phase in _BRING_UP:
            kept.pop()
        if kept and isinstance(cause := kept[-1].cause, WorkFailed) and str(cause.error) == str(move.cause.error):
            return (*kept[:-1], replace(move, times=kept[-1].times + 1))
    return (*history, move)[-HISTORY_LENGTH:]
