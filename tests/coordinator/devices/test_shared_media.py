"""Media that links share are found by measuring transfers at the same time, and none is invented on wires."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.devices.profile_cache import KnownMedia
from coordinator.devices.shared_media import Pair, devices_on_radio, find_media
from hearth.plan.profile import Link, SharedMedium, media_between, media_of

MEDIUM_RATE, WIRE_RATE = 12.0, 100.0


class Air:
    """Devices with the medium of each ("" for a wire), whose transfers share media and the sides of links."""

    def __init__(self, medium_of: Mapping[str, str], noise: float = 0.0, seed: int = 0) -> None:
        self.medium_of = medium_of
        self.rounds: list[list[Pair]] = []
        self._noise, self._chance = noise, Random(seed)

    def _crossed(self, pair: Pair) -> list[tuple[str, str]]:
        """What a transfer uses, once for each time that it crosses it."""
        source, target = pair
        media = [("medium", self.medium_of[each]) for each in pair if self.medium_of[each]]
        return [("out", source), ("in", target), *media]

    def rates(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        used = [each for pair in pairs for each in self._crossed(pair)]

        def rate(pair: Pair) -> float:
            limits = ((MEDIUM_RATE if kind == "medium" else WIRE_RATE) / used.count((kind, name))
                      for kind, name in self._crossed(pair))  # fmt: skip
            return min(limits) * (1 + self._chance.uniform(-self._noise, self._noise))

        return {pair: rate(pair) for pair in pairs}

    async def measure(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        self.rounds.append(list(pairs))
        return self.rates(pairs)

    def links(self) -> dict[Pair, Link]:
        return {
            pair: Link(
                source=pair[0],
                target=pair[1],
                bytes_per_second=self.rates([pair])[pair],
                round_trip_seconds=0.0004 + 0.004 * sum(bool(self.medium_of[each]) for each in pair),
            )
            for pair in permutations(self.medium_of, 2)
        }

    def found(self) -> list[tuple[str, ...]]:
        links, ids = self.links(), list(self.medium_of)
        alone = {pair: link.bytes_per_second for pair, link in links.items()}
        media = asyncio.run(find_media(ids, devices_on_radio(ids, links), alone, self.measure))
        return sorted(medium.device_ids for medium in media)


@given(st.integers(0, 1 << 32), st.lists(st.sampled_from(["", "wifi", "attic", "plc"]), max_size=5))
def test_media_are_found_with_two_wired_devices(seed: int, media: list[str]) -> None:
    medium_of = {f"d{index}": medium for index, medium in enumerate([*media, "", ""])}
    air = Air(medium_of, noise=0.1, seed=seed)
    expected = sorted(
        tuple(device for device, medium in medium_of.items() if medium == name) for name in {*media} - {""}
    )
    assert air.found() == expected
    assert len(air.rounds) <= 7 * len(media) * (len(expected) + 1)  # if each comparison is doubtful


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_one_access_point_is_found_without_a_wired_device(count: int) -> None:
    air = Air(dict.fromkeys((f"d{index}" for index in range(count)), "wifi"))
    assert air.found() == [tuple(f"d{index}" for index in range(count))]
    assert len(air.rounds) == count - 1


def test_one_station_has_a_medium_of_its_own_and_a_distant_wire_has_none() -> None:
    assert Air({"a": "wifi", "b": "", "c": ""}).found() == [("a",)]
    air = Air({"a": "", "b": "", "c": ""})
    far = {pair: link.model_copy(update={"round_trip_seconds": 0.01}) for pair, link in air.links().items()}
    assert devices_on_radio("abc", far) == ["a", "b", "c"]
    alone = {pair: link.bytes_per_second for pair, link in far.items()}
    assert asyncio.run(find_media("abc", "abc", alone, air.measure)) == ()


@pytest.mark.parametrize(("medium", "disturbed"), [("wifi", 1 / 1.55), ("attic", 1.35), ("wifi", 1 / 8)])
def test_a_doubtful_comparison_is_measured_again(medium: str, disturbed: float) -> None:
    air = Air({"a": "wifi", "b": medium, "c": "", "d": ""})
    # While the links were measured alone, other programs slowed this device down, or something else had the air later.
    alone = {pair: link.bytes_per_second * disturbed for pair, link in air.links().items()}
    found = asyncio.run(find_media("abcd", "ab", alone, air.measure))
    assert len(found) == len({"wifi", medium})
    assert len(air.rounds) >= 1 + 2 * 3


def test_a_transfer_that_fails_shares_nothing() -> None:
    air = Air({"a": "wifi", "b": "wifi"})

    async def fail(pairs: Sequence[Pair]) -> dict[Pair, float]:
        return {pairs[0]: 1.0}

    alone = {pair: link.bytes_per_second for pair, link in air.links().items()}
    assert asyncio.run(find_media("ab", "ab", alone, fail)) == ()


def test_a_later_comparison_adds_to_what_is_known() -> None:
    known = KnownMedia(compared=frozenset("abc"), media=(SharedMedium(device_ids=("a", "b")),))
    more = known.with_more(["b", "d"], [SharedMedium(device_ids=("b", "d"))])
    assert more == KnownMedia(compared=frozenset("abcd"), media=(SharedMedium(device_ids=("a", "b", "d")),))
    other = more.with_more(["e"], [SharedMedium(device_ids=("e",))])
    assert {medium.device_ids for medium in other.media} == {("a", "b", "d"), ("e",)}


def test_media_of_a_part_of_the_devices() -> None:
    media = (SharedMedium(device_ids=("a", "b")), SharedMedium(device_ids=("c",)))
    assert media_between(media, "a", "c") == (0, 1)
    assert media_between(media, "a", "d") == (0,)
    assert media_between(media, "d", "e") == ()
    assert media_of(media, ("b", "d")) == (SharedMedium(device_ids=("b",)),)
