"""Finds out which links share a medium, such as an access point's air: measured together, they are slower than alone.

Only devices whose round trips are too long for a wire are asked. Two of them share a medium if their transfers at the same
time reach at most `_SHARED_SUM` of what both reach alone: on one medium the fractions add up to 1, on two to 2. A single device
has a medium of its own if its two directions slow each other down.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from hearth.plan.profile import Link, SharedMedium
from hearth.protocol import WIRE_ROUND_TRIP_SECONDS

Pair: TypeAlias = tuple[str, str]  # source and target
MeasureTogether: TypeAlias = Callable[[Sequence[Pair]], Awaitable[Mapping[Pair, float]]]

# Sum of the fractions of their own rates that two transfers reach together, up to which they share a medium.
_SHARED_SUM = 1.5
# Between these, transfers are measured again: a pause of a device takes more from such a sum than a medium's noise adds.
_DOUBTFUL_SUMS = (1.3, 1.6)
_MOST_OF_ALONE = 1.1  # times its rate alone that a transfer reaches during another, by noise


def devices_on_radio(device_ids: Collection[str], links: Mapping[Pair, Link]) -> list[str]:
    """The devices all of whose measured links have round trips that are too long for a wire."""
    found = []
    for device in device_ids:
        trips = [
            links[pair].round_trip_seconds
            for other in device_ids
            if other != device
            for pair in ((device, other), (other, device))
            if pair in links
        ]
        if trips and min(trips) > WIRE_ROUND_TRIP_SECONDS:
            found.append(device)
    return found


async def find_media(
    device_ids: Sequence[str], radio: Sequence[str], rates: Mapping[Pair, float], measure: MeasureTogether
) -> tuple[SharedMedium, ...]:
    """The media of the devices on `radio`, out of `device_ids`.

    `rates` in bytes/s, each measured alone; `measure` returns the rates of transfers at the same time, without those that
    failed. A device is compared with one of each medium found so far, so there are at most as many comparisons as devices
    times media; a doubtful one takes seven measurements. Without a wired device, two access points with a wire between them
    can be taken for one.
    """
    wired = [each for each in device_ids if each not in radio]
    groups: list[list[str]] = []
    for device in radio:
        for group in groups:
            pairs = _disjoint_pairs(device, group[0], wired, device_ids)
            if await _share(pairs, rates, measure):
                group.append(device)
                break
        else:
            groups.append([device])
    media = []
    for group in groups:
        if len(group) == 1:
            other = next((each for each in (*wired, *device_ids) if each != group[0]), None)
            if other is None or not await _share([(group[0], other), (other, group[0])], rates, measure):
                continue
        media.append(SharedMedium(device_ids=tuple(sorted(group))))
    return tuple(media)


def _disjoint_pairs(one: str, other: str, wired: Sequence[str], device_ids: Sequence[str]) -> list[Pair]:
    """A transfer of each of two devices that share no side of a link: to and from wired devices, where there are some."""
    partners = [each for each in dict.fromkeys((*wired, *device_ids)) if each not in (one, other)]
    if not partners:
        return [(one, other), (other, one)]
    return [(one, partners[0]), (partners[:2][-1], other)]


async def _share(pairs: Sequence[Pair], rates: Mapping[Pair, float], measure: MeasureTogether) -> bool:
    """Whether these transfers slow each other down as much as on one medium; False if one could not be measured.

    If the result is close to the limit, or a transfer is faster during the other than alone, all are measured twice more, and
    the median of those at the same time counts. A busy device or a stall only slows transfers, so the fastest measurement of
    each counts as its rate alone; those in `rates` do not count then, as they are from another time.
    """
    if any(pair not in rates for pair in pairs):
        return False
    alone = {pair: rates[pair] for pair in pairs}
    together = [await measure(pairs)]
    if any(pair not in together[0] for pair in pairs):
        return False
    too_slow_alone = any(together[0][pair] > _MOST_OF_ALONE * alone[pair] for pair in pairs)
    if too_slow_alone or _DOUBTFUL_SUMS[0] < _sum_of_fractions(together[0], alone) < _DOUBTFUL_SUMS[1]:
        alone = dict.fromkeys(pairs, 0.0)
        for _ in range(2):
            for pair in pairs:
                alone[pair] = max(alone[pair], (await measure([pair])).get(pair, 0.0))
            together.append(await measure(pairs))
    fastest = {pair: max(alone[pair], *(each.get(pair, 0.0) for each in together)) for pair in pairs}
    return statistics.median(_sum_of_fractions(each, fastest) for each in together) <= _SHARED_SUM


def _sum_of_fractions(together: Mapping[Pair, float], alone: Mapping[Pair, float]) -> float:
    """The sum of the fractions of their rates `alone` that transfers reach together; infinite if one could not be measured."""
    return sum(together.get(pair, math.inf) / rate for pair, rate in alone.items())
