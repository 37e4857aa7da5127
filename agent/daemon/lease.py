"""Leases: each deployment's worker is controlled by one coordinator, as long as it renews its lease. Pure.

Times are seconds of a monotonic clock; `now` is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from hearth.errors import AgentBusy, LeaseLost


@dataclass(frozen=True)
class Lease:
    """One coordinator's lease on one deployment."""

    holder: str  # random, one per coordinator process
    holder_name: str
    seconds: float  # its duration after each renewal
    expires: float  # monotonic clock

    def renewed(self, now: float) -> Lease:
        return Lease(self.holder, self.holder_name, self.seconds, now + self.seconds)


def acquire_lease(
    current: Lease | None, device: str, holder: str, holder_name: str, seconds: float, now: float
) -> Lease:
    """Return a new lease. Raises AgentBusy if another coordinator holds a lease that has not expired."""
    if current is not None and current.holder != holder and now < current.expires:
        raise AgentBusy(device=device, holder=current.holder_name)
    return Lease(holder, holder_name, seconds, now + seconds)


def require_lease(current: Lease | None, device: str, holder: str, now: float) -> Lease:
    """Return the lease if `holder` has it. Raises LeaseLost if it has expired or belongs to another holder."""
    if current is None or current.holder != holder or now >= current.expires:
        raise LeaseLost(device=device)
    return current
