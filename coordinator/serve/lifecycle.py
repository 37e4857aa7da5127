"""The life cycle of one deployment as a pure state machine: `step(state, event, now)` gives the next state and actions.

Events report what happened, actions say what to do next; `controller` executes them. While nothing goes wrong:
idle, settling (which devices are there?), profiling, planning, pushing weights, loading, warming up, serving.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from hearth.errors import HearthError
from hearth.plan.plan import Plan
from hearth.wire.messages import Phase

RETRY_SECONDS = 2.0  # after a failure: long enough not to flood the log, short beside what planning and loading take
HISTORY_LENGTH = 50  # moves that are kept: several recoveries, each of about eight moves
_BRING_UP = ("settling", "profiling", "planning", "pushing", "loading", "warming")


# ---- events: what happened ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GoalSet:
    """A model is to be served; by `plan` if its devices come, as after a power cut."""

    plan: Plan | None = None


@dataclass(frozen=True)
class PlanRestored:
    """All devices of the saved plan are there. `last_epoch` is the newest epoch that any agent has seen."""

    last_epoch: int


@dataclass(frozen=True)
class PlanSetAside:
    """The saved plan cannot be used: a device did not come, or a limit of the user forbids it."""

    reason: str


@dataclass(frozen=True)
class DevicesSettled:
    """The devices that a plan may use, as `coordinator.devices.registry.Device`."""

    devices: tuple[Any, ...]


@dataclass(frozen=True)
class DevicesProfiled:
    """Some of the devices may be left out of their `cluster`, which is as the planner of this kind of model takes it."""

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
    """The background found a plan that is worth a change from the deployment `epoch`."""

    plan: Plan
    epoch: int
    last_epoch: int


@dataclass(frozen=True)
class DeploymentLost:
    """The deployment `epoch` cannot go on: a device, a worker or the plan itself failed."""

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
    """No request runs any more."""


@dataclass(frozen=True)
class DrainTimedOut:
    """Requests still run, and the time that they had to finish is over."""


@dataclass(frozen=True)
class StopRequested:
    """The coordinator is told to stop. A second request does not wait for running requests."""


Event: TypeAlias = (
    GoalSet | PlanRestored | PlanSetAside | DevicesSettled | DevicesProfiled | PlanMade | ChunksPushed | WorkersLoaded
    | WarmedUp | BetterPlanMade | DeploymentLost | WorkFailed | RetryDue | Drained | DrainTimedOut | StopRequested
)  # fmt: skip


# ---- actions: what to do next ---------------------------------------------------------------------------------------

Action: TypeAlias = Literal[
    # At once:
    "stop_admitting",  # requests wait for the next plan
    "refuse_requests",  # none will ever run: say so
    "record_loss",  # remember which device was lost: plans avoid it for a while
    # In turn, once what was done before has ended:
    "take_down",  # stop the deployment's workers, if there are any
    "finish",  # the end: regular, or in the phase `failed` with the error that no retry can mend
    # In turn, and each reports an event when it is done, one for every phase but `idle`:
    "await_devices",  # of the saved plan
    "settle",  # wait until the fleet is quiet; if requests were served before, with what is left and without a wait
    "profile",  # the devices
    "make_plan",  # if requests were served before, clients wait: a good plan soon is better than the best one later
    "push",  # write the goal, the plan and its epoch to disk, before any device sees that epoch; then send the weights
    "load",
    "warm_up",
    "serve",  # let requests onto the deployment, and look for a better plan
    "drain",  # wait for running requests, but not for ever
    "wait_to_retry",
]
Actions: TypeAlias = tuple[Action, ...]


# ---- the state ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """At `at` seconds, `cause` moved the deployment to `phase`; a failure that repeats is one move, `times` over."""

    at: float
    phase: Phase
    cause: Event
    times: int = 1


@dataclass(frozen=True)
class Lifecycle:
    """Where one deployment stands."""

    phase: Phase = "idle"
    devices: tuple[Any, ...] = ()  # that the next plan may use
    cluster: Any = None  # their profile
    plan: Plan | None = None  # of the deployment that is brought up, serves or drains
    saved: Plan | None = None  # tried first, once
    following: Plan | None = None  # while draining: what is deployed next; None: nothing
    last_epoch: int = 0  # of all deployments of this home so far
    has_served: bool = False
    finished: bool = False  # nothing more happens
    history: tuple[Move, ...] = ()

    @property
    def epoch(self) -> int | None:
        """Of the present deployment."""
        return self.plan.epoch if self.plan is not None else None

    @property
    def cause(self) -> Event | None:
        """The event that led to this phase."""
        return self.history[-1].cause if self.history else None

    @property
    def error(self) -> HearthError | None:
        """Of the event that led to this phase, where it is a failure."""
        return self.cause.error if isinstance(self.cause, DeploymentLost | WorkFailed) else None


class IllegalMove(Exception):
    """A fault of ours: an event that cannot happen in this phase. Carries how it came to it."""

    def __init__(self, state: Lifecycle, event: Event) -> None:
        self.state = state
        moves = "\n".join(f"  {move.at:.3f} {move.phase} x{move.times}: {move.cause}" for move in state.history)
        super().__init__(f"{event} cannot happen while {state.phase}; so far:\n{moves}")


def step(state: Lifecycle, event: Event, now: float) -> tuple[Lifecycle, Actions]:
    """Raises IllegalMove. An event of an earlier deployment changes nothing."""
    if getattr(event, "epoch", state.epoch) != state.epoch or (state.finished and isinstance(event, StopRequested)):
        return state, ()
    moved = None if state.finished else _move(state, event)
    if moved is None:
        raise IllegalMove(state, event)
    after, actions = moved
    move = Move(now, after.phase, event)
    return replace(after, history=_remembered(state.history, move)), actions


def _move(state: Lifecycle, event: Event) -> tuple[Lifecycle, Actions] | None:
    """The table."""

    def to(phase: Phase, *actions: Action, **changes: Any) -> tuple[Lifecycle, Actions]:
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
    """With the newest move, bounded. A failure that follows the same failure takes its place: hours of retries are one."""
    if isinstance(move.cause, WorkFailed):
        kept = list(history)
        while kept and kept[-1].phase in _BRING_UP:
            kept.pop()
        if kept and isinstance(cause := kept[-1].cause, WorkFailed) and str(cause.error) == str(move.cause.error):
            return (*kept[:-1], replace(move, times=kept[-1].times + 1))
    return (*history, move)[-HISTORY_LENGTH:]
