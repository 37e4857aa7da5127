"""Decides whether a request that failed runs again, and whether alone. Pure.

All requests are safe to repeat. Most failures are those of a device, so the request runs on the next plan, within its own
deadline. But a request may also cause a failure, for instance by exhausting the memory of a worker; it must not end one plan
after another, and take other requests with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hearth.errors import (
    AgentBusy,
    ConnectionLost,
    DeviceLost,
    HearthError,
    InternalError,
    LeaseLost,
    LinkLost,
    NotServing,
    Unreachable,
    WorkerDied,
)

# Failures of plans on which other requests ran as well; the next time, the request runs alone. Two, because a device that
# fails takes all of them down once.
_MAX_FAILURES_WITH_OTHERS = 2
# Failures of plans on which the request ran alone; then it is the cause. Three faults of devices in a row, each while the same
# request runs alone, are improbable.
_MAX_FAILURES_ALONE = 3
# Failures on a plan that served a probe at once: one more than a lost connection between two workers explains.
_MAX_FAILURES_ON_A_WORKING_PLAN = 2

# Errors that end the plan at once.
_LOSSES = (DeviceLost, LinkLost, LeaseLost, AgentBusy, NotServing, Unreachable)
# Errors that a request cannot cause: also that the connection to an agent broke, although the plan may still work.
_NOT_BY_A_REQUEST = (*_LOSSES, ConnectionLost)


def is_lost(error: HearthError) -> bool:
    """Whether the request's plan was lost rather than the request refused: another attempt may succeed."""
    return error.scope in ("worker", "peer") or isinstance(error, NotServing | InternalError)


def needs_probe(error: HearthError) -> bool:
    """Whether the plan may still work, so that a small request decides if it ends."""
    return is_lost(error) and not isinstance(error, (*_LOSSES, WorkerDied))


@dataclass
class Failures:
    """The failures of one request since its last progress. Progress is for instance a new token."""

    with_others: int = 0
    alone: int = 0
    on_working_plan: int = 0

    @property
    def must_run_alone(self) -> bool:
        return self.alone > 0 or self.on_working_plan > 0 or self.with_others >= _MAX_FAILURES_WITH_OTHERS

    def record(self, error: HearthError, alone: bool, plan_works: bool) -> bool:
        """Record the loss of a plan; returns whether the request may run again.

        `alone`: no other request ran on the plan. `plan_works`: a probe has succeeded after the failure.
        """
        if isinstance(error, _NOT_BY_A_REQUEST):
            return True
        if plan_works:
            self.on_working_plan += 1
        elif alone:
            self.alone += 1
        else:
            self.with_others += 1
        return self.alone < _MAX_FAILURES_ALONE and self.on_working_plan < _MAX_FAILURES_ON_A_WORKING_PLAN
