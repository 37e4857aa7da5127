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
_COMPARED_CURVES = _CURVES[:6]  # used to compare devices; the other curves are so short that noise is half of them
# Largest factor by which a curve may differ from the common shape: above the noise of a curve (10 to 20 %), below the
# difference between kinds of processor.
_MAX_LOG_MISFIT = math.log(1.3)
# Largest factor between devices that count as equally fast: within the error of a measurement.
_MAX_LOG_SPEED_DIFFERENCE = math.log(1.15)

_LogCurves = dict[str, list[float]]  # by curve: logarithms of seconds


def smooth_profiles(blocks: Mapping[str, BlockProfile]) -> dict[str, BlockProfile]:
    """Profiles by device id, with a common curve shape for devices that differ only by a speed factor.

    Devices whose factors are close get the same factor. A device of another kind keeps its own profile.
    """
    comparable: dict[object, list[str]] = defaultdict(list)
    for name, profile in blocks.items():
        sizes = tuple(_curve(profile, curve).sizes for curve in _CURVES)
        if all(second > 0 for curve in _CURVES for second in _curve(profile, curve).seconds):
            comparable[profile.seq_len, sizes].append(name)
    result = dict(blocks)
    for names in comparable.values():
        curves = {name: _log_curves(blocks[name]) for name in names}
        common = _common_curves(curves)
        curves = {name: own for name, own in curves.items() if _misfit(own, common) <= _MAX_LOG_MISFIT}
        if len(curves) > 1:
            common = _common_curves(curves)
            slowdowns = {name: _log_slowdown(own, common) for name, own in curves.items()}
            for name, factor in _speed_factors(slowdowns).items():
                result[name] = _with_curves(blocks[name], common, factor)
    return result


def _curve(profile: BlockProfile, name: str) -> LatencyCurve:
    curve = getattr(profile, name)
    assert isinstance(curve, LatencyCurve)
    return curve


def _log_curves(profile: BlockProfile) -> _LogCurves:
    return {name: [math.log(second) for second in _curve(profile, name).seconds] for name in _CURVES}


def _log_slowdown(own: _LogCurves, common: _LogCurves) -> float:
    """Logarithm of the factor by which a device is slower than `common`."""
    return median(a - b for name in _COMPARED_CURVES for a, b in zip(own[name], common[name], strict=True))


def _misfit(own: _LogCurves, common: _LogCurves) -> float:
    """Deviation of the worst-fitting curve from the common shape: the median over its points, as a logarithm."""
    slowdown = _log_slowdown(own, common)
    return max(
        abs(median(a - b for a, b in zip(own[name], common[name], strict=True)) - slowdown) for name in _COMPARED_CURVES
    )


def _common_curves(curves: Mapping[str, _LogCurves]) -> _LogCurves:
    """Point-wise median over all devices, after scaling each to the speed of the first."""
    first = next(iter(curves.values()))
    slowdowns = {name: _log_slowdown(own, first) for name, own in curves.items()}
    return {
        curve: [
            median(own[curve][index] - slowdowns[name] for name, own in curves.items()) for index in range(len(points))
        ]
        for curve, points in first.items()
    }


def _speed_factors(slowdowns: Mapping[str, float]) -> dict[str, float]:
    """Speed factors by device; devices within `_MAX_LOG_SPEED_DIFFERENCE` of each other get their geometric mean."""
    groups: list[list[str]] = []
    for name in sorted(slowdowns, key=lambda name: slowdowns[name]):
        if groups and slowdowns[name] - slowdowns[groups[-1][0]] <= _MAX_LOG_SPEED_DIFFERENCE:
            groups[-1].append(name)
        else:
            groups.append([name])
    return {name: math.exp(fmean(slowdowns[each] for each in group)) for group in groups for name in group}


def _with_curves(profile: BlockProfile, common: _LogCurves, factor: float) -> BlockProfile:
    def curve(name: str, logarithms: Sequence[float]) -> LatencyCurve:
        seconds = tuple(factor * math.exp(value) for value in logarithms)
        return _curve(profile, name).model_copy(update={"seconds": seconds})

    return profile.model_copy(update={name: curve(name, logarithms) for name, logarithms in common.items()})
