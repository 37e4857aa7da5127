"""A leader that stops leaves its workers only to a standby that accepts."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.serve import hand_over
from coordinator.serve.hand_over import HandOver
from hearth.errors import BadRequest


def test_leader_leaves_once_a_standby_accepts() -> None:
    async def main() -> None:
        leader = HandOver()
        assert not await leader.offer()  # there is none
        leader.num_standbys = 1
        with pytest.raises(BadRequest, match="goes on leading"):
            leader.accept()
        hears = asyncio.create_task(leader.wait_offered(600.0))
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
        leader = HandOver()
        leader.num_standbys = 1
        assert not await leader.offer()
        with pytest.raises(BadRequest):
            leader.accept()

    asyncio.run(main())
