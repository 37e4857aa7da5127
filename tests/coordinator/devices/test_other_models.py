"""Links with the traffic of other deployments, and as they would be without it."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.devices.other_models import link_alone, links_left
from coordinator.devices.shared_media import Pair
from hearth.plan.profile import Link, SharedMedium

RATE = 12.5e6  # bytes/s


def links_of(names: str, rate: float = RATE) -> dict[Pair, Link]:
    return {
        (a, b): Link(source=a, target=b, bytes_per_second=rate, round_trip_seconds=1e-3)
        for a, b in permutations(names, 2)
    }


def shares(traffic: dict[Pair, float], names: str = "abcd", media: tuple[SharedMedium, ...] = ()) -> dict[str, float]:
    """The fraction of its rate that each link has left, of those that have lost any."""
    left = links_left(traffic, links_of(names), media)
    fractions = {source + target: link.bytes_per_second / RATE for (source, target), link in left.items()}
    return {pair: pytest.approx(fraction) for pair, fraction in fractions.items() if fraction != 1.0}


def test_link_has_its_rate_less_the_traffic_and_so_has_what_shares_a_side_with_it() -> None:
    traffic = {("a", "b"): 0.4 * RATE}
    assert shares(traffic) == {"ab": 0.6, "ac": 0.6, "ad": 0.6, "cb": 0.6, "db": 0.6}
    # `a` sends for 0.6 of the time, `b` receives for 0.4; what `c` sends to `d` meets neither.
    assert shares({**traffic, ("a", "c"): 0.2 * RATE}) == {
        "ab": 0.4, "ac": 0.4, "ad": 0.4, "cb": 0.6, "db": 0.6, "bc": 0.8, "dc": 0.8,
    }  # fmt: skip


def test_traffic_of_a_slow_link_takes_the_time_of_its_own_rate() -> None:
    links = links_of("abc")
    links["a", "b"] = links["a", "b"].model_copy(update={"bytes_per_second": RATE / 10})
    left = links_left({("a", "b"): 0.05 * RATE}, links, ())
    assert left["a", "b"].bytes_per_second == pytest.approx(0.05 * RATE)
    assert left["a", "c"].bytes_per_second == pytest.approx(0.5 * RATE)


def test_traffic_on_a_shared_medium_slows_all_its_links_down() -> None:
    radio = (SharedMedium(device_ids=("c", "d")),)
    assert shares({("a", "c"): 0.3 * RATE, ("d", "b"): 0.3 * RATE}, media=radio) == {
        "ab": 0.7, "ac": 0.4, "ad": 0.4, "bc": 0.4, "bd": 0.4, "ca": 0.4, "cb": 0.4, "cd": 0.4, "da": 0.4, "db": 0.4,
        "dc": 0.4,
    }  # fmt: skip


def test_a_tenth_is_left_of_a_full_link() -> None:
    assert shares({("a", "b"): 5 * RATE}, "ab") == {"ab": 0.1}


def test_traffic_with_unknown_devices_counts_for_nothing() -> None:
    links = links_of("ab")
    assert links_left({("a", "x"): RATE, ("x", "y"): RATE}, links, ()) == links


names = st.sampled_from("abcdx")  # `x` has no links
pairs = st.tuples(names, names).filter(lambda pair: pair[0] != pair[1])
rates = st.floats(1.0, 1e12)


@given(
    st.fixed_dictionaries(dict.fromkeys(permutations("abcd", 2), rates)),
    st.dictionaries(pairs, st.floats(0.0, 1e15)),
    st.lists(st.sets(st.sampled_from("abcd"), min_size=1).map(sorted), max_size=2),
)
def test_links_with_any_traffic_have_a_rate_between_a_tenth_and_all_of_their_own(
    own: dict[Pair, float], traffic: dict[Pair, float], media: list[list[str]]
) -> None:
    links = {
        pair: Link(source=pair[0], target=pair[1], bytes_per_second=rate, round_trip_seconds=0.0)
        for pair, rate in own.items()
    }
    left = links_left(traffic, links, [SharedMedium(device_ids=tuple(each)) for each in media])
    assert list(left) == list(links)
    for pair, link in left.items():
        assert math.isfinite(link.bytes_per_second)
        assert 0.0999 * own[pair] <= link.bytes_per_second <= own[pair]
        # It never has more than its own traffic leaves.
        assert link.bytes_per_second <= max(own[pair] - traffic.get(pair, 0.0), 0.1 * own[pair]) * (1 + 1e-9)


@given(rates, st.floats(0.0, 0.9))
def test_link_measured_during_traffic_has_the_measured_rate_while_that_goes_on(rate: float, load: float) -> None:
    """So the traffic does not count twice: once in the measurement, and once more when a plan is made."""
    traffic = {("a", "b"): load * rate}
    measured = Link(source="a", target="b", bytes_per_second=max(1.0 - load, 0.5) * rate, round_trip_seconds=0.0)
    alone = link_alone(measured, traffic)
    assert measured.bytes_per_second <= alone.bytes_per_second <= 2 * measured.bytes_per_second
    if load <= 0.5:
        assert alone.bytes_per_second == pytest.approx(rate)
        assert links_left(traffic, {("a", "b"): alone}, ())["a", "b"].bytes_per_second == pytest.approx(
            measured.bytes_per_second
        )


def test_link_measured_during_traffic_of_its_ends_is_faster_alone() -> None:
    measured = links_of("ab")["a", "b"]

    def alone(traffic: dict[Pair, float]) -> float:
        return link_alone(measured, traffic).bytes_per_second / RATE

    assert alone({("a", "c"): 0.2 * RATE, ("a", "d"): 0.3 * RATE, ("c", "b"): 0.4 * RATE}) == pytest.approx(1.5)
    assert alone({("b", "a"): 0.4 * RATE, ("c", "d"): 0.4 * RATE}) == 1.0
    assert alone({("a", "b"): 40 * RATE}) == 2.0
