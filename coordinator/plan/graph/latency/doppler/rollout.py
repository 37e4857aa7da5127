"""Rollouts of Doppler's policies: B episodes in lockstep, each of which orders and places all operators. Pure.

Randomness is an argument: the same noise gives the same episodes, alone or with others. Shape letters: B episodes,
n operators, K devices, F features of a device, h hidden width.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from coordinator.plan.graph.latency.doppler.clock import TICKS_PER_MEAN_OPERATOR, EpisodeClock, in_clock_ticks
from coordinator.plan.graph.latency.doppler.features import (
    CLOCK_COLUMNS,
    DEVICE_FEATURES,
    RAW_COLUMNS,
    Bools,
    Floats,
    Ints,
    ProblemFeatures,
    device_features,
)
from coordinator.plan.graph.latency.doppler.policy import HIDDEN, Policy, parameter_shapes, softmax
from coordinator.plan.graph.latency.memory import MemoryLedger
from coordinator.plan.graph.latency.problem import PlacementProblem
from hearth.errors import NoPlacement

# SEL's logits this far below the greatest count as this far: clocks of slower rates would swallow those of faster ones.
MAX_LOGIT_SPREAD = 30.0


@dataclass(frozen=True)
class Noise:
    """The random numbers of B episodes, by operator and device, so that they follow a relabelled problem."""

    clocks: Floats  # [B, n], exponential with rate 1
    gumbel: Floats  # [B, n, K]
    greedy: Bools  # [B]; such an episode takes the most probable choices, and ignores the others

    def episode(self, index: int) -> Noise:
        """The noise of one episode."""
        one = slice(index, index + 1)
        return Noise(self.clocks[one], self.gumbel[one], self.greedy[one])


def draw_noise(problem: PlacementProblem, num_sampled: int, rng: Generator) -> Noise:
    """Noise of a greedy episode, which comes first, and of `num_sampled` episodes that sample from the policies."""
    B, n, K = num_sampled + 1, problem.num_operators, problem.num_devices
    return Noise(rng.standard_exponential((B, n)), rng.gumbel(size=(B, n, K)), np.arange(B) == 0)


def sampling_noise(problem: PlacementProblem, B: int, rng: Generator) -> Noise:
    """Noise of B episodes that sample from the policies."""
    return replace(draw_noise(problem, B - 1, rng), greedy=np.zeros(B, bool))


@dataclass(frozen=True)
class Rollouts:
    """The episodes. Of an episode that found no room for an operator (`complete` is false), the rest is -1 or 0."""

    complete: Bools  # [B]
    orders: Ints  # [B, n], operators as SEL chose them
    assignments: Ints  # [B, n], device of each operator
    starts: Floats  # [B, n], of each operator, as the clock estimates them; in the problem's unit
    makespans: Floats  # [B], likewise
    probabilities: Floats  # [B, n, K], PLC's for each operator when it was placed
    allowed: Bools  # [B, n, K], devices that had room then
    features: Floats  # [B, n, K, F], what PLC read of the devices then


def roll_out(problem: ProblemFeatures, policy: Policy, noise: Noise, embedded: Floats | None = None) -> Rollouts:
    """Run one episode per row of `noise`. Raises NoPlacement if no episode found room for all operators.

    `embedded`: `policy.embed(problem)`, where it is known already.

    SEL samples without a softmax: when an operator becomes a candidate, it gets a clock that rings after an exponential
    time of rate e^logit; the first to ring is chosen. This is the softmax over the candidates, since the remaining time
    of an exponential clock does not depend on the time that has passed.
    """
    placement, (B, n, K) = problem.problem, noise.gumbel.shape
    encoding = policy.read(policy.embed(problem) if embedded is None else embedded)
    keys = _selection_keys(encoding.select_logits, noise)
    ticked, seconds_per_tick = in_clock_ticks(placement)
    episodes = [_Episode(ticked, row, noise.greedy[b]) for b, row in enumerate(keys.tolist())]
    ticks_nK, budgets_K = np.array(ticked.seconds), np.maximum(np.array(placement.budget_bytes, dtype=float), 1)
    sums_BKh = np.zeros((B, K, HIDDEN), np.float32)  # of the operators on each device, in hidden space
    counts_BK = np.zeros((B, K), np.float32)
    found = Rollouts(
        complete=np.ones(B, bool),
        orders=np.full((B, n), -1),
        assignments=np.full((B, n), -1),
        starts=np.zeros((B, n)),
        makespans=np.zeros(B),
        probabilities=np.zeros((B, n, K), np.float32),
        allowed=np.zeros((B, n, K), bool),
        features=np.zeros((B, n, K, len(DEVICE_FEATURES)), np.float32),
    )
    rows: Ints = np.arange(B)  # of the episodes that go on
    for step in range(n):
        operators: Ints = np.array([episodes[b].select() for b in rows])
        left = np.array([episodes[b].memory.left_bytes(v) for b, v in zip(rows, operators.tolist(), strict=True)])
        has_room = (left >= 0).any(axis=1)
        if not has_room.all():
            found.complete[rows[~has_room]] = False
            rows, operators, left = rows[has_room], operators[has_room], left[has_room]
            if not len(rows):
                raise NoPlacement(graph=placement.name, strategy="doppler")
        allowed = left >= 0
        raw = np.empty((len(rows), len(RAW_COLUMNS), K))
        seen = [episodes[b].clock.observe(v) for b, v in zip(rows.tolist(), operators.tolist(), strict=True)]
        raw[:, : len(CLOCK_COLUMNS)] = np.array(seen).reshape(len(rows), -1, K)
        raw[:, -3] = ticks_nK[operators]
        raw[:, -2] = left / budgets_K
        raw[:, -1] = problem.incumbent[operators]
        features = device_features(raw, allowed, TICKS_PER_MEAN_OPERATOR)
        placed = sums_BKh[rows] / np.maximum(counts_BK[rows], 1)[:, :, None]
        logits = np.where(allowed, policy.place_logits(encoding.static[operators], placed, features), -np.inf)
        noisy = logits + np.where(noise.greedy[rows, None], 0.0, noise.gumbel[rows, operators])
        devices = noisy.argmax(axis=1)
        for b, device in zip(rows.tolist(), devices.tolist(), strict=True):
            episodes[b].place(device)
        sums_BKh[rows, devices] += encoding.placed[operators]
        counts_BK[rows, devices] += 1
        found.orders[rows, step] = operators
        found.assignments[rows, operators] = devices
        found.probabilities[rows, operators] = softmax(logits)
        found.allowed[rows, operators] = allowed
        found.features[rows, operators] = features
    for b in rows.tolist():
        found.starts[b] = np.array(episodes[b].clock.starts) * seconds_per_tick
        found.makespans[b] = max(episodes[b].clock.ends) * seconds_per_tick
    return found


def orders_by_start(rollouts: Rollouts) -> Ints:
    """By episode, the operators [B, n] by the starts that its clock gave them; equal starts as SEL chose them.

    Devices fill gaps before operators that were placed earlier, so this is not SEL's order.
    """
    orders: Ints = np.lexsort((np.argsort(rollouts.orders, axis=1), rollouts.starts), axis=1)
    return orders


def candidates_by_step(problem: PlacementProblem, orders: Ints) -> Bools:
    """By episode and step, the operators whose predecessors are placed and that are not [B, n, n]. `orders`: [B, n]."""
    positions = np.argsort(orders, axis=1)
    ready = np.zeros_like(positions)
    for operator, before in enumerate(problem.predecessors):
        if before:
            ready[:, operator] = positions[:, before].max(axis=1) + 1
    steps = np.arange(problem.num_operators)[:, None]
    candidates: Bools = (ready[:, None] <= steps) & (steps <= positions[:, None])
    return candidates


def repeat(problem: ProblemFeatures, order: Sequence[int], assignment: Sequence[int]) -> Rollouts:
    """The one episode that places the operators in this order on these devices, where all fit.

    A policy whose weights are 0 prefers nothing, so that the noise decides: clocks ring in the order, and of the random
    numbers of devices the greatest is that of the operator's own.
    """
    n, K = problem.problem.num_operators, problem.problem.num_devices
    position = np.argsort(np.array(order))
    latest = [max((position[u] for u in before), default=0) for before in problem.problem.predecessors]
    indifferent = Policy({name: np.zeros(shape, np.float32) for name, shape in parameter_shapes().items()})
    noise = Noise((position - latest)[None], np.eye(K)[np.array(assignment)][None], np.zeros(1, bool))
    return roll_out(problem, indifferent, noise, np.zeros((n, 4 * HIDDEN), np.float32))


def _selection_keys(logits_n: Floats, noise: Noise) -> Floats:
    """By episode and operator, what SEL adds to the clock when the operator becomes a candidate; the least is chosen."""
    below = np.minimum(logits_n.max() - logits_n.astype(np.float64), MAX_LOGIT_SPREAD)
    keys: Floats = np.where(noise.greedy[:, None], below, noise.clocks * np.exp(below))
    return keys


class _Episode:
    """One episode of a problem in ticks: SEL's candidates, the clock, and the memory in use."""

    def __init__(self, problem: PlacementProblem, keys: list[float], greedy: bool) -> None:
        self.clock, self.memory = EpisodeClock(problem), MemoryLedger(problem)
        self._problem, self._keys, self._greedy = problem, keys, greedy
        self._waiting_for = [len(predecessors) for predecessors in problem.predecessors]
        self._candidates = [(keys[i], i) for i, count in enumerate(self._waiting_for) if not count]
        heapq.heapify(self._candidates)
        self._now, self._operator = 0.0, -1

    def select(self) -> int:
        """Take the candidate whose clock rings first; of a greedy episode, the most probable one."""
        key, self._operator = heapq.heappop(self._candidates)
        if not self._greedy:
            self._now = key
        return self._operator

    def place(self, device: int) -> None:
        """Place the selected operator; operators that waited for it alone become candidates."""
        self.clock.place(device)
        self.memory.place(self._operator, device)
        for successor in self._problem.successors[self._operator]:
            self._waiting_for[successor] -= 1
            if not self._waiting_for[successor]:
                heapq.heappush(self._candidates, (self._now + self._keys[successor], successor))
