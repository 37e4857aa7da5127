"""Placeto (arXiv 1906.08879): a policy learns to improve a placement, one operator after the other. Pure.

A baseline for learned planners: the original formulation, with standardised features. An episode starts from the best
placement of the list schedulers and decides once for each operator, in topological order, on which device it runs; the
reward of a step is the improvement. REINFORCE with a baseline per step. The network is in placeto_network.py.

Not in the original: an untrained policy prefers to keep each operator where it is. A uniform one loses the good first
placement within a few steps, and learns from far worse ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.list_scheduling import mean_seconds, mean_transfer_seconds
from coordinator.plan.graph.latency.placeto_network import (
    MessageGraph,
    forward,
    gradients,
    initial_weights,
)
from coordinator.plan.graph.latency.policy_gradient import Adam, Array, Weights, loss_gradients, softmax
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule, schedule
from coordinator.plan.solution import SearchOptions, Solution

MAX_EPISODES = 4000  # the number that Doppler's comparison gives each method on its smaller graphs
_FIRST_RATE, _LAST_RATE = 1e-3, 1e-4  # learning rate; it falls linearly over MAX_EPISODES
_FIRST_ENTROPY_WEIGHT = 1e-2  # falls linearly to 0
_MAX_GRADIENT_NORM = 1.25
_BASELINE_EPISODES = 10
_PENALTY_PER_BYTE = 2e-9  # 2 per GB beyond the budgets, where a makespan as long as the first one counts 1
_MAX_ROWS = 50_000  # operators times steps in one backward pass; bounds its memory
_TRAINING_FRACTION = 0.95  # of the time limit; the rest is for the final greedy episode
_KEEP_LOGIT = 2.0  # added to the logit of an operator's present device
_NUM_STATIC = 2  # features: seconds of the operator and of its output's transfer

Source = Literal["start", "training", "greedy"]


class PlacetoResult(NamedTuple):
    """The best placement found, where it comes from, and that of the final policy's most likely devices."""

    best: Schedule
    source: Source
    greedy: Schedule | None  # None: it does not fit, or there was no time for it
    num_episodes: int


def solve_placeto(problem: PlacementProblem, options: SearchOptions) -> Solution[Schedule]:
    """Train until the time limit, from the best placement of the list schedulers. Raises as `list_schedules`."""
    began = options.clock()
    generator = default_rng(options.seed)
    deadline = began + options.time_limit_seconds
    found = placeto(
        problem, best_list_schedule(problem, options.time_limit_seconds), generator, options.clock, deadline
    ).best
    return Solution(found, found.makespan, seconds=options.clock() - began)


def best_list_schedule(problem: PlacementProblem, seconds: float = 0.0) -> Schedule:
    """The best schedule of the list schedulers, contended HEFT included. Raises as `list_schedules`."""
    return min(list_schedules(problem, seconds, "placeto"), key=lambda each: each.makespan)


def placeto(
    problem: PlacementProblem,
    start: Schedule,
    generator: Generator,
    clock: Callable[[], float],
    deadline: float,
    num_episodes: int = MAX_EPISODES,
) -> PlacetoResult:
    """Train a policy from scratch; return the best placement of all episodes, never worse than `start`.

    The result repeats for equal generators unless `clock()` reaches `deadline`. `start` must fit.
    """
    return _Training(problem, start, generator, clock).run(deadline, num_episodes)


@dataclass(frozen=True)
class _Episode:
    features: Array  # [N, S, F]: the state of each step
    devices: tuple[int, ...]  # chosen for each operator
    returns: Array  # by step, the sum of all rewards from it on


class _Training:
    def __init__(
        self, problem: PlacementProblem, start: Schedule, generator: Generator, clock: Callable[[], float]
    ) -> None:
        self._problem = problem
        self._generator = generator
        self._clock = clock
        self._unit = start.makespan or 1.0
        self._order = start.operator_order
        self._start = start.assignment
        self._best = start
        self._static_NF = _static_features(problem)
        num_features = _NUM_STATIC + problem.num_devices + 2
        self._weights: Weights = initial_weights(num_features, problem.num_devices, num_features, generator)
        self._adam = Adam(self._weights, _MAX_GRADIENT_NORM)
        self._graph = MessageGraph.of(problem.predecessors, problem.successors)
        self._returns: deque[Array] = deque(maxlen=_BASELINE_EPISODES)

    def run(self, deadline: float, num_episodes: int) -> PlacetoResult:
        """Train, then place greedily."""
        began, first = self._clock(), self._best
        training_deadline = began + _TRAINING_FRACTION * (deadline - began)
        done = 0
        while done < num_episodes and (episode := self._run_episode(training_deadline)) is not None:
            self._learn(episode, done / MAX_EPISODES)
            done += 1
        trained = self._best
        final = self._run_episode(deadline, greedy=True)
        greedy = None
        if final is not None and self._problem.overflow_bytes(final.devices) == 0:
            greedy = best_schedule(self._problem, final.devices, self._order)
            self._keep(greedy)
        source: Source = "start" if self._best is first else "training" if self._best is trained else "greedy"
        self._keep(best_schedule(self._problem, self._best.assignment, self._order))
        return PlacetoResult(self._best, source, greedy, done)

    def _keep(self, found: Schedule) -> None:
        if found.makespan < self._best.makespan:
            self._best = found

    def _run_episode(self, deadline: float, greedy: bool = False) -> _Episode | None:
        """Place each operator once, with sampled or with the most likely devices; None when the time is over."""
        n, num_devices = self._problem.num_operators, self._problem.num_devices
        devices = list(self._start)
        placed, is_current, is_done = _NUM_STATIC, _NUM_STATIC + num_devices, _NUM_STATIC + num_devices + 1
        state = np.zeros((n, 1, is_done + 1), np.float32)
        state[:, 0, :_NUM_STATIC] = self._static_NF
        state[np.arange(n), 0, placed + np.array(devices)] = 1.0
        seen = np.zeros((n, n, is_done + 1), np.float32)
        values = np.zeros(n + 1)
        values[0] = self._value(devices)
        for operator in range(n):
            if self._clock() >= deadline:
                return None
            state[operator, 0, is_current] = 1.0
            seen[:, operator] = state[:, 0]
            current = np.array([operator])
            logits = forward(self._weights, self._graph, state, current).logits + self._kept(state, current)
            device = int(logits.argmax()) if greedy else self._sample(softmax(logits)[0])
            values[operator + 1] = values[operator]
            if device != devices[operator]:
                state[operator, 0, placed + devices[operator]] = 0.0
                state[operator, 0, placed + device] = 1.0
                devices[operator] = device
                values[operator + 1] = self._value(devices)
            state[operator, 0, is_current] = 0.0
            state[operator, 0, is_done] = 1.0
        return _Episode(seen, tuple(devices), values[:-1] - values[-1])

    def _kept(self, features_NSF: Array, current_S: NDArray[np.intp]) -> Array:
        """[S, K]: what the present device of each step's operator has ahead of the others."""
        devices = slice(_NUM_STATIC, _NUM_STATIC + self._problem.num_devices)
        kept: Array = _KEEP_LOGIT * features_NSF[current_S, np.arange(len(current_S)), devices]
        return kept

    def _sample(self, probabilities: Array) -> int:
        below = np.searchsorted(np.cumsum(probabilities), self._generator.random(), side="right")
        return min(int(below), self._problem.num_devices - 1)

    def _value(self, devices: Sequence[int]) -> float:
        """The makespan over the first one, plus the penalty for memory. Keeps the best schedule that fits."""
        found = schedule(self._problem, devices, self._order)
        excess_bytes = self._problem.overflow_bytes(devices)
        if excess_bytes == 0:
            self._keep(found)
        return found.makespan / self._unit + _PENALTY_PER_BYTE * excess_bytes

    def _learn(self, episode: _Episode, progress: float) -> None:
        """One step of REINFORCE with an entropy bonus; advantages are divided by their deviation over all steps."""
        self._returns.append(episode.returns)
        known = np.array(self._returns)
        deviation = float((known - known.mean(axis=0)).std())
        advantages = (episode.returns - known.mean(axis=0)) / (deviation or 1.0)
        n, chosen, entropy_weight = len(advantages), np.array(episode.devices), (1 - progress) * _FIRST_ENTROPY_WEIGHT
        steps_per_pass = max(1, _MAX_ROWS // n)
        total: Weights = {}
        for first in range(0, n, steps_per_pass):
            steps = np.arange(first, min(n, first + steps_per_pass))
            features = episode.features[:, steps]
            passed = forward(self._weights, self._graph, features, steps)
            logits = passed.logits + self._kept(features, steps)
            d_logits = loss_gradients(logits, chosen[steps], advantages[steps], entropy_weight)
            found = gradients(self._weights, self._graph, passed, (d_logits / n).astype(np.float32))
            total = {name: total.get(name, 0) + each for name, each in found.items()}
        self._adam.update(total, _FIRST_RATE + progress * (_LAST_RATE - _FIRST_RATE))


def _static_features(problem: PlacementProblem) -> Array:
    """[N, 2]: mean seconds of each operator and of the transfers of its outputs, each with mean 0 and deviation 1."""
    carried = mean_transfer_seconds(problem)
    outputs = [sum(carried[flow] for flow in flows) for flows in problem.outgoing]
    features = np.array([mean_seconds(problem), outputs]).T
    deviations = features.std(axis=0)
    scaled: Array = (features - features.mean(axis=0)) / np.where(deviations > 0, deviations, 1.0)
    return scaled.astype(np.float32)
