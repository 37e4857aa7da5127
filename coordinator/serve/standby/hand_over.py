"""The hand-over of a leader that stops: it offers its place to the standbys that follow, and leaves once one accepts."""

from __future__ import annotations

import asyncio

from coordinator.serve.standby.followers import Followers
from hearth.errors import BadRequest
from hearth.platform.asyncio_tools import with_timeout

# For a standby to accept, which takes a round trip; without an answer the leader stops as if there were none.
_ACCEPT_SECONDS = 2.0


class HandOver:
    """The leader's side. A standby that has stopped, or has no complete copy yet, does not accept."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self.accepted = asyncio.Event()
        self.is_offered = False  # whether the leader waits for a standby to accept

    async def offer(self) -> bool:
        """Offer the leader's place; returns whether a standby has accepted it."""
        if not self._followers:
            return False
        self.is_offered = True
        self._followers.wake()
        try:
            await with_timeout(_ACCEPT_SECONDS, self.accepted.wait())
        except asyncio.TimeoutError:
            self.is_offered = False
            return False
        return True

    def accept(self) -> None:
        """A standby takes over. Raises BadRequest if that was not offered."""
        if not self.is_offered:
            raise BadRequest(reason="this coordinator goes on leading")
        self.accepted.set()
