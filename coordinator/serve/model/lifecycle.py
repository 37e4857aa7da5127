"""Life cycle of one deployment as a pure state machine: `step(state, event, now)` returns the next state and actions.

Events report what happened; `controller` executes the actions. The phases of a start without failures: idle, settling
(waiting for devices), profiling, planning, pushing weights, loading, warming up, serving. After a restart: idle, adopting
(taking over the running workers), warming up, serving; the same after leases were lost and no other coordinator has taken them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from hearth.errors import ChunkMissing, HearthError, LeaseLost, PartLost
from hearth.plan.plan import Plan
from hearth.wire.messages import DeploymentPhase

RETRY_SECONDS = 2.0  # pause after a failure: does not flood the log, and is short compared with planning and loading
# Pause after the first failure since the last service if a device caused it: the next plan is made without that device.
# Doubled at each further failure, up to `RETRY_SECONDS`.
_FIRST_RETRY_SECONDS = 0.1
HISTORY_LENGTH = 50  # transitions kept: enough for several recoveries of about eight transitions each
# Phases in which a plan is made or found: until it is known, a deployment does not know what memory it needs.
UNPLANNED = ("adopting", "settling", "profiling", "planning")
_BRING_UP = (*UNPLANNED, "pushing", "loading", "warming")


# ---- events: what happened ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OfDeployment:
    """What happened to the workers of the deployment `epoch`."""

    epoch: int


@dataclass(frozen=True)
class GoalSet:
    """Serve a model. `plan`, for instance saved before a power cut, is tried first.

    `running` is the plan that was deployed last: its workers are taken over, if they run. `unloaded`: the model was unloaded
    before a restart, and waits for a request.
    """

    plan: Plan | None = None
    running: Plan | None = None
    unloaded: bool = False


class WorkersTakenOver(_OfDeployment):
    """All workers of the deployment `epoch` run and are controlled by this coordinator."""


@dataclass(frozen=True)
class TakeOverFailed:
    """Not all workers of the last deployment run. `any_runs`: some do, so requests were served until a moment ago."""

    reason: str
    any_runs: bool = False


@dataclass(frozen=True)
class SavedPlanAccepted:
    """All devices of the saved plan are available. `last_epoch` is the newest epoch that any agent has seen."""

    last_epoch: int


@dataclass(frozen=True)
class SavedPlanRejected:
    """The saved plan cannot be used: a device is missing, or it violates a limit of the user."""

    reason: str


@dataclass(frozen=True)
class DevicesSettled:
    """Devices that a plan may use are available; `devices` are `coordinator.devices.registry.Device`."""

    devices: tuple[Any, ...]


@dataclass(frozen=True)
class PreparedPlanFound:
    """A plan is there for the devices that are left. `last_epoch` is the newest that any agent has seen.

    `is_same`: it is the plan that was lost, whose devices are all there; otherwise it was made ahead.
    """

    plan: Plan
    last_epoch: int
    is_same: bool = False


@dataclass(frozen=True)
class DevicesProfiled:
    """The devices are measured. `cluster` is the planner's input for this kind of model; failed devices are left out."""

    cluster: Any


@dataclass(frozen=True)
class PlanMade:
    """A plan was made. `last_epoch` is the newest epoch that any agent has seen."""

    plan: Plan
    last_epoch: int


class ChunksPushed(_OfDeployment):
    """Every device has the weight chunks of its rank."""


class WorkersLoaded(_OfDeployment):
    """All workers have loaded their weights and are connected."""


class WarmedUp(_OfDeployment):
    """The warm-up request succeeded."""


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
class ActionFailed:
    """An action of the bring-up raised `error`."""

    error: HearthError


class WentIdle(_OfDeployment):
    """No request has come for as long as the model stays loaded without one."""


@dataclass(frozen=True)
class RequestWaits:
    """A request waits for the model, which is not loaded."""


@dataclass(frozen=True)
class RoomClaimed:
    """The pinned deployment `claimant` needs the memory of this one."""

    claimant: str


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
    GoalSet | WorkersTakenOver | TakeOverFailed
    | SavedPlanAccepted | SavedPlanRejected | DevicesSettled | PreparedPlanFound | DevicesProfiled | PlanMade | ChunksPushed
    | WorkersLoaded | WarmedUp | BetterPlanMade | DeploymentLost | ActionFailed | WentIdle | RequestWaits | RoomClaimed
    | RetryDue | Drained | DrainTimedOut | StopRequested
)  # fmt: skip


# ---- actions: what to do next ---------------------------------------------------------------------------------------

Action: TypeAlias = Literal[
    # Executed at once:
    "stop_admitting",  # requests wait for the next plan
    "refuse_requests",  # fail waiting and new requests with NotServing
    "record_loss",  # remember the device that failed, if one did, so that plans avoid it for a while
    # Executed in order, after the previous actions have ended:
    "retire_workers",  # the deployment serves no more; its workers run on, since the next plan may keep them
    "release_workers",  # stop workers of previous deployments that the new one has not kept, in the background
    "stop_workers",  # stop all workers, of the deployment and of the previous ones
    "finish",  # end `run`; in the phase `failed`, with an error that retrying cannot fix
    # Executed in the same way; each reports an event when done. Every phase except `idle` has one:
    "take_over",  # the running workers of the last deployment
    "resume",  # wait for the leases that were lost, and take over the workers, which have run on
    "await_devices",  # wait for those of the saved plan
    "settle",  # wait until no new device joins; without the wait if requests were served before. Finds a prepared plan
    "profile",  # measure the devices
    "make_plan",  # with a short search if requests were served before, since clients are waiting
    "push",  # save goal, plan and epoch to disk before any device sees the epoch; then send the weights
    "load",  # start and connect the workers
    "warm_up",  # run a first small request
    "serve",  # admit requests, and look for a better plan
    "drain",  # wait for running requests, up to the drain timeout
    "wait_to_retry",
    "await_request",  # that needs the model, which is not loaded
]
Actions: TypeAlias = tuple[Action, ...]
_WITHOUT_WORKERS: Actions = ("stop_admitting", "retire_workers", "stop_workers")


# ---- the state ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transition:
    """At `at` seconds, `cause` moved the deployment to `phase`. A repeated failure is one transition, counted in `times`."""

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
    saved_plan: Plan | None = None  # tried first, once
    next_plan: Plan | None = None  # while draining: the plan to deploy next; None: stop
    last_epoch: int = 0  # the newest of all deployments of this home
    has_served: bool = False
    # Names of devices for whose fault the bring-up began again at once, since the last service.
    lost: frozenset[str] = frozenset()
    wakes: bool = False  # whether the bring-up is for a request after the model was unloaded
    finished: bool = False  # final state
    history: tuple[Transition, ...] = ()

    @property
    def epoch(self) -> int | None:
        """Epoch of the current deployment."""
        return self.plan.epoch if self.plan is not None else None

    @property
    def takes_requests(self) -> bool:
        """Whether requests are answered: at once, or once the model is loaded for them."""
        return self.phase in ("serving", "unloaded") or self.wakes

    @property
    def failure(self) -> HearthError | None:
        """Why the latest attempt to serve has failed, until the next one has a plan."""
        for move in reversed(self.history if self.phase in ("failed", *UNPLANNED) else ()):
            if move.phase == "failed" and isinstance(move.cause, DeploymentLost | ActionFailed):
                return move.cause.error
            if move.phase in ("serving", "failed", "unloaded"):
                break
        return None

    @property
    def may_make_room(self) -> bool:
        """Whether a pinned deployment may claim the memory of this one; in other phases it has none, or ends anyway."""
        return self.phase in (*_BRING_UP, "serving") or (self.phase == "draining" and self.next_plan is not None)

    @property
    def cause(self) -> Event | None:
        """The event that led to this phase."""
        return self.history[-1].cause if self.history else None

    @property
    def error(self) -> HearthError | None:
        """The error of `cause`, if it is a failure."""
        return self.cause.error if isinstance(self.cause, DeploymentLost | ActionFailed) else None


class IllegalEvent(Exception):
    """A bug: the event cannot happen in this phase. The message contains the history."""

    def __init__(self, state: Lifecycle, event: Event) -> None:
        self.state = state
        history = "\n".join(f"  {each.at:.3f} {each.phase} x{each.times}: {each.cause}" for each in state.history)
        super().__init__(f"{event} cannot happen while {state.phase}; history:\n{history}")


def step(state: Lifecycle, event: Event, now: float) -> tuple[Lifecycle, Actions]:
    """The next state and the actions to execute. Events of earlier deployments are ignored. Raises IllegalEvent."""
    if getattr(event, "epoch", state.epoch) != state.epoch or (state.finished and isinstance(event, StopRequested)):
        return state, ()
    result = None if state.finished else _transition(state, event)
    if result is None:
        raise IllegalEvent(state, event)
    after, actions = result
    transition = Transition(now, after.phase, event)
    return replace(after, history=_append_to_history(state.history, transition)), actions


def _transition(state: Lifecycle, event: Event) -> tuple[Lifecycle, Actions] | None:
    """The transition table; None: the event is illegal in this phase."""

    def to(phase: DeploymentPhase, *actions: Action, **changes: Any) -> tuple[Lifecycle, Actions]:
        return replace(state, phase=phase, **changes), actions

    def deploy(plan: Plan, last_epoch: int, *first: Action) -> tuple[Lifecycle, Actions]:
        epoch = max(state.last_epoch, last_epoch) + 1
        return to(
            "pushing", *first, "push", plan=plan.with_epoch(epoch), saved_plan=None, next_plan=None, last_epoch=epoch
        )

    def settle(*first: Action) -> tuple[Lifecycle, Actions]:
        return to("settling", *first, "settle", plan=None, saved_plan=None, next_plan=None)

    def await_devices(plan: Plan | None) -> tuple[Lifecycle, Actions]:
        return to("settling", "await_devices", plan=None, saved_plan=plan) if plan is not None else settle()

    def fail(error: HearthError, *first: Action) -> tuple[Lifecycle, Actions]:
        last: Action = "finish" if error.contradiction else "wait_to_retry"
        finished = error.contradiction
        return to("failed", *first, "stop_workers", last, plan=None, saved_plan=None, wakes=False, finished=finished)

    def repair(error: HearthError, *first: Action) -> tuple[Lifecycle, Actions]:
        """Plan again at once after the loss of a device, or of chunks that were sent ahead; the other workers run on.

        Once per device: without a pause, a device that fails at every attempt would keep the coordinator busy.
        """
        nonlocal state
        if isinstance(error, LeaseLost):  # no device is at fault; `settle` waits for the leases
            return settle(*first)
        if not isinstance(error, PartLost | ChunkMissing) or error.device in state.lost:
            return fail(error, "record_loss")
        state = replace(state, lost=state.lost | {error.device})
        return settle("record_loss", *first)

    def end(*first: Action) -> tuple[Lifecycle, Actions]:
        return to("idle", *first, "stop_workers", "finish", plan=None, saved_plan=None, next_plan=None, finished=True)

    match state.phase, event:
        case "idle", GoalSet(plan, running, unloaded=True):
            return to("unloaded", "await_request", saved_plan=plan or running, has_served=True)
        case "idle", GoalSet(plan, running) if running is not None:
            epoch = max(state.last_epoch, running.epoch)
            return to("adopting", "take_over", plan=running, saved_plan=plan, last_epoch=epoch)
        case "idle", GoalSet(plan):
            return await_devices(plan)
        case "adopting", WorkersTakenOver():
            return to("warming", "warm_up", saved_plan=None, has_served=True)
        case "adopting", TakeOverFailed(_, any_runs=True):
            state = replace(state, has_served=True)
            return settle("retire_workers")
        case "adopting", TakeOverFailed():
            return await_devices(state.saved_plan)
        case "serving" | "warming", DeploymentLost(_, LeaseLost()):
            return to("adopting", "stop_admitting", "resume", saved_plan=None)
        case "warming", ActionFailed(LeaseLost()):
            return to("adopting", "resume", saved_plan=None)
        case "adopting", DeploymentLost():
            state = replace(state, has_served=True)
            return settle("record_loss", "retire_workers")
        case "settling", SavedPlanAccepted(last_epoch) if state.saved_plan is not None:
            return deploy(state.saved_plan, last_epoch)
        case "settling", SavedPlanRejected() if state.saved_plan is not None:
            return settle()
        case "settling", DevicesSettled(devices) if state.saved_plan is None:
            return to("profiling", "profile", devices=devices)
        case "settling", PreparedPlanFound(plan, last_epoch, _) if state.saved_plan is None and state.has_served:
            return deploy(plan, last_epoch)
        case "profiling", DevicesProfiled(cluster):
            return to("planning", "make_plan", cluster=cluster)
        case "planning", PlanMade(plan, last_epoch):
            return deploy(plan, last_epoch)
        case "pushing", ChunksPushed():
            return to("loading", "load")
        case "loading", WorkersLoaded():
            return to("warming", "warm_up")
        case "warming", WarmedUp():
            return to("serving", "release_workers", "serve", has_served=True, lost=frozenset(), wakes=False)

        case "serving", BetterPlanMade(plan, _, last_epoch):
            last_epoch = max(state.last_epoch, last_epoch)
            return to("draining", "stop_admitting", "drain", next_plan=plan, last_epoch=last_epoch)
        case "serving", WentIdle():
            return to("unloaded", *_WITHOUT_WORKERS, "await_request", plan=None, saved_plan=state.plan)
        case "unloaded", RequestWaits():
            state = replace(state, wakes=True)
            return await_devices(state.saved_plan)
        case "draining", Drained() | DrainTimedOut():
            return deploy(state.next_plan, 0, "retire_workers") if state.next_plan is not None else end()

        case "pushing", DeploymentLost(_, error) | ActionFailed(error):
            return repair(error)  # this plan has no workers yet
        case "loading" | "warming", DeploymentLost(_, error) | ActionFailed(error):
            return repair(error, "retire_workers")
        case "serving", DeploymentLost():
            return settle("stop_admitting", "record_loss", "retire_workers")
        case "draining", DeploymentLost() if state.next_plan is not None:
            return settle("record_loss", "retire_workers")
        case "draining", DeploymentLost():
            return end("record_loss")
        case phase, ActionFailed(LeaseLost()) if phase in _BRING_UP:
            return settle()
        case phase, ActionFailed(error) if phase in _BRING_UP:
            return fail(error, "record_loss")
        case "failed", RetryDue():
            return settle()
        case _, RoomClaimed() if state.may_make_room:
            gone = {"plan": None, "saved_plan": None, "next_plan": None, "wakes": False}
            return to("failed", *_WITHOUT_WORKERS, "wait_to_retry", **gone)

        case "serving", StopRequested():
            return to("draining", "refuse_requests", "drain")
        case "draining", StopRequested() if state.next_plan is not None:
            return to("draining", "refuse_requests", "drain", next_plan=None)
        case _, StopRequested():
            return end("refuse_requests")
    return None


def retry_seconds(state: Lifecycle) -> float:
    """The pause before the next attempt, in seconds."""
    if state.error is None or state.error.scope not in ("worker", "peer"):
        return RETRY_SECONDS
    num_failures = 0
    for transition in reversed(state.history):
        if transition.phase == "serving":
            break
        num_failures += transition.times if transition.phase == "failed" else 0
    return min(_FIRST_RETRY_SECONDS * 2.0 ** min(num_failures - 1, 10), RETRY_SECONDS)


def _append_to_history(history: tuple[Transition, ...], transition: Transition) -> tuple[Transition, ...]:
    """The history with the newest move, bounded. A failure that repeats the last one only increases its count."""
    if isinstance(transition.cause, ActionFailed) and transition.phase == "failed":
        earlier = list(history)
        while earlier and earlier[-1].phase in _BRING_UP:
            earlier.pop()
        last = earlier[-1] if earlier else None
        if last and isinstance(last.cause, ActionFailed) and str(last.cause.error) == str(transition.cause.error):
            return (*earlier[:-1], replace(transition, times=last.times + 1))
    return (*history, transition)[-HISTORY_LENGTH:]
