"""Texts for the life cycle of a deployment, shown by `hearth status` and in the log."""

from __future__ import annotations

from coordinator.serve import lifecycle as cycle
from hearth.plan.graph import GraphSegments
from hearth.plan.plan import Plan
from hearth.wire.messages import PhaseEntered

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
