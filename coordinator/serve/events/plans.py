"""What a step of a life cycle means as events."""

from __future__ import annotations

from coordinator.serve import lifecycle as cycle
from coordinator.serve.lifecycle_text import describe_cause, plan_method
from hearth.plan.plan import Plan
from hearth.wire import messages as wire

STARTED = "start"
BETTER_PLAN = "better_plan"
UNLOADED = "unloaded"
ROOM_CLAIMED = "room_claimed"
WITHOUT_LOSS = frozenset({STARTED, BETTER_PLAN, UNLOADED, ROOM_CLAIMED})  # reasons of new plans that follow no loss
_MAX_TEXT = 1 << 15  # characters of a cause: an error may hold a long text


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
