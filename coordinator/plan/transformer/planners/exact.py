"""The best integer shares for Galaxy's objective (5), proven optimal or with a lower bound.

    minimise  max_d L(MHA, a_d, d) + max_d L(MLP, b_d, d)
    over integer KV groups a_d, column grains b_d, vocabulary grains v_d, each kind summing to the model's total,
    such that all memory of device d (coordinator.plan.transformer.cost.memory) is within its budget.

Communication, the rows of connective blocks and the ring's order are not in this objective, so no plan is claimed to be the
fastest: the simulator prices them, for these shares and for Galaxy's (`plan_shares` in `choose.py`).

For a decoder, L is the time of the expected request: its prompt, and every token of the answer (`shares.LayerTimes`).

The two maxima are thresholds from finite sets: the times of whole numbers of groups and grains. Without memory limits,
each kind is assigned separately, grain by grain, which is optimal. Where memory binds, the search follows the border of the
feasible pairs of thresholds (a larger one allows a smaller other one); each step is a small integer program for HiGHS.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from coordinator.plan.linear import LinearProgram
from coordinator.plan.solution import Solution
from coordinator.plan.transformer.request import PlanRequest, build_plan, missing_bytes
from coordinator.plan.transformer.shares import LayerTimes, ShareBudget, body_from_grains
from hearth.errors import ModelDoesNotFit
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, largest_remainder, num_grains
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import ShareStrategy

# Integer programs along the border; a count rather than a time, so that results repeat. At a few milliseconds each, a second.
_MAX_PROGRAMS = 120
_SOLVE_SECONDS = 0.2  # time limit of one integer program; a few dozen variables take milliseconds


class Shares(NamedTuple):
    """The number of grains of each kind on each device."""

    groups: tuple[int, ...]
    columns: tuple[int, ...]
    vocabulary: tuple[int, ...]


def plan_exact(request: PlanRequest, strategy: ShareStrategy) -> TransformerPlan:
    """`hmp` (or `megatron-tp`, which shards in the same way) over all devices, in their order. Raises ModelDoesNotFit."""
    best = best_shares(request, strategy)
    proof = "best for compute" if best.gap < 1e-9 else f"compute within {best.gap:.1%} of the bound"
    body = body_from_grains(request, strategy, *best.assignment)
    if missing := missing_bytes(request, body):  # a device may lack room even for an empty share
        raise ModelDoesNotFit(model=request.spec.name, missing_bytes=missing)
    return build_plan(request, body, f"exact ({proof})")


def best_shares(request: PlanRequest, strategy: ShareStrategy) -> Solution[Shares]:
    """Minimise objective (5), the seconds of one layer. After `_MAX_PROGRAMS` programs, return the best so far.

    Raises ModelDoesNotFit.
    """
    return _Problem(request, strategy).solve()


class _Problem:
    def __init__(self, request: PlanRequest, strategy: ShareStrategy) -> None:
        spec, work = request.spec, LayerTimes(request)
        blocks = [device.blocks for device in request.cluster.devices]
        num_columns = num_grains(spec.ffn_size, COLUMN_GRAIN)
        groups = [[work.attention(b, a * spec.group_size) for a in range(spec.num_kv_heads + 1)] for b in blocks]
        columns = [[work.mlp(b, min(c * COLUMN_GRAIN, spec.ffn_size)) for c in range(num_columns + 1)] for b in blocks]
        self._model = spec.name
        self._budget = budget = ShareBudget(request, strategy)
        self._bytes_per_grain = (
            budget.bytes_per_head_grain,
            budget.bytes_per_column_grain,
            budget.bytes_per_vocabulary_grain,
        )
        self._totals = (spec.num_kv_heads, num_columns, num_grains(spec.vocab_size, VOCABULARY_GRAIN))
        self._seconds = (_monotonic(groups), _monotonic(columns))
        self._thresholds = tuple(sorted({t for device in kind for t in device}) for kind in self._seconds)
        self._num_devices = len(blocks)
        # Relative time per row of the output head on each device; empty where the vocabulary takes no time.
        head = [b.decode_seconds_per_byte for b in blocks] if request.generation else []
        self._head_seconds = [seconds / max(head) for seconds in head] if any(head) else []

    def solve(self) -> Solution[Shares]:
        min_thresholds = [self._min_threshold(kind) for kind in (0, 1)]
        bound = sum(self._thresholds[kind][min_thresholds[kind]] for kind in (0, 1))
        free = Shares(self._unconstrained_shares(0), self._unconstrained_shares(1), self._unconstrained_vocabulary())
        fits = all(self._used_bytes(free, d) <= self._budget.share_bytes(d) for d in range(self._num_devices))
        shares = free if fits else self._solve_within(min_thresholds[0], min_thresholds[1])
        if shares is not None:
            return Solution(shares, bound, bound, proven=True)
        last = (len(self._thresholds[0]) - 1, len(self._thresholds[1]) - 1)
        any_shares = self._solve_within(*last)
        if any_shares is None:
            raise ModelDoesNotFit(model=self._model, missing_bytes=self._budget.missing_bytes(*self._totals))
        best, seconds = any_shares, self._objective(any_shares)
        # Follow the border: lower the first threshold from its maximum, and raise the second one as needed.
        i, j = last[0], min_thresholds[1]
        proven, programs = True, 0
        while i >= min_thresholds[0] and j <= last[1]:
            if self._thresholds[0][i] + self._thresholds[1][j] >= seconds:
                i -= 1  # no pair with this first threshold and a larger second one can be better
                continue
            if programs == _MAX_PROGRAMS:
                proven = False
                break
            programs += 1
            shares = self._solve_within(i, j)
            if shares is None:
                j += 1
                continue
            if self._objective(shares) < seconds:
                best, seconds = shares, self._objective(shares)
            i -= 1
        if proven:
            bound = seconds
        return Solution(best, max(seconds, bound), bound, seconds <= bound)

    def _unconstrained_shares(self, kind: int) -> tuple[int, ...]:
        """The optimum without memory limits: each grain goes to the device that finishes it first."""
        shares = [0] * self._num_devices
        seconds = self._seconds[kind]
        done = [(seconds[d][1], d) for d in range(self._num_devices)]
        heapify(done)
        for _ in range(self._totals[kind]):
            _, d = done[0]
            shares[d] += 1
            after = shares[d] + 1
            heapreplace(done, (seconds[d][after] if after < len(seconds[d]) else float("inf"), d))
        return tuple(shares)

    def _unconstrained_vocabulary(self) -> tuple[int, ...]:
        """Vocabulary shares without memory limits: equal parts for encoders, by the speed of the output head for decoders.

        An encoder's vocabulary takes memory but hardly any time.
        """
        weights = [1.0 / max(seconds, 1e-9) for seconds in self._head_seconds] or [1.0] * self._num_devices
        return largest_remainder(weights, self._totals[2])

    def _vocabulary_within(self, given: Shares) -> tuple[int, ...]:
        """The vocabulary of feasible shares, reassigned where it takes time.

        Each grain goes to the device that finishes it first, among those with room left by their other shares.
        """
        if not self._head_seconds:
            return given.vocabulary
        without = given._replace(vocabulary=(0,) * self._num_devices)
        free = [self._budget.share_bytes(d) - self._used_bytes(without, d) for d in range(self._num_devices)]
        room = [num_bytes // self._bytes_per_grain[2] for num_bytes in free]
        shares = [0] * self._num_devices
        for _ in range(self._totals[2]):
            free = [d for d in range(self._num_devices) if shares[d] < room[d]]
            if not free:  # feasible only within the solver's tolerance
                return given.vocabulary
            shares[min(free, key=lambda d: ((shares[d] + 1) * self._head_seconds[d], d))] += 1
        return tuple(shares)

    def _used_bytes(self, shares: Shares, d: int) -> int:
        """Bytes of a device's shares."""
        return sum(size * kind[d] for size, kind in zip(self._bytes_per_grain, shares, strict=True))

    def _objective(self, shares: Shares) -> float:
        return sum(
            max(self._seconds[kind][d][shares[kind][d]] for d in range(self._num_devices) if shares[kind][d])
            for kind in (0, 1)
        )

    def _max_grains(self, kind: int, threshold: float) -> list[int]:
        """The most grains of a kind that each device finishes within the threshold (seconds)."""
        # The tolerance is for rounding: thresholds are such times themselves.
        return [bisect_left(seconds, threshold * (1 + 1e-12) + 1e-15) - 1 for seconds in self._seconds[kind]]

    def _min_threshold(self, kind: int) -> int:
        """Index of the least threshold within which the devices finish all grains, without memory limits."""
        thresholds, total = self._thresholds[kind], self._totals[kind]
        return bisect_left(
            range(len(thresholds) - 1), True, key=lambda index: sum(self._max_grains(kind, thresholds[index])) >= total
        )

    def _solve_within(self, i: int, j: int) -> Shares | None:
        """Shares of all three kinds within both thresholds and all budgets, or None."""
        most = [self._max_grains(0, self._thresholds[0][i]), self._max_grains(1, self._thresholds[1][j])]
        if sum(most[0]) < self._totals[0] or sum(most[1]) < self._totals[1]:
            return None
        bounds = [*most, [self._totals[2]] * self._num_devices]
        program = LinearProgram(3 * self._num_devices)  # of each kind, the grains of every device
        for kind in range(3):
            program.add_equal({kind * self._num_devices + d: 1.0 for d in range(self._num_devices)}, self._totals[kind])
        unit = float(1 << 20)  # MiB: coefficients near 1 suit the solver
        for d in range(self._num_devices):
            row = {kind * self._num_devices + d: self._bytes_per_grain[kind] / unit for kind in range(3)}
            program.add_at_most(row, self._budget.share_bytes(d) / unit)
        # Among equals prefer balanced shares: more to fast devices, which have higher upper bounds.
        cost = [1.0 / max(most, 1) if kind < 2 else 0.0 for kind in range(3) for most in bounds[kind]]
        upper = np.array([most for kind in range(3) for most in bounds[kind]], np.float64)
        try:
            values = program.minimise(np.array(cost), upper, integer=True, time_limit_seconds=_SOLVE_SECONDS)
        except ValueError:
            return None
        shares = Shares(*(tuple(map(round, of_kind)) for of_kind in values.reshape(3, self._num_devices).tolist()))
        return shares._replace(vocabulary=self._vocabulary_within(shares))


def _monotonic(kind: Sequence[Sequence[float]]) -> list[list[float]]:
    """Make measured curves monotonic: they may dip, but more work never counts as less time."""
    return [list(accumulate(seconds, max)) for seconds in kind]
