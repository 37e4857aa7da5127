"""Moirai's placement model, equations (4) to (8), for OR-Tools' CP-SAT, with optional intervals in place of big-M. Pure.

Times are whole ticks. An operator on a device, and a transfer on a channel, are optional intervals that are
present if the placement uses them. Intervals of a device do not overlap; with congestion control, neither do those of
its sending side, of its receiving side, or of a shared medium. The channel that a flow takes is a linear function of the
devices of its ends, so that the linear relaxation sees it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ortools.sat.python import cp_model

from coordinator.plan.graph.latency.bounds import earliest_ends, remaining_times
from coordinator.plan.graph.latency.memory import held_bytes, total_bytes
from coordinator.plan.graph.latency.problem import ROUNDING_TICKS, FloatTable, PlacementProblem
from coordinator.plan.graph.latency.schedule import Item, Schedule, Send, schedule, sorted_by_start
from coordinator.plan.graph.latency.symmetry import DeviceClass, in_order_of_first_use, interchangeable_devices


class SolverResult(NamedTuple):
    """`schedule` is None if none was found; `bound`, in ticks, is a lower bound on the makespan."""

    schedule: Schedule | None
    bound: int


class WindowContext(NamedTuple):
    """The surroundings of a part of a schedule, in ticks [n][K], by operator and device.

    An operator starts no earlier than its release; from its end to the end of the whole schedule pass its `tails`.
    """

    releases: FloatTable
    tails: FloatTable


@dataclass(frozen=True)
class SolverLimits:
    """When the solver stops.

    `seconds` are wall-clock time, with a `clock` for building the model, too. `deterministic_seconds` are the solver's own
    count of its work: a run that ends by this count repeats exactly. `linearization` is CP-SAT's level: 0 searches fast, 2
    gives good bounds.
    """

    seconds: float
    deterministic_seconds: float = math.inf
    linearization: int = 1
    clock: Callable[[], float] = lambda: 0.0


def solve_placement_model(
    problem: PlacementProblem,
    limits: SolverLimits,
    below: int,
    pins: Mapping[int, int] | None = None,
    hint: Schedule | None = None,
    context: WindowContext | None = None,
) -> SolverResult:
    """Minimise the makespan of a problem in ticks, with some operators pinned to devices.

    Only schedules that end before `below` count; if there are none, `below` is the bound. With a context, only the order
    of the returned schedule is meaningful: its times do not include the context.
    """
    pins = pins or {}
    if below <= 0:
        return SolverResult(None, below)
    began = limits.clock()
    model = _PlacementModel(problem, pins, below - 1, context)
    if hint is not None:
        model.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0  # with one worker, runs repeat exactly
    solver.parameters.linearization_level = limits.linearization
    solver.parameters.max_time_in_seconds = max(limits.seconds - (limits.clock() - began), 0.0)
    if limits.deterministic_seconds < math.inf:
        solver.parameters.max_deterministic_time = limits.deterministic_seconds
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return SolverResult(None, below)
    bound = max(0, math.ceil(solver.best_objective_bound - ROUNDING_TICKS))
    return SolverResult(model.read(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None, bound)


class _ResourceUse(NamedTuple):
    """Use of a resource for `ticks` from `start`, if `present`: not before `head`, and not in the last `tail` ticks."""

    start: cp_model.IntVar
    ticks: int
    present: cp_model.IntVar
    head: float = 0.0
    tail: float = 0.0


class _PlacementModel:
    def __init__(
        self,
        problem: PlacementProblem,
        pins: Mapping[int, int],
        max_makespan: int,
        context: WindowContext | None = None,
    ) -> None:
        self.model = cp_model.CpModel()
        self._problem, self._max_makespan = problem, max_makespan
        self._devices = range(problem.num_devices)
        self._true = self.model.new_constant(1)
        # By operator: device -> whether it runs there. A pinned operator has a single entry.
        self._on: list[dict[int, cp_model.IntVar]] = []
        self._starts: list[cp_model.IntVar] = []
        self._ends: list[cp_model.IntVar] = []
        # Contending flows, by flow and target device: the start; and, by the source's device too, whether it is sent.
        self._sends: dict[Send, cp_model.IntVar] = {}
        self._channel_used: dict[tuple[Send, int], cp_model.IntVar] = {}
        self._channels: dict[tuple[int, int], dict[tuple[int, int], cp_model.IntVar]] = {}  # edge -> channel -> whether
        self._uses: defaultdict[tuple[str, int], list[_ResourceUse]] = defaultdict(list)  # by resource
        self._earliest_ends = earliest_ends(problem, pins, context.releases if context is not None else None)
        self._remaining_times = remaining_times(problem, pins, context.tails if context is not None else None)
        self._add_operators(pins)
        self._classes = interchangeable_devices(problem, set(pins.values()), context or ())
        self._used: dict[tuple[int, int], cp_model.IntVar] = {}  # operator, device: whether it or one before runs there
        for members in self._classes:
            self._order_by_first_use(members)
        self._add_memory_limits()
        for index in range(len(problem.flows)):
            self._add_flow(index)
        makespan = self._new_time()
        for uses in self._uses.values():
            self._add_no_overlap(uses, makespan)
        for i in range(problem.num_operators):
            if context is not None:
                self.model.add(self._starts[i] >= self._value_where_placed(i, context.releases[i]))
                self.model.add(makespan >= self._ends[i] + self._value_where_placed(i, context.tails[i]))
            elif not problem.successors[i]:
                self.model.add(makespan >= self._ends[i])
        self.model.minimize(makespan)

    def _value_where_placed(self, operator: int, ticks: Sequence[float]) -> cp_model.LinearExprT:
        """The entry of `ticks` for the device that runs the operator."""
        return sum(round(ticks[k]) * here for k, here in self._on[operator].items())

    def _new_time(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self._max_makespan, "")

    def _add_operators(self, pins: Mapping[int, int]) -> None:
        """Each operator runs on one device (4c), for its time there (4b); a device runs one at a time (6)."""
        for i, seconds in enumerate(self._problem.seconds):
            if i in pins:
                on = {pins[i]: self._true}
            else:
                # Devices on which the schedule could not end in time are left out.
                feasible = [
                    k
                    for k in self._devices
                    if self._earliest_ends[i][k] + self._remaining_times[i][k] <= self._max_makespan
                ]
                on = {k: self.model.new_bool_var("") for k in feasible}
                self.model.add_exactly_one(on.values())
            start, end = self._new_time(), self._new_time()
            self._on.append(on)
            self.model.add(end == start + self._value_where_placed(i, seconds))
            for k, here in on.items():
                head = self._earliest_ends[i][k] - seconds[k]
                self._uses["compute", k].append(
                    _ResourceUse(start, round(seconds[k]), here, head, self._remaining_times[i][k])
                )
            self._starts.append(start)
            self._ends.append(end)

    def _order_by_first_use(self, members: DeviceClass) -> None:
        """Break the symmetry of interchangeable devices: an operator uses one only if an earlier one uses its predecessor."""
        for device, following in pairwise(members):
            before: cp_model.IntVar | None = None
            for i, on in enumerate(self._on):
                if following in on:
                    if before is None:
                        self.model.add(on[following] == 0)
                    else:
                        self.model.add_implication(on[following], before)
                if device in on:
                    used = self._used[i, device] = self.model.new_bool_var("")
                    self.model.add_bool_or([on[device], *([] if before is None else [before]), ~used])
                    before = used

    def _add_memory_limits(self) -> None:
        """The memory constraint (5); shared weights count once on each device that uses them."""
        total = total_bytes(self._problem)
        for k in self._devices:
            if total > self._problem.budget_bytes[k]:
                held = held_bytes(self.model, self._problem, self._on, k)
                self.model.add(held <= self._problem.budget_bytes[k])

    def _add_flow(self, index: int) -> None:
        """Constraints of one flow: (4a), (7) and (8).

        Targets start after the source's end plus the transfer between the two devices; each side of a device carries one
        transfer at a time.
        """
        flow = self._problem.flows[index]
        channels = [(a, b) for a in self._on[flow.source] for b in self._devices if a != b]
        busy = {(a, b): round(flow.seconds[a][b]) for a, b in channels}
        delay = {(a, b): busy[a, b] + round(self._problem.latency[a][b]) for a, b in channels}
        contends = self._problem.congestion and any(busy.values())
        if contends and len(flow.targets) == 1:
            self._add_unicast(index, busy, delay)
            return
        for target in flow.targets:
            pairs = self._channel_variables(flow.source, target) if any(delay.values()) else {}
            transfer_delay = sum(delay[a, b] * used for (a, b), used in pairs.items() if a != b)
            self.model.add(self._starts[target] >= self._ends[flow.source] + transfer_delay)
        if contends:
            self._add_multicast(index, busy, delay)

    def _add_unicast(
        self, index: int, busy: Mapping[tuple[int, int], int], delay: Mapping[tuple[int, int], int]
    ) -> None:
        flow = self._problem.flows[index]
        target, start = flow.targets[0], self._new_time()
        pairs = {
            channel: used
            for channel, used in self._channel_variables(flow.source, target).items()
            if channel[0] != channel[1]
        }
        self.model.add(start >= self._ends[flow.source])
        self.model.add(self._starts[target] >= start + sum(delay[channel] * used for channel, used in pairs.items()))
        for (a, b), used in pairs.items():
            self._sends[Send(index, b)] = start
            self._add_channel_use(index, a, b, _ResourceUse(start, busy[a, b], used), [target])

    def _add_multicast(
        self, index: int, busy: Mapping[tuple[int, int], int], delay: Mapping[tuple[int, int], int]
    ) -> None:
        """A flow with several targets is sent once to each device that runs one of them."""
        flow, model = self._problem.flows[index], self.model
        for b in self._devices:
            targets = [target for target in flow.targets if b in self._on[target]]
            sources = [a for a in self._on[flow.source] if a != b]
            if not targets or not sources:
                continue
            start = self._sends[Send(index, b)] = self._new_time()
            model.add(start >= self._ends[flow.source])
            for a in sources:
                used = self._channel_used[Send(index, b), a] = model.new_bool_var("")
                model.add_implication(used, self._on[flow.source][a])
                self._add_channel_use(index, a, b, _ResourceUse(start, busy[a, b], used), targets)
                for target in targets:
                    pair = self._channel_variables(flow.source, target)[a, b]
                    model.add_implication(pair, used)
                    model.add(self._starts[target] >= start + delay[a, b]).only_enforce_if(pair)

    def _add_channel_use(self, index: int, a: int, b: int, use: _ResourceUse, targets: Sequence[int]) -> None:
        """Occupy both sides of a channel for one transfer, and the media that it crosses, unless it takes no time."""
        if use.ticks > 0:
            head = self._earliest_ends[self._problem.flows[index].source][a]
            tail = min(self._problem.seconds[target][b] + self._remaining_times[target][b] for target in targets)
            use = use._replace(head=head, tail=self._problem.latency[a][b] + tail)
            self._uses["send", a].append(use)
            self._uses["receive", b].append(use)
            for medium in self._problem.media_crossed(a, b):
                self._uses["medium", medium].append(use)

    def _add_no_overlap(self, uses: Sequence[_ResourceUse], makespan: cp_model.IntVar) -> None:
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

    def _channel_variables(self, source: int, target: int) -> dict[tuple[int, int], cp_model.IntVar]:
        """By the devices of both ends, whether both run there: products, linearised by sums (a transportation polytope)."""
        if (source, target) in self._channels:
            return self._channels[source, target]
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
        self._channels[source, target] = pairs
        return pairs

    def hint(self, known: Schedule) -> None:
        """Start from a schedule of this problem, in ticks."""
        known = in_order_of_first_use(known, self._classes)
        add, assignment = self.model.add_hint, known.assignment
        for (i, device), used in self._used.items():
            add(used, int(device in assignment[: i + 1]))
        for i, on in enumerate(self._on):
            add(self._starts[i], round(known.starts[i]))
            add(self._ends[i], round(known.ends[i]))
            if len(on) > 1:
                for k, here in on.items():
                    add(here, int(assignment[i] == k))
        for (source, target), pairs in self._channels.items():
            if len(self._on[source]) > 1 and len(self._on[target]) > 1:
                for (a, b), pair in pairs.items():
                    add(pair, int((assignment[source], assignment[target]) == (a, b)))
        when = {Send(each.flow, each.device): each for each in known.transfers}
        hinted: set[int] = set()
        for send in [*when, *self._sends]:  # for a flow with one target, all devices share one variable
            variable = self._sends.get(send)
            if variable is not None and variable.index not in hinted:
                hinted.add(variable.index)
                source = self._problem.flows[send.flow].source
                add(variable, round(when[send].start if send in when else known.ends[source]))
        for (send, a), used in self._channel_used.items():
            add(used, int(send in when and when[send].source == a))

    def read(self, solver: cp_model.CpSolver) -> Schedule:
        """The solution as a schedule in which everything starts as early as the order allows."""
        problem = self._problem
        assignment = [next(k for k, here in on.items() if solver.boolean_value(here)) for on in self._on]
        items: list[tuple[float, float, int, Item]] = []
        for i in range(problem.num_operators):
            items.append((solver.value(self._starts[i]), solver.value(self._ends[i]), i, i))
        for send, start in self._sends.items():
            source = problem.flows[send.flow].source
            begin = solver.value(start)
            items.append(
                (begin, begin + problem.flows[send.flow].seconds[assignment[source]][send.device], source, send)
            )
        return schedule(problem, assignment, sorted_by_start(items), in_order=True)
