"""Placement problems in whole ticks, for solvers of integers. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from coordinator.plan.graph.latency.problem import FloatTable, PlacementProblem

_MAX_DIGITS = 6  # decimals of a time that are kept exactly: whole microseconds, if times are in seconds
# Ticks of the whole graph on the fastest device, where times are rounded: one tick is 1 part in 67 million.
_ROUNDED_TICKS = 1 << 26

_MAX_TOTAL_TICKS = 1 << 40  # of the whole graph on one device: sums of ticks stay exact as floats, which are up to 2^53
ROUNDING_TICKS = 1e-6  # a float this close to a whole number of ticks means that number


def in_ticks(problem: PlacementProblem) -> tuple[PlacementProblem, float]:
    """The problem in whole ticks, and the number of ticks per time unit.

    Exact where all times are decimals of a few digits; otherwise rounded down, so that a bound in ticks stays a bound.
    """
    times = {time for row in problem.seconds for time in row} | {time for row in problem.latency for time in row}
    times.update(time for flow in problem.flows for row in flow.seconds for time in row)
    totals = [sum(column) for column in zip(*problem.seconds, strict=True)]
    total = max(totals) or max(times) or 1.0
    for digits in range(_MAX_DIGITS + 1):
        per_unit = 10.0**digits
        if total * per_unit < _MAX_TOTAL_TICKS and all(
            abs(t * per_unit - round(t * per_unit)) < ROUNDING_TICKS for t in times
        ):
            break
    else:
        # Not more than fit if operators take next to nothing compared with transfers.
        per_unit = min(_ROUNDED_TICKS / (min(totals) or total), _MAX_TOTAL_TICKS / max(times))

    def ticks(rows: FloatTable) -> FloatTable:
        return tuple(tuple(float(math.floor(time * per_unit + ROUNDING_TICKS)) for time in row) for row in rows)

    known = {seconds: ticks(seconds) for seconds in {flow.seconds for flow in problem.flows}}
    flows = tuple(flow._replace(seconds=known[flow.seconds]) for flow in problem.flows)
    return replace(problem, seconds=ticks(problem.seconds), latency=ticks(problem.latency), flows=flows), per_unit
