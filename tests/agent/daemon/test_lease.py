"""The lease of a device."""

from __future__ import annotations

import pytest

pytest.importorskip("psutil")


from agent.daemon.lease import acquire_lease, keeps_worker, require_lease
from hearth.errors import AgentBusy, LeaseLost
from hearth.protocol import ADOPTION_SECONDS


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


@pytest.mark.parametrize(
    ("held_by", "adopt", "kept"),
    [
        ("one", None, {"chat", "camera"}),
        ("two", None, set()),
        (None, None, set()),
        *((holder, {"chat": 7, "camera": 9}, {"chat", "camera"}) for holder in ("one", "two", None)),
        *((holder, {"chat": 7}, {"chat"}) for holder in ("one", "two", None)),
        ("one", {"chat": 9, "camera": 7, "learning": 7}, set()),
        ("one", {}, set()),
    ],
)
def test_workers_stay_under_the_holder_that_loaded_them_or_one_that_names_their_epochs(
    held_by: str | None, adopt: dict[str, int] | None, kept: set[str]
) -> None:
    lease = acquire_lease(None, "d", held_by, held_by, 5.0, now=100.0) if held_by is not None else None
    workers = {"chat": 7, "camera": 9}
    assert {name for name, epoch in workers.items() if keeps_worker(lease, "one", adopt, name, epoch)} == kept


def test_released_lease_can_be_taken_at_once_and_is_abandoned_after_a_grace_time() -> None:
    lease = acquire_lease(None, "d", "one", "One", 5.0, now=100.0).released(101.0)
    assert not lease.is_live(101.0)
    assert acquire_lease(lease, "d", "two", "Two", 5.0, now=101.0).holder == "two"
    assert not lease.is_abandoned(101.0 + ADOPTION_SECONDS - 0.1)
    assert lease.is_abandoned(101.0 + ADOPTION_SECONDS)
