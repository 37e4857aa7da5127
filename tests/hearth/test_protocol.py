"""The timeouts that must agree: each one is longer than the one inside it."""

from __future__ import annotations

import pytest

from hearth import protocol as p


def test_silent_device_is_dead_before_its_lease_ends() -> None:
    assert p.HEARTBEAT_SECONDS < p.HEARTBEAT_TIMEOUT_SECONDS < p.DEAD_SECONDS < p.LEASE_SECONDS


def test_coordinator_whose_connection_was_closed_gives_up_the_lease_before_the_agent_does() -> None:
    assert p.CLOSED_LEASE_COUNTED_SECONDS < p.CLOSED_LEASE_SECONDS < p.STANDBY_LEASE_SECONDS


def test_coordinator_timeout_exceeds_that_of_the_agent() -> None:
    assert p.WORKER_LOAD_SECONDS < p.LOAD_SECONDS
    assert p.WORKER_CONNECT_SECONDS < p.CONNECT_SECONDS


@pytest.mark.parametrize("timeout_seconds", [0.1, 5.0, 3600.0])
def test_worker_times_out_before_agent_and_coordinator(timeout_seconds: float) -> None:
    assert timeout_seconds < p.agent_run_seconds(timeout_seconds) < p.coordinator_run_seconds(timeout_seconds)


def test_link_port_stays_open_while_chunks_are_fetched() -> None:
    assert p.FETCH_SECONDS + p.LINK_OPEN_MARGIN_SECONDS <= p.MAX_LINK_OPEN_SECONDS
    assert p.LINK_OPEN_MARGIN_SECONDS < p.REPLY_MARGIN_SECONDS
