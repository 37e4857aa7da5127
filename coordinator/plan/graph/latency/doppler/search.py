"""Local search on schedules: simulated annealing of assignment and order, priced in order. Pure.

The cost of a solution is its makespan plus a share of the mean time at which devices end, so that moves between equal
makespans lead somewhere. The limit on the cost of an accepted move (Metropolis rule) is drawn before the move is priced:
its evaluation starts at the first operator that changes, and stops where it must exceed the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log
from random import Random

from coordinator.plan.graph.latency.doppler.features import mean_operator_seconds
from coordinator.plan.graph.latency.doppler.moves import Move, MoveGenerator
from coordinator.plan.graph.latency.evaluator import IncrementalEvaluator, named, numbered
from coordinator.plan.graph.latency.memory_ledger import MemoryLedger
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule

# Temperatures at the first and at the last move, as fractions of the makespan of the start.
_FIRST_TEMPERATURE, _LAST_TEMPERATURE = 0.003, 0.0002
# At most, in work of mean operators: large graphs get few moves for each operator. On a transformer of 1,374 operators, 40,000
# moves gain 0.75 % from 0.03 of an operator, 0.2 % from 0.3.
_MOST_OPERATORS = 70.0  # divided by the number of operators
# Of the mean end of devices in the cost. With 0.2, 80,000 moves on the Llama block (gigabit) end 1 % higher, on the layer at
# 190 Mbit/s 1 % lower.
_MEAN_END_WEIGHT = 0.4
_CLOCK_MOVES = 256  # moves between two looks at the clock, and at the temperature


def improve(
    problem: PlacementProblem,
    start: Schedule,
    rng: Random,
    moves: int,
    clock: Callable[[], float],
    deadline: float = inf,
    probabilities: Sequence[Sequence[float]] | None = None,
    first_temperature: float = _FIRST_TEMPERATURE,
) -> Schedule:
    """The best schedule found by `moves` moves from `start`, which fits the memory; never worse than `start`.

    The search cools down from `first_temperature`, a fraction of the makespan of `start`, over `moves`, or until `clock()`
    reaches `deadline` if that is earlier. `probabilities[i][k]` is that of device k for operator i: half of the proposed
    devices are drawn from it, the others uniformly (default: all).
    """
    annealing = _Annealing(problem, start, rng, probabilities)
    annealing.run(moves, clock, deadline, first_temperature)
    assignment, order = annealing.best
    return min(start, best_schedule(problem, assignment, named(problem, order)), key=lambda each: each.makespan)


class _Annealing:
    def __init__(
        self, problem: PlacementProblem, start: Schedule, rng: Random, probabilities: Sequence[Sequence[float]] | None
    ) -> None:
        assignment = list(start.assignment)
        order = numbered(problem, assignment, start.order)
        self._random = rng.random
        self._most_temperature = _MOST_OPERATORS / problem.num_operators * mean_operator_seconds(problem)
        self._memory = MemoryLedger(problem, assignment)
        self._moves = MoveGenerator(problem, assignment, order, rng, probabilities)
        self._evaluator = IncrementalEvaluator(problem, assignment, order, _MEAN_END_WEIGHT)
        self._best_makespan = self._evaluator.makespan
        self.best = (assignment, order)

    def run(self, moves: int, clock: Callable[[], float], deadline: float, first_temperature: float) -> None:
        """Make moves, cooling down geometrically."""
        began = clock()
        hottest = min(self._evaluator.makespan * first_temperature, self._most_temperature)
        temperature, ratio = hottest, _LAST_TEMPERATURE / first_temperature
        for number in range(moves):
            if number % _CLOCK_MOVES == 0:
                now = clock()
                if now >= deadline:
                    return
                temperature = hottest * ratio ** max(number / moves, (now - began) / (deadline - began))
            move = self._moves.draw()
            if move is not None:
                self._try(move, self._evaluator.cost - temperature * log(1.0 - self._random()))

    def _try(self, move: Move, limit: float) -> None:
        """Accept the move if it fits the memory and costs at most `limit`."""
        if not self._fits(move):
            return
        solution = self._moves
        assignment = solution.assignment
        if move.devices:
            assignment = assignment[:]
            for operator, device in move.devices.items():
                assignment[operator] = device
        order = solution.order if move.order is None else move.order
        if self._evaluator.trial(assignment, order, move.first, limit) > limit:
            self._move_memory(move, back=True)
            return
        self._evaluator.commit()
        solution.accept(assignment, move)
        if self._evaluator.makespan < self._best_makespan:
            self._best_makespan = self._evaluator.makespan
            self.best = (assignment, order)

    def _fits(self, move: Move) -> bool:
        """Whether the move fits the memory. If it does, the ledger is as after the move."""
        if not self._memory.is_binding:
            return True
        self._move_memory(move)
        if self._memory.fits:
            return True
        self._move_memory(move, back=True)
        return False

    def _move_memory(self, move: Move, back: bool = False) -> None:
        if self._memory.is_binding:
            for operator, device in move.devices.items():
                before = self._moves.assignment[operator]
                self._memory.move(operator, *((device, before) if back else (before, device)))
