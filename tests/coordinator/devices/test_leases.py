"""Until when a coordinator counts on its leases."""

from __future__ import annotations

import pytest

from coordinator.devices.leases import Leases
from hearth.protocol import CLOSED_LEASE_COUNTED_SECONDS, LEASE_MARGIN_SECONDS


def held_until(leases: Leases) -> float:
    """The first tenth of a second from which the lease does not count."""
    return next(tenth / 10 for tenth in range(1000) if not leases.held(tenth / 10))


def granted(seconds: float = 5.0, closed_at: float | None = None) -> Leases:
    leases = Leases()
    leases.granted("a", seconds, sent=1.0, closed_at=closed_at)
    return leases


def test_lease_counts_from_its_request_and_a_margin_less_than_it_lasts() -> None:
    leases = granted()
    assert held_until(leases) == pytest.approx(6.0 - LEASE_MARGIN_SECONDS, abs=0.1)
    leases.renewed("a", sent=2.0, closed_at=None)
    assert held_until(leases) == pytest.approx(7.0 - LEASE_MARGIN_SECONDS, abs=0.1)


def test_lease_of_a_closed_connection_counts_for_a_short_time() -> None:
    expected = pytest.approx(1.5 + CLOSED_LEASE_COUNTED_SECONDS, abs=0.1)
    assert held_until(granted(closed_at=1.5)) == expected
    leases = granted()
    leases.closed(["a", "unknown"], 1.5)
    assert held_until(leases) == expected


def test_until_a_change_is_answered_the_shorter_duration_counts() -> None:
    leases = granted(5.0)
    assert leases.should_change("a", 2.0)
    assert not leases.should_change("a", 4.8)
    leases.changing("a", 2.0, sent=1.5)
    assert held_until(leases) == pytest.approx(3.5 - LEASE_MARGIN_SECONDS, abs=0.1)
    leases.changing("a", 5.0, sent=1.5)
    assert held_until(leases) == pytest.approx(3.5 - LEASE_MARGIN_SECONDS, abs=0.1)


def test_lost_lease_does_not_count() -> None:
    leases = granted()
    leases.lost("a")
    assert leases.held(1.0) == set()
