"""Is there a pipeline no part of which takes longer than beta? Decided exactly where the work stays within a limit. Pure.

At a given beta every stage and every link is either good enough or not, so a pipeline is a way from position 0 to position
N of the chain (a position is a cut, or an end) that visits no device twice. Ways that may visit devices again are found by
dynamic programming over positions, with the possible devices as a bit mask. Where the way that comes out has a device
twice, that device becomes critical: from then on states remember whether it was used. This goes on until a way has no
device twice, or there is none at all (decremental state-space relaxation, Righini and Salani 2008). Devices that nothing
tells apart at this beta (twins) are used in order, so that their states count them instead of naming them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.placement.k_path import Graph, neighbours, vertices
from coordinator.placement.links import Links
from coordinator.placement.pipeline_problem import PipelineProblem, Stage, Stages

_QUICK_STEPS = 300  # of the depth-first search before anything is proven
_MAX_STATES = 60_000  # of one dynamic programme
_Ends = list[tuple[int, int]]


class TooMuchWork(Exception):
    """The question stays open."""


class Decision:
    """One problem at one beta."""

    def __init__(self, reaches: Reaches, beta: float) -> None:
        problem = reaches.problem
        self._n = problem.num_blocks
        self._all = reaches.links.devices
        levels = [reaches.links.slowest_within(size, beta) for size in problem.boundary_bytes]
        self._graphs = {
            cut + 1: reaches.links.from_threshold(level) for cut, level in enumerate(levels) if level >= 0
        }  # by position: who can send to whom there
        self._levels = sorted(set(levels) - {-1})
        self._links = reaches.links
        self._ends = reaches.ends(beta, [*sorted(self._graphs), self._n])
        self._back = self._ways_to_the_end()

    @property
    def has_walk(self) -> bool:
        """Whether there is a way when devices may be used again. If not, there is no pipeline either."""
        return self._startable(0) != 0

    def pipeline(self, critical: set[int], stop: Callable[[], bool]) -> Stages | None:
        """A pipeline, or None: there is none. Devices found critical are added to the set, for the next question.

        Raises TooMuchWork.
        """
        if not self.has_walk:
            return None
        if (found := self._search(_QUICK_STEPS)) is not None:
            return found
        twins = self._twins()
        while True:
            tracked = sum(1 << each for each in critical)
            tracked = sum(twin for twin in twins if twin & tracked)
            walk = self._walk(tracked, twins, stop)
            if walk is None:
                return None
            seen: set[int] = set()
            twice: set[int] = set()
            for stage in walk:
                (twice if stage.device in seen else seen).add(stage.device)
            if not twice:
                return walk
            critical |= twice

    # ---- without memory of what was used -----------------------------------------------------------------------------

    def _ways_to_the_end(self) -> list[int]:
        """By position, the devices from which there is a way on when their stage ends there."""
        self._back = [0] * self._n + [self._all]
        for position in sorted(self._graphs, reverse=True):
            ahead = self._startable(position)
            if ahead:
                graph = self._graphs[position]
                self._back[position] = sum(1 << each for each in vertices(self._all) if graph[each] & ahead)
        return self._back

    def _startable(self, position: int) -> int:
        found = 0
        for end, mask in self._ends[position]:
            found |= mask & self._back[end]
        return found

    # ---- depth first, for a quick yes ----------------------------------------------------------------------------------

    def _search(self, steps: int) -> Stages | None:
        path: list[tuple[int, int]] = []  # (end, device)
        used = 0
        todo = [self._choices(0, None, 0)]
        while todo and steps:
            step = next(todo[-1], None)
            if step is None:
                todo.pop()
                if path:
                    used ^= 1 << path.pop()[1]
                continue
            steps -= 1
            path.append(step)
            if step[0] == self._n:
                return _as_stages(path)
            used |= 1 << step[1]
            todo.append(self._choices(*step, used))
        return None

    def _choices(self, position: int, device: int | None, used: int) -> Iterator[tuple[int, int]]:
        """Long stages first; of the devices for one, those with the fewest ways on from there."""
        ahead = self._all if device is None else self._graphs[position][device]
        ahead &= ~used
        if not ahead:
            return
        for end, mask in reversed(self._ends[position]):
            possible = ahead & mask & self._back[end]
            if not possible:
                continue
            if end == self._n:
                yield end, next(vertices(possible))
                continue
            graph = self._graphs[end]
            ranked = [((graph[each] & ~used).bit_count(), each) for each in vertices(possible)]
            for _, each in sorted(pair for pair in ranked if pair[0]):
                yield end, each

    # ---- exactly -------------------------------------------------------------------------------------------------------

    def _walk(self, tracked: int, twins: Sequence[int], stop: Callable[[], bool]) -> Stages | None:
        """A way that visits no tracked device twice; others it may. None: there is none. Raises TooMuchWork."""
        groups = [twin for twin in twins if twin & tracked]
        # reach[position]: {tracked devices used: devices whose stage may end there}
        reach: list[dict[int, int]] = [{} for _ in range(self._n + 1)]
        num_states = 0
        for position in [0, *sorted(self._graphs)]:
            states = {0: 0} if position == 0 else _undominated(reach[position])
            reach[position] = states
            num_states += len(states)
            if num_states > _MAX_STATES or stop():
                raise TooMuchWork
            for used, devices in states.items():
                ahead = (neighbours(self._graphs[position], devices) if position else self._all) & ~used
                free = ahead & ~tracked
                chosen = [(used | bit, bit) for bit in _first_unused(groups, used) if bit & ahead]
                if not free and not chosen:
                    continue
                for end, mask in self._ends[position]:
                    mask &= self._back[end]
                    target = reach[end]
                    if free & mask:
                        target[used] = target.get(used, 0) | free & mask
                    for after, bit in chosen:
                        if bit & mask:
                            target[after] = target.get(after, 0) | bit
        return self._walk_back(reach, tracked) if reach[self._n] else None

    def _walk_back(self, reach: Sequence[dict[int, int]], tracked: int) -> Stages:
        path: list[tuple[int, int]] = []
        used, devices = next(iter(reach[self._n].items()))
        end, seen = self._n, 0
        while True:
            # A device that the way has not yet is better: fewer ways with repetitions come out.
            device = next(vertices(devices & ~seen or devices))
            path.append((end, device))
            seen |= 1 << device
            used &= ~(1 << device & tracked)
            position, devices = self._came_from(reach, end, device, used, seen)
            if position == 0:
                return _as_stages(path[::-1])
            end = position

    def _came_from(
        self, reach: Sequence[dict[int, int]], end: int, device: int, used: int, seen: int
    ) -> tuple[int, int]:
        """The position at which the stage of this device began, and the devices that may have come before."""
        fallback = None
        for position in [0, *sorted(self._graphs)]:
            if position >= end or used not in reach[position]:
                continue
            if not any(each == end and mask >> device & 1 for each, mask in self._ends[position]):
                continue
            if position == 0:
                return 0, 0
            graph = self._graphs[position]
            before = sum(1 << each for each in vertices(reach[position][used]) if graph[each] >> device & 1)
            if before & ~seen:
                return position, before
            if before:
                fallback = position, before
        assert fallback is not None
        return fallback

    def _twins(self) -> list[int]:
        """Devices as masks of those that are the same in every link and every stage at this beta."""
        outs = [self._links.from_threshold(level) for level in self._levels]
        keys: list[list[object]] = [[] for _ in range(self._all.bit_length())]
        for out in outs:
            into = _reversed(out, self._all)
            for device, key in zip(vertices(self._all), _alike(out, into, self._all), strict=True):
                keys[device].append(key)
        for position, ends in enumerate(self._ends):
            reached = dict.fromkeys(vertices(self._all), 0)
            previous = self._all
            for end, mask in ends:  # masks shrink towards later ends
                for device in vertices(previous & ~mask):
                    keys[device].append((position, reached[device]))
                for device in vertices(mask):
                    reached[device] = end
                previous = mask
        groups: dict[tuple[object, ...], int] = {}
        for device in vertices(self._all):
            key = tuple(keys[device])
            groups[key] = groups.get(key, 0) | 1 << device
        return list(groups.values())


class Reaches:
    """How far stages go, and over which links, of one problem at any beta."""

    def __init__(self, problem: PipelineProblem) -> None:
        self.problem = problem
        self.links = Links(problem, range(problem.num_devices))
        n, budgets = problem.num_blocks, np.array(problem.memory_bytes)
        # [N, K]: one more than the last block of the longest stage from each, by memory alone.
        self._by_memory: NDArray[np.int64] = np.array(
            [first + np.searchsorted(problem.stage_bytes[first, first:], budgets, side="right") for first in range(n)]
        )
        self._computes = bool(problem.seconds.any())
        self._groups: dict[bytes, list[tuple[int, int]]] = {}

    def ends(self, beta: float, usable: Sequence[int]) -> list[_Ends]:
        """By first block, the positions where a stage from there may end, in order, each with the devices for it."""
        found: list[_Ends] = []
        starts = {0, *usable}
        for first in range(self.problem.num_blocks):
            if first not in starts:
                found.append([])
                continue
            groups = self._group(self._last_ends(first, beta))
            ends: _Ends = []
            later = [end for end in usable if end > first]
            for end in later:
                mask = next((mask for limit, mask in groups if limit >= end), 0)
                if not mask:
                    break
                ends.append((end, mask))
            found.append(ends)
        return found

    def _last_ends(self, first: int, beta: float) -> NDArray[np.int64]:
        by_memory: NDArray[np.int64] = self._by_memory[first]
        if not self._computes:
            return by_memory
        elapsed = self.problem.elapsed
        by_time: NDArray[np.int64] = first + ((elapsed[first + 1 :] - elapsed[first]) <= beta).sum(axis=0)
        ends: NDArray[np.int64] = np.minimum(by_memory, by_time)
        return ends

    def _group(self, limits: NDArray[np.int64]) -> list[tuple[int, int]]:
        """(limit, devices that reach at least that far), by growing limit."""
        key = limits.tobytes()
        if key not in self._groups:
            mask, groups = 0, []
            for limit in sorted(set(limits.tolist()), reverse=True):
                mask |= sum(1 << int(device) for device in np.flatnonzero(limits == limit))
                groups.append((limit, mask))
            self._groups[key] = groups[::-1]
        return self._groups[key]


def _as_stages(path: Sequence[tuple[int, int]]) -> Stages:
    firsts = [0, *(end for end, _ in path[:-1])]
    return tuple(Stage(first, end - 1, device) for first, (end, device) in zip(firsts, path, strict=True))


def _first_unused(groups: Sequence[int], used: int) -> list[int]:
    """The lowest bit of each group that is not used yet."""
    left = [group & ~used for group in groups]
    return [mask & -mask for mask in left if mask]


def _undominated(states: dict[int, int]) -> dict[int, int]:
    """Without devices that are reached with fewer used devices as well."""
    kept: dict[int, int] = {}
    for used in sorted(states, key=int.bit_count):
        devices = states[used]
        for fewer, reached in kept.items():
            if fewer & ~used == 0:
                devices &= ~reached
                if not devices:
                    break
        if devices:
            kept[used] = devices
    return kept


def _reversed(graph: Graph, devices: int) -> list[int]:
    found = [0] * len(graph)
    for sender in vertices(devices):
        for receiver in vertices(graph[sender]):
            found[receiver] |= 1 << sender
    return found


def _alike(out: Graph, into: Graph, devices: int) -> list[object]:
    """A key per device: equal for two that swap without changing the graph, be they linked with each other or not."""
    closed = {each: (out[each] | 1 << each, into[each] | 1 << each) for each in vertices(devices)}
    count: dict[tuple[int, int], int] = {}
    for key in closed.values():
        count[key] = count.get(key, 0) + 1
    return [
        (True, *closed[each]) if count[closed[each]] > 1 else (False, out[each], into[each])
        for each in vertices(devices)
    ]
