"""Texts and events for the life cycle of a deployment, shown by `hearth status`, `hearth events` and in the log."""

from __future__ import annotations

from coordinator.serve.model import lifecycle as cycle
from hearth.plan.graph import GraphSegments
from hearth.plan.plan import Plan
from hearth.wire import messages as wire
from hearth.wire.messages import PhaseEntered

STARTED = "start"
BETTER_PLAN = "better_plan"
UNLOADED = "unloaded"
ROOM_CLAIMED = "room_claimed"
WITHOUT_LOSS = frozenset({STARTED, BETTER_PLAN, UNLOADED, ROOM_CLAIMED})  # reasons of new plans that follow no loss
_MAX_TEXT = 1 << 15  # characters of a cause: an error may hold a long text
_CAUSES: dict[type[cycle.Event], str] = {
    cycle.WentIdle: "no request came for as long as it stays loaded without one",
    cycle.GoalSet: "asked to serve a model",
    cycle.WorkersTakenOver: "all workers of the last plan run and are taken over",
    cycle.SavedPlanAccepted: "all devices of the last plan are available",
    cycle.DevicesProfiled: "devices profiled",
    cycle.ChunksPushed: "weights are on the devices",
    cycle.WorkersLoaded: "workers are loaded and connected",
    cycle.WarmedUp: "warm-up request completed",
    cycle.RequestWaits: "a request waits for the model",
    cycle.RetryDue: "retrying",
    cycle.Drained: "all running requests have finished",
    cycle.DrainTimedOut: "drain timeout, with requests still running",
    cycle.StopRequested: "asked to stop",
}


def describe_state(state: cycle.Lifecycle) -> str:
    """What a deployment is doing, in one line."""
    plan, cause = state.plan, state.cause
    match state.phase, cause:
        case "idle", None:
            return "starting"
        case "idle", _:
            return "stopped"
        case "adopting", cycle.DeploymentLost(_, error) | cycle.ActionFailed(error):
            return f"waiting for the devices: {error.explanation()}"
        case "adopting", _:
            return "taking over the workers of the last plan"
        case "settling", cycle.DeploymentLost(_, error) | cycle.ActionFailed(error):
            return f"planning again: {error.explanation()}"
        case "settling", _ if state.saved_plan is not None:
            return "waiting for the devices of the last plan"
        case "settling", _:
            return "looking for devices"
        case "profiling", cycle.DevicesSettled(devices):
            return f"profiling {len(devices)} devices"
        case "pushing", _ if plan is not None:
            return f"pushing weights to {device_names(plan)}"
        case "loading", _ if plan is not None:
            return f"loading on {device_names(plan)}"
        case "warming", _:
            return "warming up"
        case "serving", _ if plan is not None:
            return f"serving {plan.model.name} on {device_names(plan)} ({plan_method(plan)})"
        case "draining", _ if state.next_plan is not None:
            return "changing to a better plan: running requests finish, new ones wait"
        case "draining", _:
            return "stopping: running requests finish, new ones are refused"
        case "unloaded", _:
            return "unloaded; the next request loads it"
        case "failed", cycle.RoomClaimed(claimant):
            return f"not ready, trying again: it makes room for {claimant}, which is pinned"
        case "failed", cycle.ActionFailed(error) | cycle.DeploymentLost(_, error):
            return str(error) if state.finished else f"not ready, trying again: {error}"
    return state.phase


def describe_cause(event: cycle.Event) -> str:
    """What an event reports, in one line."""
    match event:
        case cycle.TakeOverFailed(reason):
            return f"the workers of the last plan are not taken over: {reason}"
        case cycle.SavedPlanRejected(reason):
            return f"the saved plan is not used: {reason}"
        case cycle.DevicesSettled(devices):
            return f"devices: {', '.join(device.name for device in devices)}"
        case cycle.PreparedPlanFound(plan, _, is_same=True):
            return f"the same plan again: {plan_method(plan)} on {device_names(plan)}"
        case cycle.PreparedPlanFound(plan):
            return f"planned ahead: {plan_method(plan)} on {device_names(plan)}"
        case cycle.PlanMade(plan) | cycle.BetterPlanMade(plan):
            return f"planned: {plan_method(plan)} on {device_names(plan)}"
        case cycle.RoomClaimed(claimant):
            return f"{claimant}, which is pinned, needs the memory"
        case cycle.DeploymentLost(_, error) | cycle.ActionFailed(error):
            return error.explanation()
    return _CAUSES[type(event)]


def history_entries(state: cycle.Lifecycle, now: float) -> tuple[PhaseEntered, ...]:
    """The transitions of the life cycle, oldest first, for `hearth status`."""
    return tuple(
        PhaseEntered(
            phase=move.phase, cause=describe_cause(move.cause), seconds_ago=max(now - move.at, 0.0), times=move.times
        )
        for move in state.history
    )


def device_names(plan: Plan) -> str:
    """Names of the plan's devices, by rank, separated by commas."""
    return ", ".join(device.name for device in plan.devices)


def plan_method(plan: Plan) -> str:
    """The strategy of a transformer's plan; planner and objective of a graph's plan."""
    body = plan.body
    return f"{plan.planner}, for {body.objective}" if isinstance(body, GraphSegments) else body.title


# ---- events ------------------------------------------------------------------------------------------------------------


def lifecycle_events(deployment: str, before: cycle.Lifecycle, after: cycle.Lifecycle) -> list[wire.Event]:
    """The events of one step of a deployment's life cycle: the phase it has entered, and the plan by which it serves."""
    if after.history == before.history:
        return []
    latest = after.history[-1]
    cause = describe_cause(latest.cause)[:_MAX_TEXT]
    events: list[wire.Event] = [wire.PhaseChanged(deployment=deployment, phase=after.phase, cause=cause)]
    if after.phase == "serving" and before.phase != "serving" and after.plan is not None:
        events.append(_plan_changed(deployment, after.plan, _reason(after)))
    return events


def _plan_changed(deployment: str, plan: Plan, reason: str) -> wire.PlanChanged:
    return wire.PlanChanged(
        deployment=deployment,
        model=plan.model.name[-256:],
        strategy=plan_method(plan)[:256],
        planner=plan.planner[:256],
        epoch=plan.epoch,
        devices=tuple(device.name for device in plan.devices),
        predicted_seconds=max(plan.predicted.latency_seconds, 0.0),
        reason=reason,
    )


def _reason(state: cycle.Lifecycle) -> str:
    """What ended the service before this one."""
    reason = STARTED
    for move in reversed(state.history[:-1]):
        if move.phase == "serving":
            return reason
        match move.cause:
            case cycle.DeploymentLost(_, error):
                reason = error.code
            case cycle.BetterPlanMade():
                reason = BETTER_PLAN
            case cycle.WentIdle():
                reason = UNLOADED
            case cycle.RoomClaimed():
                reason = ROOM_CLAIMED
    return STARTED
