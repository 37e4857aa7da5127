"""Moirai's placement model, equations (4) to (8), for OR-Tools' CP-SAT, with optional intervals in place of big-M. Pure.

Times are whole ticks (`in_ticks`). An operator on a device, and a transfer on a channel, are optional intervals that are
present if the placement uses them. Intervals of a device do not overlap; with congestion control, neither do those of
its sending side or of its receiving side. The channel that a flow takes is a linear function of the devices of its ends,
so that the linear relaxation sees it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ortools.sat.python import cp_model

from coordinator.plan.graph.latency.bounds import earliest_ends, least_rests
from coordinator.plan.graph.latency.fitting import held_bytes, total_bytes
from coordinator.plan.graph.latency.problem import Matrix, PlacementProblem
from coordinator.plan.graph.latency.schedule import Item, Schedule, Send, by_start, schedule

_MOST_DIGITS = 6  # decimals of a time that are kept exactly
_INEXACT_TICKS = 1 << 26  # rounded times: the whole graph on the fastest device; one tick is 1 part in 67 million


class Answer(NamedTuple):
    """`schedule` is None if none was found; `bound`, in ticks, is a lower bound on the makespan."""

    schedule: Schedule | None
    bound: int


class Context(NamedTuple):
    """The surroundings of a part of a schedule, in ticks [n][K], by operator and device.

    An operator starts no earlier than its release; from its end to the end of the whole schedule pass its `tails`.
    """

    releases: Matrix
    tails: Matrix


@dataclass(frozen=True)
class Effort:
    """When the solver stops.

    `seconds` are wall-clock time. `deterministic_seconds` are the solver's own count of its work: with one worker, a run
    that ends by this count repeats exactly. `linearization` is CP-SAT's level: 0 searches fast, 2 gives good bounds.
    """

    seconds: float
    deterministic_seconds: float = math.inf
    num_workers: int = 1
    linearization: int = 1


def in_ticks(problem: PlacementProblem) -> tuple[PlacementProblem, float]:
    """The problem in whole ticks, and the number of ticks per time unit.

    Exact where all times are decimals of a few digits; otherwise rounded down, so that a bound in ticks stays a bound.
    """
    times = {time for row in problem.seconds for time in row} | {time for row in problem.latency for time in row}
    times.update(time for flow in problem.flows for row in flow.seconds for time in row)
    totals = [sum(column) for column in zip(*problem.seconds, strict=True)]
    total = max(totals) or max(times) or 1.0
    for digits in range(_MOST_DIGITS + 1):
        per_unit = 10.0**digits
        if total * per_unit < 2**40 and all(abs(t * per_unit - round(t * per_unit)) < 1e-6 for t in times):
            break
    else:
        per_unit = _INEXACT_TICKS / (min(totals) or total)

    def ticks(rows: Matrix) -> Matrix:
        return tuple(tuple(float(math.floor(time * per_unit + 1e-6)) for time in row) for row in rows)

    known = {seconds: ticks(seconds) for seconds in {flow.seconds for flow in problem.flows}}
    flows = tuple(flow._replace(seconds=known[flow.seconds]) for flow in problem.flows)
    return replace(problem, seconds=ticks(problem.seconds), latency=ticks(problem.latency), flows=flows), per_unit


def solve_model(
    problem: PlacementProblem,
    effort: Effort,
    below: int,
    pins: Mapping[int, int] | None = None,
    hint: Schedule | None = None,
    context: Context | None = None,
) -> Answer:
    """Minimise the makespan of a problem in ticks, with some operators pinned to devices.

    Only schedules that end before `below` count; if there are none, `below` is the bound. With a context, only the order
    of the returned schedule is meaningful: its times do not include the context.
    """
    pins = pins or {}
    if below <= 0:
        return Answer(None, below)
    model = _Model(problem, pins, below - 1, context)
    if hint is not None:
        model.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = effort.num_workers
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = effort.linearization
    solver.parameters.max_time_in_seconds = max(effort.seconds, 0.0)
    if effort.deterministic_seconds < math.inf:
        solver.parameters.max_deterministic_time = effort.deterministic_seconds
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return Answer(None, below)
    bound = max(0, math.ceil(solver.best_objective_bound - 1e-6))
    return Answer(model.read(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None, bound)


class _Use(NamedTuple):
    """Use of a resource for `ticks` from `start`, if `present`: not before `head`, and not in the last `tail` ticks."""

    start: cp_model.IntVar
    ticks: int
    present: cp_model.IntVar
    head: float = 0.0
    tail: float = 0.0


class _Model:
    def __init__(
        self, problem: PlacementProblem, pins: Mapping[int, int], most: int, context: Context | None = None
    ) -> None:
        self.model = cp_model.CpModel()
        self._problem, self._most = problem, most
        self._devices = range(problem.num_devices)
        self._always = self.model.new_constant(1)
        # By operator: device -> whether it runs there. A pinned operator has a single entry.
        self._on: list[dict[int, cp_model.IntVar]] = []
        self._starts: list[cp_model.IntVar] = []
        self._ends: list[cp_model.IntVar] = []
        # Contending flows, by flow and target device: the start; and, by the source's device too, whether it is sent.
        self._sends: dict[Send, cp_model.IntVar] = {}
        self._taken: dict[tuple[Send, int], cp_model.IntVar] = {}
        self._pairs: dict[tuple[int, int], dict[tuple[int, int], cp_model.IntVar]] = {}  # edge -> channel -> whether
        self._uses: defaultdict[tuple[str, int], list[_Use]] = defaultdict(list)  # by resource
        self._ends_by = earliest_ends(problem, pins, context.releases if context is not None else None)
        self._rests = least_rests(problem, pins, context.tails if context is not None else None)
        self._place(pins)
        self._keep_memory()
        for index in range(len(problem.flows)):
            self._carry(index)
        makespan = self._time()
        for uses in self._uses.values():
            self._one_at_a_time(uses, makespan)
        for i in range(problem.num_operators):
            if context is not None:
                self.model.add(self._starts[i] >= self._at(i, context.releases[i]))
                self.model.add(makespan >= self._ends[i] + self._at(i, context.tails[i]))
            elif not problem.successors[i]:
                self.model.add(makespan >= self._ends[i])
        self.model.minimize(makespan)

    def _at(self, operator: int, ticks: Sequence[float]) -> cp_model.LinearExprT:
        """The entry of `ticks` for the device that runs the operator."""
        return sum(round(ticks[k]) * here for k, here in self._on[operator].items())

    def _time(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self._most, "")

    def _place(self, pins: Mapping[int, int]) -> None:
        """Each operator runs on one device (4c), for its time there (4b); a device runs one at a time (6)."""
        for i, seconds in enumerate(self._problem.seconds):
            if i in pins:
                on = {pins[i]: self._always}
            else:
                # Devices on which the schedule could not end in time are left out.
                ways = [k for k in self._devices if self._ends_by[i][k] + self._rests[i][k] <= self._most]
                on = {k: self.model.new_bool_var("") for k in ways}
                self.model.add_exactly_one(on.values())
            start, end = self._time(), self._time()
            self._on.append(on)
            self.model.add(end == start + self._at(i, seconds))
            for k, here in on.items():
                head = self._ends_by[i][k] - seconds[k]
                self._uses["compute", k].append(_Use(start, round(seconds[k]), here, head, self._rests[i][k]))
            self._starts.append(start)
            self._ends.append(end)

    def _keep_memory(self) -> None:
        """The memory constraint (5); shared weights count once on each device that uses them."""
        total = total_bytes(self._problem)
        for k in self._devices:
            if total > self._problem.budget_bytes[k]:
                held = held_bytes(self.model, self._problem, self._on, k)
                self.model.add(held <= self._problem.budget_bytes[k])

    def _carry(self, index: int) -> None:
        """Targets start after the source's end plus the transfer between the two devices (4a, 7); each side of a device
        carries one transfer at a time (8)."""
        flow = self._problem.flows[index]
        ways = [(a, b) for a in self._on[flow.source] for b in self._devices if a != b]
        busy = {(a, b): round(flow.seconds[a][b]) for a, b in ways}
        late = {(a, b): busy[a, b] + round(self._problem.latency[a][b]) for a, b in ways}
        contends = self._problem.congestion and any(busy.values())
        if contends and len(flow.targets) == 1:
            self._carry_to_one(index, busy, late)
            return
        for target in flow.targets:
            pairs = self._between(flow.source, target) if any(late.values()) else {}
            carried = sum(late[a, b] * taken for (a, b), taken in pairs.items() if a != b)
            self.model.add(self._starts[target] >= self._ends[flow.source] + carried)
        if contends:
            self._carry_to_several(index, busy, late)

    def _carry_to_one(
        self, index: int, busy: Mapping[tuple[int, int], int], late: Mapping[tuple[int, int], int]
    ) -> None:
        flow = self._problem.flows[index]
        target, start = flow.targets[0], self._time()
        pairs = {way: taken for way, taken in self._between(flow.source, target).items() if way[0] != way[1]}
        carried = sum(late[way] * taken for way, taken in pairs.items())
        self.model.add(start >= self._ends[flow.source])
        self.model.add(self._starts[target] >= start + carried)
        for (a, b), taken in pairs.items():
            self._sends[Send(index, b)] = start
            self._occupy(index, a, b, _Use(start, busy[a, b], taken), [target])

    def _carry_to_several(
        self, index: int, busy: Mapping[tuple[int, int], int], late: Mapping[tuple[int, int], int]
    ) -> None:
        """A flow with several targets is sent once to each device that runs one of them."""
        flow, model = self._problem.flows[index], self.model
        for b in self._devices:
            targets = [target for target in flow.targets if b in self._on[target]]
            sources = [a for a in self._on[flow.source] if a != b]
            if not targets or not sources:
                continue
            start = self._sends[Send(index, b)] = self._time()
            model.add(start >= self._ends[flow.source])
            for a in sources:
                taken = self._taken[Send(index, b), a] = model.new_bool_var("")
                model.add_implication(taken, self._on[flow.source][a])
                self._occupy(index, a, b, _Use(start, busy[a, b], taken), targets)
                for target in targets:
                    pair = self._between(flow.source, target)[a, b]
                    model.add_implication(pair, taken)
                    model.add(self._starts[target] >= start + late[a, b]).only_enforce_if(pair)

    def _occupy(self, index: int, a: int, b: int, use: _Use, targets: Sequence[int]) -> None:
        """Occupy both sides of a channel for one transfer, unless it takes no time."""
        if use.ticks > 0:
            head = self._ends_by[self._problem.flows[index].source][a]
            tail = min(self._problem.seconds[target][b] + self._rests[target][b] for target in targets)
            use = use._replace(head=head, tail=self._problem.latency[a][b] + tail)
            self._uses["send", a].append(use)
            self._uses["receive", b].append(use)

    def _one_at_a_time(self, uses: Sequence[_Use], makespan: cp_model.IntVar) -> None:
        if len(uses) < 2:
            return
        model = self.model
        model.add_no_overlap(
            model.new_optional_fixed_size_interval_var(use.start, use.ticks, use.present, "") for use in uses
        )
        # Redundant, for the linear relaxation: makespan >= least head + all work of the resource + least tail.
        used = model.new_bool_var("")
        for use in uses:
            model.add_implication(use.present, used)
        around = round(min(use.head for use in uses) + min(use.tail for use in uses))
        model.add(makespan >= around * used + sum(use.ticks * use.present for use in uses))

    def _between(self, source: int, target: int) -> dict[tuple[int, int], cp_model.IntVar]:
        """By the devices of both ends, whether both run there: products, linearised by sums (a transportation polytope)."""
        if (source, target) in self._pairs:
            return self._pairs[source, target]
        ours, theirs = self._on[source], self._on[target]
        if len(ours) == 1:
            pairs = {(a, b): here for a in ours for b, here in theirs.items()}
        elif len(theirs) == 1:
            pairs = {(a, b): here for b in theirs for a, here in ours.items()}
        else:
            pairs = {(a, b): self.model.new_bool_var("") for a in ours for b in theirs}
            for a, here in ours.items():
                self.model.add(sum(pairs[a, b] for b in theirs) == here)
            for b, here in theirs.items():
                self.model.add(sum(pairs[a, b] for a in ours) == here)
        self._pairs[source, target] = pairs
        return pairs

    def hint(self, known: Schedule) -> None:
        """Start from a schedule of this problem, in ticks."""
        add, where = self.model.add_hint, known.assignment
        for i, on in enumerate(self._on):
            add(self._starts[i], round(known.starts[i]))
            add(self._ends[i], round(known.ends[i]))
            if len(on) > 1:
                for k, here in on.items():
                    add(here, int(where[i] == k))
        for (source, target), pairs in self._pairs.items():
            if len(self._on[source]) > 1 and len(self._on[target]) > 1:
                for (a, b), pair in pairs.items():
                    add(pair, int((where[source], where[target]) == (a, b)))
        when = {Send(each.flow, each.device): each for each in known.transfers}
        hinted: set[int] = set()
        for send in [*when, *self._sends]:  # for a flow with one target, all devices share one variable
            variable = self._sends.get(send)
            if variable is not None and variable.index not in hinted:
                hinted.add(variable.index)
                source = self._problem.flows[send.flow].source
                add(variable, round(when[send].start if send in when else known.ends[source]))
        for (send, a), taken in self._taken.items():
            add(taken, int(send in when and when[send].source == a))

    def read(self, solver: cp_model.CpSolver) -> Schedule:
        """The solution as a schedule in which everything starts as early as the order allows."""
        problem = self._problem
        where = [next(k for k, here in on.items() if solver.boolean_value(here)) for on in self._on]
        items: list[tuple[float, float, int, Item]] = []
        for i in range(problem.num_operators):
            items.append((solver.value(self._starts[i]), solver.value(self._ends[i]), i, i))
        for send, start in self._sends.items():
            source = problem.flows[send.flow].source
            begin = solver.value(start)
            items.append((begin, begin + problem.flows[send.flow].seconds[where[source]][send.device], source, send))
        return schedule(problem, where, by_start(items), in_order=True)
