"""A leader that stops leaves its workers only to a standby that accepts."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.serve.standby import hand_over
from coordinator.serve.standby.followers import Followers, HandOver
from hearth.errors import BadRequest


def test_leader_leaves_once_a_standby_accepts() -> None:
    async def main() -> None:
        followers = Followers()
        leader = HandOver(followers)
        assert not await leader.offer()  # there is none
        follower = followers.join("attic", confirms=True)
        with pytest.raises(BadRequest, match="goes on leading"):
            leader.accept()
        hears = asyncio.create_task(follower.wait_news(600.0))
        offer = asyncio.create_task(leader.offer())
        await asyncio.wait_for(hears, 60)
        assert leader.is_offered
        leader.accept()
        assert await offer
        assert leader.accepted.is_set()

    asyncio.run(main())


def test_offer_that_no_standby_accepts_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the standby was stopped just before the leader: nobody would end the workers."""
    monkeypatch.setattr(hand_over, "_ACCEPT_SECONDS", 0.05)

    async def main() -> None:
        followers = Followers()
        leader = HandOver(followers)
        followers.join("attic", confirms=True)
        assert not await leader.offer()
        with pytest.raises(BadRequest):
            leader.accept()

    asyncio.run(main())
