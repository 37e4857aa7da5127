"""The leases that a coordinator holds: how long each one lasts, and until when it surely holds. Pure.

Of the time that was granted, the coordinator counts on less than the agent does: from when it sent its request, and only as
long as the connection cannot have been closed for a while, since a standby may get the lease then.
"""

from __future__ import annotations

from collections.abc import Iterable

from hearth.protocol import CLOSED_LEASE_COUNTED_SECONDS, LEASE_MARGIN_SECONDS

_STEP_SECONDS = 0.5  # a lease that should be longer or shorter by this much is acquired with another duration


class Leases:
    """The leases by device id. Times are the event loop's, in seconds; `sent` is when the request for a lease was sent."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # for how long each renewal lasts
        self._until: dict[str, float] = {}

    def held(self, now: float) -> set[str]:
        """The devices whose leases surely hold."""
        return {device_id for device_id, until in self._until.items() if now < until}

    def should_change(self, device_id: str, wanted_seconds: float) -> bool:
        """Whether the lease should have another duration."""
        return abs(wanted_seconds - self._seconds[device_id]) >= _STEP_SECONDS

    def granted(self, device_id: str, seconds: float, sent: float, closed_at: float | None) -> None:
        """The agent has granted a lease of this duration. `closed_at`: of its connection; None while that is open."""
        self._seconds[device_id] = seconds
        self.renewed(device_id, sent, closed_at)

    def renewed(self, device_id: str, sent: float, closed_at: float | None) -> None:
        """The agent has renewed the lease."""
        self._until[device_id] = sent + self._seconds[device_id] - LEASE_MARGIN_SECONDS
        if closed_at is not None:
            self.closed([device_id], closed_at)

    def changing(self, device_id: str, seconds: float, sent: float) -> None:
        """Another duration was asked for: until the agent answers, count on the shorter one."""
        shorter = self._seconds[device_id] = min(seconds, self._seconds[device_id])
        self._until[device_id] = min(self._until.get(device_id, sent), sent + shorter - LEASE_MARGIN_SECONDS)

    def closed(self, device_ids: Iterable[str], closed_at: float) -> None:
        """The connection to these devices was closed: a standby may have their leases soon."""
        for device_id in device_ids:
            if device_id in self._until:
                self._until[device_id] = min(self._until[device_id], closed_at + CLOSED_LEASE_COUNTED_SECONDS)

    def lost(self, device_id: str) -> None:
        """Another coordinator has the lease, or it has run out."""
        self._until.pop(device_id, None)
