"""The lease of a device."""

from __future__ import annotations

import pytest

pytest.importorskip("psutil")


from agent.daemon.lease import acquire_lease, require_lease
from hearth.errors import (
    AgentBusy,
    LeaseLost,
)


def test_lease_is_held_by_one_coordinator_at_a_time() -> None:
    lease = acquire_lease(None, "d", "one", "One", 5.0, now=100.0)
    with pytest.raises(AgentBusy, match="One"):
        acquire_lease(lease, "d", "two", "Two", 5.0, now=104.9)
    assert acquire_lease(lease, "d", "one", "One", 5.0, now=104.9).expires == 109.9
    assert acquire_lease(lease, "d", "two", "Two", 5.0, now=105.0).holder == "two"
    assert require_lease(lease, "d", "one", now=104.0) is lease
    assert lease.renewed(104.0).expires == 109.0
    for holder, now in (("two", 101.0), ("one", 105.0)):
        with pytest.raises(LeaseLost):
            require_lease(lease, "d", holder, now)
