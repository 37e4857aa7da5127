"""The hand-over of a leader that stops: it offers its place to the standbys that follow, and leaves once one accepts."""

from __future__ import annotations

import asyncio

from hearth.errors import BadRequest
from hearth.platform.asyncio_tools import with_timeout

# For a standby to accept, which takes a round trip; without an answer the leader stops as if there were none.
_ACCEPT_SECONDS = 2.0


class HandOver:
    """The leader's side. A standby that has stopped, or has no complete copy yet, does not accept."""

    def __init__(self) -> None:
        self.num_standbys = 0  # that follow now
        self.accepted = asyncio.Event()
        self._offered = asyncio.Event()

    @property
    def is_offered(self) -> bool:
        """Whether the leader waits for a standby to accept."""
        return self._offered.is_set()

    async def offer(self) -> bool:
        """Offer the leader's place; returns whether a standby has accepted it."""
        if not self.num_standbys:
            return False
        self._offered.set()
        try:
            await with_timeout(_ACCEPT_SECONDS, self.accepted.wait())
        except asyncio.TimeoutError:
            self._offered.clear()
            return False
        return True

    def accept(self) -> None:
        """A standby takes over. Raises BadRequest if that was not offered."""
        if not self.is_offered:
            raise BadRequest(reason="this coordinator goes on leading")
        self.accepted.set()

    async def wait_offered(self, seconds: float) -> None:
        """Wait for an offer to begin, at most this long."""
        if self.is_offered:
            await asyncio.sleep(seconds)
            return
        try:
            await with_timeout(seconds, self._offered.wait())
        except asyncio.TimeoutError:
            pass
