"""The placement problem: assign each operator of a graph to a device so that one request ends soonest. Pure.

The model of Moirai (arXiv 2312.04025, III-D): operator i takes p_ik on device k and m_i of its memory; a data flow takes
p^comm_qk'k'' from device k' to k''. One refinement: a tensor with several consumers on one device is sent to that device
once. In the paper's own instances every edge is a separate flow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hearth.plan.graph_spec import GraphSpec

FloatTable = tuple[tuple[float, ...], ...]
_MAX_DIGITS = 6  # decimals of a time that are kept exactly: whole microseconds, if times are in seconds
# Ticks of the whole graph on the fastest device, where times are rounded: one tick is 1 part in 67 million.
_ROUNDED_TICKS = 1 << 26
_MAX_TOTAL_TICKS = 1 << 40  # of the whole graph on one device: sums of ticks stay exact as floats, which are up to 2^53
ROUNDING_TICKS = 1e-6  # a float this close to a whole number of ticks means that number


class Flow(NamedTuple):
    """An output of an operator and its consumers. It is sent once to each other device that runs a target.

    The transfer keeps the channel from device a to b busy for `seconds[a][b]`; the diagonal is 0.
    """

    source: int
    targets: tuple[int, ...]
    seconds: FloatTable


class SharedWeights(NamedTuple):
    """Weights that several operators use; each device that runs one of these operators holds them once."""

    num_bytes: int
    operators: tuple[int, ...]


@dataclass(frozen=True)
class PlacementProblem:
    """n operators in topological order, K devices. Times are in seconds, or in the unit of the file they come from.

    With `congestion`, a device sends one transfer at a time and receives one at a time; without, transfers do not
    contend. A tensor arrives `latency[a][b]` after its transfer; the latency occupies no resource. Values are not
    validated here: files are checked where they are read.
    """

    name: str
    operators: tuple[str, ...]
    devices: tuple[str, ...]
    seconds: FloatTable  # [n][K]
    memory_bytes: tuple[int, ...]  # [n], without shared weights
    budget_bytes: tuple[int, ...]  # [K]
    flows: tuple[Flow, ...]
    latency: FloatTable  # [K][K], diagonal 0
    congestion: bool = True
    shared: tuple[SharedWeights, ...] = ()
    # Operators that can run in parallel: the tiles of one operator, or its formations. An operator in none stands alone.
    groups: tuple[tuple[int, ...], ...] = ()
    # An assignment within the budgets, for which list schedulers keep room. Empty: none is known.
    fitting: tuple[int, ...] = ()
    # [K][K]: the numbers of the shared media that a transfer crosses; empty: every link has its own.
    media: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def media_crossed(self, source: int, target: int) -> tuple[int, ...]:
        """The numbers of the shared media that a transfer between two devices crosses."""
        return self.media[source][target] if self.media else ()

    @property
    def num_operators(self) -> int:
        return len(self.operators)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @cached_property
    def incoming(self) -> tuple[tuple[int, ...], ...]:
        """By operator, the indices of the flows that it consumes."""
        found: list[list[int]] = [[] for _ in self.operators]
        for index, flow in enumerate(self.flows):
            for target in flow.targets:
                found[target].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def outgoing(self) -> tuple[tuple[int, ...], ...]:
        """By operator, the indices of the flows that it produces."""
        found: list[list[int]] = [[] for _ in self.operators]
        for index, flow in enumerate(self.flows):
            found[flow.source].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted({self.flows[f].source for f in flows})) for flows in self.incoming)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted({t for f in flows for t in self.flows[f].targets})) for flows in self.outgoing)

    def contends(self, flow: int) -> bool:
        """Whether transfers of the flow keep channels busy."""
        return self.congestion and any(map(any, self.flows[flow].seconds))

    def used_bytes(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """Bytes that each device holds."""
        used = [0] * self.num_devices
        for operator, device in enumerate(assignment):
            used[device] += self.memory_bytes[operator]
        for group in self.shared:
            for device in {assignment[operator] for operator in group.operators}:
                used[device] += group.num_bytes
        return tuple(used)

    def overflow_bytes(self, assignment: Sequence[int]) -> int:
        """Total bytes by which devices exceed their budgets; 0 when the assignment fits."""
        held = self.used_bytes(assignment)
        return sum(max(0, used - budget) for used, budget in zip(held, self.budget_bytes, strict=True))


def placement_problem(
    spec: GraphSpec,
    seconds: Sequence[Sequence[float]],
    memory_bytes: Sequence[int],
    bytes_per_second: Sequence[Sequence[float]],
    latency_seconds: Sequence[Sequence[float]],
    congestion: bool = True,
    cpu_seconds: Callable[[int, int], float] = lambda device, num_bytes: 0.0,
    media: tuple[tuple[tuple[int, ...], ...], ...] = (),
) -> PlacementProblem:
    """The problem of a graph on devices that run operator i in `seconds[i][k]` and have `memory_bytes[k]` for weights.

    An operator's memory is that of its weights; subtract the memory for activations and the runtime from the budgets
    first. The graph's inputs are assumed to be on the devices that use them, and its outputs stay where they are
    produced. Diagonals of the link matrices are ignored. `cpu_seconds(k, num_bytes)` of each end of a transfer keep its
    channel busy, too: a device that encrypts or decrypts does not send or receive the next tensor meanwhile.
    """
    ranks = range(len(memory_bytes))
    users: list[list[int]] = [[] for _ in spec.parameters]
    for index, operator in enumerate(spec.operators):
        for used in set(operator.parameters):
            users[used].append(index)
    own, shared = [0] * spec.num_operators, []
    for parameter, operators in zip(spec.parameters, users, strict=True):
        if len(operators) == 1:
            own[operators[0]] += parameter.num_bytes
        elif operators:
            shared.append(SharedWeights(parameter.num_bytes, tuple(operators)))
    groups: dict[str, list[int]] = {}
    for index, operator in enumerate(spec.operators):
        if operator.group:
            groups.setdefault(operator.group, []).append(index)
    matrices: dict[int, FloatTable] = {}

    def times(num_bytes: int) -> FloatTable:
        if num_bytes not in matrices:
            cpu = [cpu_seconds(device, num_bytes) for device in ranks]
            matrices[num_bytes] = tuple(
                tuple(0.0 if a == b else num_bytes / bytes_per_second[a][b] + cpu[a] + cpu[b] for b in ranks)
                for a in ranks
            )
        return matrices[num_bytes]

    return PlacementProblem(
        name=spec.name,
        operators=tuple(operator.name for operator in spec.operators),
        devices=tuple(f"device{k}" for k in ranks),
        seconds=tuple(tuple(map(float, row)) for row in seconds),
        memory_bytes=tuple(own),
        budget_bytes=tuple(memory_bytes),
        flows=tuple(
            Flow(tensor.source, tuple(sorted(set(tensor.consumers))), times(tensor.num_bytes))
            for tensor in spec.tensors
            if tensor.source is not None and tensor.consumers
        ),
        latency=tuple(tuple(0.0 if a == b else float(latency_seconds[a][b]) for b in ranks) for a in ranks),
        congestion=congestion,
        shared=tuple(shared),
        groups=tuple(map(tuple, groups.values())),
        media=media,
    )


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

    return with_times(problem, ticks), per_unit


def with_times(problem: PlacementProblem, change: Callable[[FloatTable], FloatTable]) -> PlacementProblem:
    """The problem with changed times: of operators, of transfers, and of latencies."""
    known = {seconds: change(seconds) for seconds in {flow.seconds for flow in problem.flows}}
    flows = tuple(flow._replace(seconds=known[flow.seconds]) for flow in problem.flows)
    return replace(problem, seconds=change(problem.seconds), latency=change(problem.latency), flows=flows)
