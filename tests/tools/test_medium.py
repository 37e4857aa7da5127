"""A shared medium: its rate is shared, delays keep the order, and what goes wrong happens as often as it should."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.testbed.medium import PACKET_BYTES, Air, Medium, Queues

FRAME = 15_000  # bytes: ten packets, 1.2 ms at 100 Mbit/s


def air(seed: int = 0, **values: object) -> Air:
    return Air(Medium.model_validate({"name": "wifi", "mbit": 100, **values}), Random(seed), now=0.0)


@given(
    st.integers(0, 1 << 32), st.lists(st.tuples(st.integers(0, 3), st.integers(60, 16_000)), min_size=1, max_size=60)
)
def test_frames_share_the_rate_and_keep_their_order(seed: int, frames: list[tuple[int, int]]) -> None:
    medium = air(seed, delay_ms=3, jitter_ms=2, resent=0.1)
    arrivals: dict[int, list[float]] = {}
    sent = 0
    for way, num_bytes in frames:
        sent += num_bytes
        found = medium.arrival(way, num_bytes, now=1.0)
        assert found is not None
        # All before it on any way take their turn first; an idle medium may be 2 ms ahead. Then the delay.
        assert found >= 1.0 - 2e-3 + sent * 8e-8 + 1e-3 - 1e-9
        arrivals.setdefault(way, []).append(found)
    for times in arrivals.values():
        assert all(a <= b for a, b in pairwise(times))


def test_an_idle_medium_carries_a_frame_in_its_time_and_the_delay() -> None:
    found = air(delay_ms=5).arrival("one", FRAME, now=10.0)
    assert found == pytest.approx(10.0 + 1.2e-3 + 5e-3)


@pytest.mark.parametrize("of_packets", [1, 10])
def test_packets_are_lost_as_often_as_the_medium_says(of_packets: int) -> None:
    medium, count = air(lost=0.02), 20_000
    lost = sum(medium.arrival("one", of_packets * PACKET_BYTES, now=float(i)) is None for i in range(count))
    expected = 1 - 0.98**of_packets
    assert abs(lost / count - expected) < 4 * (expected * (1 - expected) / count) ** 0.5


def test_a_packet_that_is_sent_again_arrives_later_and_is_not_lost() -> None:
    medium = air(resent=0.2)
    delays = [(medium.arrival("one", PACKET_BYTES, now=float(i)) or 0) - i for i in range(5_000)]
    late = [each for each in delays if each > 4e-3]
    assert min(delays) > 0
    assert abs(len(late) / len(delays) - 0.2) < 0.02
    assert max(late) < 31e-3


def test_nothing_is_sent_during_a_stall() -> None:
    medium = air(stalls_per_minute=6, stall_seconds=(1.0, 2.0))
    arrivals = [medium.arrival("one", PACKET_BYTES, now=i / 10) or 0.0 for i in range(6_000)]  # ten minutes
    gaps = [b - a for a, b in pairwise(arrivals) if b - a > 0.5]
    assert 40 <= len(gaps) <= 80
    assert all(gap < 2.2 for gap in gaps)


def test_a_full_queue_drops_frames_and_another_direction_has_its_own() -> None:
    queues = Queues(limit_bytes=30_000)
    assert queues.enter("one", 40_000)  # alone, any frame passes
    assert not queues.enter("one", 100)
    assert queues.enter("two", 20_000)
    queues.leave("one", 40_000)
    assert queues.enter("one", 100)
