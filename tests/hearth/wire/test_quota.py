"""Limits of one key: requests and bytes in progress, and starts per second."""

from __future__ import annotations

import pytest

from hearth.errors import FrameTooLarge, QueueFull
from hearth.wire.quota import Limits, Quota

LIMITS = Limits(requests=3, total_bytes=100, request_bytes=60, per_second=10.0, burst=2.0)


def test_requests_beyond_the_burst_wait_for_their_start() -> None:
    quota, limits = Quota(), LIMITS._replace(requests=100)
    assert [quota.enter(limits, 1, 0, now=5.0) for _ in range(4)] == pytest.approx([0, 0, 0.1, 0.2])
    assert quota.enter(limits, 1, 0, now=6.0) == 0.0
    assert quota.enter(limits, 1, 0, now=6.0) == 0.0
    assert quota.enter(limits, 1, 0, now=6.0) == pytest.approx(0.1)


def test_large_messages_cost_more() -> None:
    quota = Quota()
    quota.enter(LIMITS, 1, 640 << 10, now=0.0)
    assert quota.enter(LIMITS, 1, 0, now=0.0) == pytest.approx(1.0)


def test_requests_and_bytes_in_progress_are_limited_until_they_leave() -> None:
    quota = Quota()
    with pytest.raises(FrameTooLarge):
        quota.enter(LIMITS, 61, 0, now=0.0)
    quota.enter(LIMITS, 60, 0, now=0.0)
    with pytest.raises(QueueFull):
        quota.enter(LIMITS, 41, 0, now=0.0)
    quota.enter(LIMITS, 40, 0, now=0.0)
    quota.enter(LIMITS, 0, 0, now=0.0)
    with pytest.raises(QueueFull):
        quota.enter(LIMITS, 0, 0, now=0.0)
    quota.leave(60)
    quota.enter(LIMITS, 60, 0, now=0.0)
    assert (quota.num_requests, quota.num_bytes) == (3, 100)


def test_trusted_peer_never_waits() -> None:
    quota = Quota()
    assert [quota.enter(Limits(), 1 << 20, 1 << 20, now=0.0) for _ in range(200)] == [0.0] * 200


def test_few_requests_of_a_revoked_key_are_answered() -> None:
    quota = Quota()
    assert sum(quota.answers_refusal(0.0, is_revoked=True) for _ in range(100)) == 50
    assert sum(quota.answers_refusal(1.0, is_revoked=True) for _ in range(100)) == 5


def test_flood_of_refused_requests_is_not_answered() -> None:
    quota = Quota()
    assert all(quota.answers_refusal(0.0) for _ in range(4000))
    assert not all(quota.answers_refusal(0.0) for _ in range(200))
    assert sum(quota.answers_refusal(1.0) for _ in range(4000)) == pytest.approx(200, abs=1)
    assert quota.answers_refusal(2.0)
