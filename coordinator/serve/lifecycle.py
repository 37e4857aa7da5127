"""The life cycle of one deployment as a pure state machine: `step(state, event, now)` gives the next state and actions.

Events report what happened, actions say what to do next; `controller` executes them. While nothing goes wrong:
idle, settling (which devices are there?), profiling, planning, pushing weights, loading, warming up, serving.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

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
    """`cluster` is as the planner of this kind of model takes it; some of the devices may be left out."""

    devices: tuple[Any, ...]
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


@dataclass(frozen=True)
class AwaitDevices:
    """Wait for the devices of a saved plan."""

    plan: Plan


@dataclass(frozen=True)
class Settle:
    """Wait until the fleet is quiet. `recovering`: what is left must do, without a wait for newcomers."""

    recovering: bool


@dataclass(frozen=True)
class Profile:
    devices: tuple[Any, ...]


@dataclass(frozen=True)
class MakePlan:
    """`recovering`: clients wait, so a good plan soon is better than the best one later."""

    devices: tuple[Any, ...]
    cluster: Any
    recovering: bool


@dataclass(frozen=True)
class Save:
    """Write the goal, the plan and its epoch to disk, before any device sees that epoch."""

    plan: Plan


@dataclass(frozen=True)
class Push:
    plan: Plan


@dataclass(frozen=True)
class Load:
    pass


@dataclass(frozen=True)
class WarmUp:
    pass


@dataclass(frozen=True)
class Admit:
    """Let requests onto the deployment, and look for a better plan in the background."""


@dataclass(frozen=True)
class StopAdmitting:
    """Let no request onto the deployment. `refuse`: none will ever run, so say so; else they wait for the next plan."""

    refuse: bool


@dataclass(frozen=True)
class Drain:
    """Wait for running requests, at most until this time."""

    until: float


@dataclass(frozen=True)
class RecordLoss:
    """Remember which device was lost: plans avoid it for a while."""

    error: HearthError


@dataclass(frozen=True)
class TakeDown:
    """Stop the deployment's workers, if there are any."""


@dataclass(frozen=True)
class WaitToRetry:
    until: float


@dataclass(frozen=True)
class Finish:
    """The end: regular, or with the error that no retry can mend."""

    error: HearthError | None = None


Action: TypeAlias = (
    AwaitDevices | Settle | Profile | MakePlan | Save | Push | Load | WarmUp | Admit | StopAdmitting | Drain | RecordLoss
    | TakeDown | WaitToRetry | Finish
)  # fmt: skip
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
    """Where one deployment stands. `drain_seconds` is how long running requests may take before a planned end."""

    drain_seconds: float
    phase: Phase = "idle"
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


class IllegalMove(Exception):
    """A fault of ours: an event that cannot happen in this phase. Carries how it came to it."""

    def __init__(self, state: Lifecycle, event: Event) -> None:
        self.state = state
        self.event = event
        moves = "\n".join(f"  {move.at:.3f} {move.phase} x{move.times}: {move.cause}" for move in state.history)
        super().__init__(f"{event} cannot happen while {state.phase}; so far:\n{moves}")


def step(state: Lifecycle, event: Event, now: float) -> tuple[Lifecycle, Actions]:
    """Raises IllegalMove. An event of an earlier deployment changes nothing."""
    if getattr(event, "epoch", state.epoch) != state.epoch or (state.finished and isinstance(event, StopRequested)):
        return state, ()
    moved = None if state.finished else _move(state, event, now)
    if moved is None:
        raise IllegalMove(state, event)
    after, actions = moved
    move = Move(now, after.phase, event)
    return replace(after, history=_remembered(state.history, move)), actions


def _move(state: Lifecycle, event: Event, now: float) -> tuple[Lifecycle, Actions] | None:
    """The table."""

    def to(phase: Phase, *actions: Action, **changes: Any) -> tuple[Lifecycle, Actions]:
        return replace(state, phase=phase, **changes), actions

    def deploy(plan: Plan, last_epoch: int, *first: Action) -> tuple[Lifecycle, Actions]:
        epoch = max(state.last_epoch, last_epoch) + 1
        plan = plan.with_epoch(epoch)
        return to("pushing", *first, Save(plan), Push(plan), plan=plan, saved=None, following=None, last_epoch=epoch)

    def settle(*first: Action) -> tuple[Lifecycle, Actions]:
        return to("settling", *first, Settle(recovering=state.has_served), plan=None, saved=None, following=None)

    def fail(error: HearthError, *first: Action) -> tuple[Lifecycle, Actions]:
        last = Finish(error) if error.contradiction else WaitToRetry(now + RETRY_SECONDS)
        return to("failed", *first, TakeDown(), last, plan=None, saved=None, finished=error.contradiction)

    def end(*first: Action) -> tuple[Lifecycle, Actions]:
        return to("idle", *first, TakeDown(), Finish(), plan=None, saved=None, following=None, finished=True)

    def drain(refuse: bool, **changes: Any) -> tuple[Lifecycle, Actions]:
        return to("draining", StopAdmitting(refuse), Drain(now + state.drain_seconds), **changes)

    match state.phase, event:
        case "idle", GoalSet(plan):
            return to("settling", AwaitDevices(plan), saved=plan) if plan is not None else settle()
        case "settling", PlanRestored(last_epoch) if state.saved is not None:
            return deploy(state.saved, last_epoch)
        case "settling", PlanSetAside() if state.saved is not None:
            return settle()
        case "settling", DevicesSettled(devices) if state.saved is None:
            return to("profiling", Profile(devices))
        case "profiling", DevicesProfiled(devices, cluster):
            return to("planning", MakePlan(devices, cluster, recovering=state.has_served))
        case "planning", PlanMade(plan, last_epoch):
            return deploy(plan, last_epoch)
        case "pushing", ChunksPushed():
            return to("loading", Load())
        case "loading", WorkersLoaded():
            return to("warming", WarmUp())
        case "warming", WarmedUp():
            return to("serving", Admit(), has_served=True)

        case "serving", BetterPlanMade(plan, _, last_epoch):
            return drain(refuse=False, following=plan, last_epoch=max(state.last_epoch, last_epoch))
        case "draining", Drained() | DrainTimedOut():
            return deploy(state.following, 0, TakeDown()) if state.following is not None else end()

        case "pushing" | "loading" | "warming", DeploymentLost(_, error):
            return fail(error, RecordLoss(error))
        case "serving", DeploymentLost(_, error):
            return settle(StopAdmitting(refuse=False), RecordLoss(error), TakeDown())
        case "draining", DeploymentLost(_, error) if state.following is not None:
            return settle(RecordLoss(error), TakeDown())
        case "draining", DeploymentLost(_, error):
            return end(RecordLoss(error))
        case phase, WorkFailed(error) if phase in _BRING_UP:
            return fail(error)
        case "failed", RetryDue():
            return settle()

        case "serving", StopRequested():
            return drain(refuse=True)
        case "draining", StopRequested() if state.following is not None:
            return drain(refuse=True, following=None)
        case _, StopRequested():
            return end(StopAdmitting(refuse=True))
    return None


def _remembered(history: tuple[Move, ...], move: Move) -> tuple[Move, ...]:
    """With the newest move, bounded. A failure that follows the same failure takes its place: hours of retries are one."""
    if isinstance(move.cause, WorkFailed):
        kept = list(history)
        while kept and kept[-1].phase in _BRING_UP:
            kept.pop()
        before = kept[-1] if kept else None
        if before is not None and isinstance(before.cause, WorkFailed) and _same(before.cause.error, move.cause.error):
            return (*kept[:-1], replace(move, times=before.times + 1))
    return (*history, move)[-HISTORY_LENGTH:]


def _same(one: HearthError, other: HearthError) -> bool:
    return str(one) == str(other)
