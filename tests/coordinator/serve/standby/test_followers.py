"""A change of keys is answered once the standbys have it; a leader that stops leaves its workers only to one that accepts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from support.waiting import until

from coordinator.serve.standby import followers as module
from coordinator.serve.standby.followers import Follower, Followers, HandOver
from hearth.errors import BadRequest
from hearth.platform.asyncio_tools import cancel_all


def confirm(followers: Followers, follower: Follower) -> None:
    receipt = followers.receipt(follower, followers.num_changes)
    assert receipt
    followers.confirm(receipt)


async def test_change_waits_until_each_standby_has_confirmed_it() -> None:
    followers = Followers()
    attic, cellar = (followers.join(name, confirms=True) for name in ("attic", "cellar"))
    confirm(followers, attic)
    change = asyncio.create_task(followers.copy_change())
    await asyncio.wait_for(attic.news.wait(600.0), 60)  # it is sent at once
    confirm(followers, attic)
    await asyncio.sleep(0.01)
    assert not change.done()
    confirm(followers, cellar)
    await asyncio.wait_for(change, 60)
    assert followers.latest_is_copied
    assert not followers.receipt(attic, followers.num_changes)  # there is nothing more to confirm


async def test_receipt_of_an_earlier_copy_does_not_confirm_a_change() -> None:
    followers = Followers()
    attic = followers.join("attic", confirms=True)
    earlier = followers.receipt(attic, followers.num_changes)
    change = asyncio.create_task(followers.copy_change())
    await asyncio.sleep(0)
    followers.confirm(earlier)
    await asyncio.sleep(0.01)
    assert not change.done()
    confirm(followers, attic)
    await asyncio.wait_for(change, 60)


async def test_change_waits_for_no_standby_that_is_gone_or_too_old_to_confirm() -> None:
    followers = Followers()
    await followers.copy_change()
    old = followers.join("old", confirms=False)
    await followers.copy_change()
    assert not followers.receipt(old, followers.num_changes)
    gone = followers.join("gone", confirms=True)
    change = asyncio.create_task(followers.copy_change())
    await asyncio.sleep(0)
    followers.leave(gone)
    await asyncio.wait_for(change, 0.5)
    assert not followers.latest_is_copied


async def test_late_standby_delays_one_change_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_CONFIRM_SECONDS", 0.05)

    followers = Followers()
    attic = followers.join("attic", confirms=True)
    with caplog.at_level(logging.WARNING):
        await followers.copy_change()
    assert "the standby attic has not confirmed a change of keys" in caplog.text
    monkeypatch.setattr(module, "_CONFIRM_SECONDS", 600.0)
    await asyncio.wait_for(followers.copy_change(), 60)
    assert not followers.latest_is_copied
    confirm(followers, attic)  # it is waited for again
    change = asyncio.create_task(followers.copy_change())
    await asyncio.sleep(0.01)
    assert not change.done()
    confirm(followers, attic)
    await asyncio.wait_for(change, 60)
    assert followers.latest_is_copied


# ---- hand-over ---------------------------------------------------------------------------------------------------------


async def test_leader_leaves_once_a_standby_accepts() -> None:
    followers = Followers()
    leader = HandOver(followers)
    assert not await leader.offer()  # there is none
    follower = followers.join("attic", confirms=True)
    with pytest.raises(BadRequest, match="goes on leading"):
        leader.accept()
    hears = asyncio.create_task(follower.news.wait(600.0))
    offer = asyncio.create_task(leader.offer())
    await asyncio.wait_for(hears, 60)
    assert leader.is_offered
    leader.accept()
    assert await offer
    assert leader.accepted.is_set()


async def test_leader_whose_disk_hangs_offers_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung: list[Path] = []
    monkeypatch.setattr(module, "_DISK_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(module, "hung_paths", lambda: tuple(hung))
    followers = Followers()
    leader = HandOver(followers)
    followers.join("attic", confirms=True)
    watching = asyncio.create_task(leader.watch_disk())
    await asyncio.sleep(0.1)
    assert not leader.is_offered
    hung.append(tmp_path)
    await until("the offer", lambda: leader.is_offered, seconds=20)
    await cancel_all([watching])


async def test_offer_that_no_standby_accepts_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the standby was stopped just before the leader: nobody would end the workers."""
    monkeypatch.setattr(module, "_ACCEPT_SECONDS", 0.05)

    followers = Followers()
    leader = HandOver(followers)
    followers.join("attic", confirms=True)
    assert not await leader.offer()
    with pytest.raises(BadRequest):
        leader.accept()
