"""Who this agent works for: one coordinator at a time, for as long as it keeps renewing. Pure; `now` is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from hearth.errors import AgentBusy, LeaseLost


@dataclass(frozen=True)
class Lease:
    holder: str  # random, one per coordinator process
    holder_name: str
    seconds: float
    expires: float

    def renewed(self, now: float) -> Lease:
        return Lease(self.holder, self.holder_name, self.seconds, now + self.seconds)


def acquire(current: Lease | None, device: str, holder: str, holder_name: str, seconds: float, now: float) -> Lease:
    """A new lease, unless another coordinator holds one that has not expired: then AgentBusy."""
    if current is not None and current.holder != holder and now < current.expires:
        raise AgentBusy(device=device, holder=current.holder_name)
    return Lease(holder, holder_name, seconds, now + seconds)


def require(current: Lease | None, device: str, holder: str, now: float) -> Lease:
    """The lease, if `holder` has it. Raises LeaseLost when it has expired or is another's."""
    if current is None or current.holder != holder or now >= current.expires:
        raise LeaseLost(device=device)
    return current
