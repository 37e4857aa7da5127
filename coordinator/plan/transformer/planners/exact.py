"""The best integer shares for Galaxy's objective (5), proven, or with a bound and the gap that is left.

    minimise  max_d L(MHA, a_d, d) + max_d L(MLP, b_d, d)
    over integer KV groups a_d, column grains b_d, vocabulary grains v_d, each kind summing to the model's whole,
    so that every byte that device d will hold (coordinator.plan.transformer.cost.memory) is within its budget.

Of a decoder L is what the expected request takes: its prompt, and every token of the answer (shares.Work).

The two maxima are thresholds out of finite sets: the times of whole numbers of groups and grains. Without memory each
kind is dealt out by itself, grain by grain, and that is the optimum. Where memory binds, the thresholds are walked along
the border of what is feasible (a larger one allows a smaller other), each step a small integer program for HiGHS.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from coordinator.plan.linear import Rows
from coordinator.plan.solution import Solution
from coordinator.plan.transformer.request import PlanRequest, missing_bytes, price
from coordinator.plan.transformer.shares import Budget, Work, body_of
from hearth.errors import ModelDoesNotFit
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, largest_remainder, num_grains
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import ShareStrategy

_MAX_PROGRAMS = 120  # along the border; a count, not a time, so that a plan repeats
_SOLVE_SECONDS = 0.2  # one integer program; a few dozen variables take milliseconds


class Shares(NamedTuple):
    """Grains of each device."""

    groups: tuple[int, ...]
    columns: tuple[int, ...]
    vocabulary: tuple[int, ...]


class ExactPlanner:
    """Plans `hmp` (and `megatron-tp`, which shards alike) over all devices of the cluster."""

    name = "exact"

    def __init__(self, strategy: ShareStrategy = "hmp") -> None:
        self._strategy = strategy

    def plan(self, request: PlanRequest) -> TransformerPlan:
        """Raises ModelDoesNotFit."""
        best = best_shares(request, self._strategy)
        proof = "proven best" if best.gap < 1e-9 else f"within {best.gap:.1%} of the bound"
        body = body_of(request, self._strategy, *best.assignment)
        if missing := missing_bytes(request, body):  # a device may lack room even for an empty share
            raise ModelDoesNotFit(model=request.spec.name, missing_bytes=missing)
        return price(request, body, f"{self.name} ({proof})")


def best_shares(request: PlanRequest, strategy: ShareStrategy) -> Solution[Shares]:
    """Minimise objective (5), seconds of one layer; stops after a count of programs with the best so far.

    Raises ModelDoesNotFit.
    """
    spec = request.spec
    num_columns = num_grains(spec.ffn_size, COLUMN_GRAIN)
    num_vocabulary = num_grains(spec.vocab_size, VOCABULARY_GRAIN)
    blocks, work = [device.blocks for device in request.cluster.devices], Work(request)
    heads = [[work.attention(b, a * spec.group_size) for a in range(spec.num_kv_heads + 1)] for b in blocks]
    columns = [[work.mlp(b, min(c * COLUMN_GRAIN, spec.ffn_size)) for c in range(num_columns + 1)] for b in blocks]
    head_seconds = [b.decode_seconds_per_byte for b in blocks] if request.generation else []
    problem = _Problem(
        Budget(request, strategy), spec.num_kv_heads, num_columns, num_vocabulary, heads, columns, head_seconds
    )
    return problem.solve(spec.name)


class _Problem:
    def __init__(
        self,
        budget: Budget,
        num_groups: int,
        num_columns: int,
        num_vocabulary: int,
        group_seconds: Sequence[Sequence[float]],
        column_seconds: Sequence[Sequence[float]],
        head_seconds: Sequence[float] = (),
    ) -> None:
        """`head_seconds` weigh the output head's rows on each device; without, the vocabulary takes no time."""
        self._budget = budget
        self._totals = (num_groups, num_columns, num_vocabulary)
        self._seconds = (_rising(group_seconds), _rising(column_seconds))
        self._thresholds = tuple(sorted({t for device in kind for t in device}) for kind in self._seconds)
        self._num = len(group_seconds)
        self._head_seconds = [seconds / max(head_seconds) for seconds in head_seconds] if any(head_seconds) else []

    def solve(self, model: str) -> Solution[Shares]:
        least = [self._least_threshold(kind) for kind in (0, 1)]
        bound = sum(self._thresholds[kind][least[kind]] for kind in (0, 1))
        free = [self._balanced(0), self._balanced(1), self._vocabulary()]
        if self._fits(free):
            return self._shares(free, bound, bound)
        found = self._feasible(least[0], least[1])
        if found is not None:
            return self._shares(found, bound, bound)
        best: tuple[float, list[tuple[int, ...]]] | None = None
        last = (len(self._thresholds[0]) - 1, len(self._thresholds[1]) - 1)
        anything = self._feasible(*last)
        if anything is None:
            raise ModelDoesNotFit(model=model, missing_bytes=self._budget.missing(*self._totals))
        best = (self._objective(anything), anything)
        # The border: as the first threshold falls from where everything is allowed, the second one rises.
        i, j = last[0], least[1]
        proven, programs = True, 0
        while i >= least[0] and j <= last[1]:
            if self._thresholds[0][i] + self._thresholds[1][j] >= best[0]:
                i -= 1  # nothing on this side of the border can be better
                continue
            if programs == _MAX_PROGRAMS:
                proven = False
                break
            programs += 1
            found = self._feasible(i, j)
            if found is None:
                j += 1
                continue
            best = min(best, (self._objective(found), found), key=lambda each: each[0])
            i -= 1
        return self._shares(best[1], best[0], best[0] if proven else bound)

    def _balanced(self, kind: int) -> tuple[int, ...]:
        """Memory aside: each grain to the device that is done with it first, which no other order can beat."""
        shares = [0] * self._num
        seconds = self._seconds[kind]
        done = [(seconds[d][1], d) for d in range(self._num)]
        heapify(done)
        for _ in range(self._totals[kind]):
            _, d = done[0]
            shares[d] += 1
            after = shares[d] + 1
            heapreplace(done, (seconds[d][after] if after < len(seconds[d]) else float("inf"), d))
        return tuple(shares)

    def _vocabulary(self) -> tuple[int, ...]:
        """It costs bytes and hardly any time: in equal parts where there is room; by the time of a decoder's head."""
        weights = [1.0 / max(seconds, 1e-9) for seconds in self._head_seconds] or [1.0] * self._num
        return largest_remainder(weights, self._totals[2])

    def _vocabulary_within(self, found: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The vocabulary of feasible shares, where it takes time dealt anew: grain by grain to the device that is done
        with it first, of those that have room beside their other shares."""
        if not self._head_seconds:
            return found[2]
        sizes = (self._budget.head_grain, self._budget.column_grain)
        room = [
            (self._budget.total(d) - sum(size * kind[d] for size, kind in zip(sizes, found, strict=False)))
            // self._budget.vocabulary_grain
            for d in range(self._num)
        ]
        shares = [0] * self._num
        for _ in range(self._totals[2]):
            free = [d for d in range(self._num) if shares[d] < room[d]]
            if not free:  # feasible but for the solver's tolerance
                return found[2]
            shares[min(free, key=lambda d: ((shares[d] + 1) * self._head_seconds[d], d))] += 1
        return tuple(shares)

    def _fits(self, found: Sequence[tuple[int, ...]]) -> bool:
        sizes = (self._budget.head_grain, self._budget.column_grain, self._budget.vocabulary_grain)
        return all(
            sum(size * kind[d] for size, kind in zip(sizes, found, strict=True)) <= self._budget.total(d)
            for d in range(self._num)
        )

    def _shares(self, found: list[tuple[int, ...]], seconds: float, bound: float) -> Solution[Shares]:
        return Solution(Shares(*found), max(seconds, bound), bound, seconds <= bound)

    def _objective(self, found: list[tuple[int, ...]]) -> float:
        return sum(
            max(self._seconds[kind][d][found[kind][d]] for d in range(self._num) if found[kind][d]) for kind in (0, 1)
        )

    def _most(self, kind: int, threshold: float) -> list[int]:
        """The most that each device does of a kind within the threshold."""
        return [bisect_left(seconds, threshold * (1 + 1e-12) + 1e-15) - 1 for seconds in self._seconds[kind]]

    def _least_threshold(self, kind: int) -> int:
        """Index of the least threshold that covers the whole, memory aside."""
        low, high = 0, len(self._thresholds[kind]) - 1
        while low < high:
            middle = (low + high) // 2
            if sum(self._most(kind, self._thresholds[kind][middle])) >= self._totals[kind]:
                high = middle
            else:
                low = middle + 1
        return low

    def _feasible(self, i: int, j: int) -> list[tuple[int, ...]] | None:
        """Shares of all three kinds within both thresholds and all budgets, or None."""
        most = [self._most(0, self._thresholds[0][i]), self._most(1, self._thresholds[1][j])]
        if sum(most[0]) < self._totals[0] or sum(most[1]) < self._totals[1]:
            return None
        bounds = [*most, [self._totals[2]] * self._num]
        sizes = (self._budget.head_grain, self._budget.column_grain, self._budget.vocabulary_grain)
        rows = Rows(3 * self._num)  # of each kind, the grains of every device
        for kind in range(3):
            rows.equal({kind * self._num + d: 1.0 for d in range(self._num)}, self._totals[kind])
        unit = float(1 << 20)
        for d in range(self._num):
            row = {kind * self._num + d: sizes[kind] / unit for kind in range(3)}
            rows.at_most(row, self._budget.total(d) / unit)
        # Among equals: balanced, that is most to those who are fast, which the upper bounds express.
        cost = [1.0 / max(most, 1) if kind < 2 else 0.0 for kind in range(3) for most in bounds[kind]]
        upper = np.array([most for kind in range(3) for most in bounds[kind]], np.float64)
        try:
            values = rows.minimise(np.array(cost), upper, integer=True, time_limit_seconds=_SOLVE_SECONDS)
        except ValueError:
            return None
        found = [tuple(map(round, of_kind)) for of_kind in values.reshape(3, self._num).tolist()]
        return [*found[:2], self._vocabulary_within(found)]


def _rising(kind: Sequence[Sequence[float]]) -> list[list[float]]:
    """Measured curves may dip; more work never counts as less."""
    result = []
    for seconds in kind:
        highest, rising = 0.0, []
        for value in seconds:
            highest = max(highest, value)
            rising.append(highest)
        result.append(rising)
    return result
