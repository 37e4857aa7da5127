"""Smooths profiles: devices of one kind share a common profile, so a point disturbed by background load is outvoted.

A planner takes every difference between devices as real. Four equal devices, each measured with an error of 10 to 20 %,
would get unequal shares, and all would wait for the one that seemed fastest. Pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from hearth.plan.profile import BlockProfile, LatencyCurve

_CURVES = ("qkv", "core", "out", "up", "down", "mlp_rows", "connective", "embedding")
_TELLING = _CURVES[:6]  # used for comparison; the other curves are so short that noise is half of them
_SAME_KIND = math.log(1.3)  # largest factor by which a curve may differ from the common shape
_SAME_SPEED = math.log(1.15)  # largest factor between devices that count as equally fast

_Points = dict[str, list[float]]  # by curve: logarithms of seconds


def pooled(blocks: Mapping[str, BlockProfile]) -> dict[str, BlockProfile]:
    """Profiles by device id, with a common curve shape for devices that differ only by a speed factor.

    Devices whose factors are close get the same factor. A device of another kind keeps its own profile.
    """
    kinds: dict[object, list[str]] = defaultdict(list)
    for name, profile in blocks.items():
        sizes = tuple(_curve(profile, curve).sizes for curve in _CURVES)
        if all(second > 0 for curve in _CURVES for second in _curve(profile, curve).seconds):
            kinds[profile.seq_len, sizes].append(name)
    result = dict(blocks)
    for names in kinds.values():
        points = {name: _points(blocks[name]) for name in names}
        shape = _shape(points)
        points = {name: own for name, own in points.items() if _misfit(own, shape) <= _SAME_KIND}
        if len(points) > 1:
            shape = _shape(points)
            for name, factor in _speeds({name: _offset(own, shape) for name, own in points.items()}).items():
                result[name] = _with_curves(blocks[name], shape, factor)
    return result


def _curve(profile: BlockProfile, name: str) -> LatencyCurve:
    curve = getattr(profile, name)
    assert isinstance(curve, LatencyCurve)
    return curve


def _points(profile: BlockProfile) -> _Points:
    return {name: [math.log(second) for second in _curve(profile, name).seconds] for name in _CURVES}


def _offset(own: _Points, shape: _Points) -> float:
    """Logarithm of the factor by which a device is slower than `shape`."""
    return median(a - b for name in _TELLING for a, b in zip(own[name], shape[name], strict=True))


def _misfit(own: _Points, shape: _Points) -> float:
    """Deviation of the worst-fitting curve from the shape: the median over its points, as a logarithm."""
    offset = _offset(own, shape)
    return max(abs(median(a - b for a, b in zip(own[name], shape[name], strict=True)) - offset) for name in _TELLING)


def _shape(points: Mapping[str, _Points]) -> _Points:
    """Point-wise median over all devices, after scaling each to the speed of the first."""
    first = next(iter(points.values()))
    offsets = {name: _offset(own, first) for name, own in points.items()}
    return {
        curve: [median(own[curve][index] - offsets[name] for name, own in points.items()) for index in range(len(at))]
        for curve, at in first.items()
    }


def _speeds(offsets: Mapping[str, float]) -> dict[str, float]:
    """Speed factors by device; devices within `_SAME_SPEED` of each other get their geometric mean."""
    groups: list[list[str]] = []
    for name in sorted(offsets, key=lambda name: offsets[name]):
        if groups and offsets[name] - offsets[groups[-1][0]] <= _SAME_SPEED:
            groups[-1].append(name)
        else:
            groups.append([name])
    return {name: math.exp(fmean(offsets[each] for each in group)) for group in groups for name in group}


def _with_curves(profile: BlockProfile, shape: _Points, factor: float) -> BlockProfile:
    def curve(name: str, logarithms: Sequence[float]) -> LatencyCurve:
        seconds = tuple(factor * math.exp(value) for value in logarithms)
        return _curve(profile, name).model_copy(update={"seconds": seconds})

    return profile.model_copy(update={name: curve(name, logarithms) for name, logarithms in shape.items()})
