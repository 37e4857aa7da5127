"""Leases: one coordinator controls the workers of an agent, as long as it renews its lease. Pure.

Without a lease, workers compute nothing. They wait for a coordinator that takes them over, then they are stopped.

Times are seconds of a monotonic clock; `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hearth.errors import AgentBusy, LeaseLost
from hearth.protocol import ADOPTION_SECONDS


@dataclass(frozen=True)
class Lease:
    """One coordinator's lease on the agent."""

    holder: str  # random, one per coordinator
    holder_name: str
    seconds: float  # its duration after each renewal
    expires: float  # monotonic clock

    def renewed(self, now: float) -> Lease:
        return Lease(self.holder, self.holder_name, self.seconds, now + self.seconds)

    def released(self, now: float) -> Lease:
        """The lease, ended now: it is nobody's, and another coordinator may take the workers over."""
        return Lease("", self.holder_name, self.seconds, min(self.expires, now))

    def is_live(self, now: float) -> bool:
        return now < self.expires

    def is_abandoned(self, now: float) -> bool:
        """Whether no coordinator has taken the workers over in time."""
        return now >= self.expires + ADOPTION_SECONDS


def acquire_lease(
    current: Lease | None,
    device: str,
    holder: str,
    holder_name: str,
    seconds: float,
    now: float,
    has_ended: bool = False,
) -> Lease:
    """Return a new lease. Raises AgentBusy if another coordinator holds a lease that has not expired, unless it `has_ended`."""
    if current is not None and current.holder != holder and current.is_live(now) and not has_ended:
        raise AgentBusy(device=device, holder=current.holder_name)
    return Lease(holder, holder_name, seconds, now + seconds)


def keeps_worker(
    previous: Lease | None, holder: str, adopt: Mapping[str, int] | None, deployment: str, epoch: int
) -> bool:
    """Whether a deployment's worker of `epoch` stays as it is under a new lease of `holder`.

    It takes over the epochs `adopt`, by deployment; None: all workers of its own.
    """
    if adopt is None:
        return previous is not None and previous.holder == holder
    return adopt.get(deployment) == epoch


def require_lease(current: Lease | None, device: str, holder: str, now: float) -> Lease:
    """Return the lease if `holder` has it. Raises LeaseLost if it has expired or belongs to another holder."""
    if current is None or current.holder != holder or not current.is_live(now):
        raise LeaseLost(device=device)
    return current
