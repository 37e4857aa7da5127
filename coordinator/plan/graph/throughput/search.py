"""Decide whether a pipeline exists in which no part takes longer than beta. Exact, within a limit of work. Pure.

At a given beta every stage and every link is either fast enough or not, so a pipeline is a path from position 0 to position
N of the chain (a position is a cut, or an end) that visits no device twice. Walks, which may repeat devices, are found by
dynamic programming over positions, with the possible devices as a bit mask. If the resulting walk repeats a device, that
device becomes critical: from then on states record whether it was used. This is repeated until a walk repeats no device, or
there is no walk (decremental state-space relaxation, Righini and Salani 2008). Devices that are interchangeable at this
beta (twins) are used in a fixed order, so states only need to count them.

A stage that begins later on the same device can extend at least as far. A state is therefore not copied to every position
at which its stage may end; it stores the last of these positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.plan.graph.bits import set_bits
from coordinator.plan.graph.throughput.k_path import AdjacencyMasks, Links, depth_first_search, successors_of
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stages, stages_from
from coordinator.plan.solution import Stop

# A pipeline that is easy to find takes few steps; it must cost less than a dynamic program.
_MAX_DEPTH_FIRST_STEPS = 300
_MAX_STATES = 30_000  # of one dynamic program, all positions together: bounds the time and memory of a decision
_BEAM_WIDTH = 100  # states kept per position in the heuristic search, so that it costs far less than `_MAX_STATES`
# Critical groups of twins; with up to this many there are few states, so that the exact search needs no beam search first.
_MAX_CRITICAL_WITHOUT_BEAM = 8

_DeviceLimits = list[tuple[int, int]]  # (position, mask of devices), masks disjoint
_Ranking = Callable[[int], float]  # mask of used devices -> rank; lower is better


class SearchLimitReached(Exception):
    """The search reached its limit of work without a decision."""


class FeasibilityProblem:
    """The decision problem for one beta, in seconds."""

    def __init__(self, limits: StageLimits, beta: float) -> None:
        problem = limits.problem
        self._n = problem.num_blocks
        self._all = limits.links.devices
        self._links = limits.links
        levels = [limits.links.slowest_threshold_within(size, beta) for size in problem.boundary_bytes]
        self._levels = sorted(set(levels) - {-1})
        # By position, the graph of links that are fast enough for the cut there; cuts without such links are left out.
        self._graphs = {
            cut + 1: self._links.graph_at_threshold(level) for cut, level in enumerate(levels) if level >= 0
        }
        self._positions = [0, *self._graphs]
        self._limits = limits.stage_limits(self._positions, beta)
        self._device_fractions = limits.device_fractions(beta)
        # By position, the devices with a walk to the end if their stage ends there.
        self._reaches_end, startable = self._walks_to_end()
        # Whether there is a walk. If not, there is no pipeline either.
        self.has_walk = startable != 0

    def find_pipeline(self, critical: set[int], stop: Stop) -> Stages | None:
        """A pipeline, or None if there is none. Newly found critical devices are added to the set, for the next decision.

        Raises SearchLimitReached.
        """
        if not self.has_walk:
            return None
        twins = self._twins()
        # Look for a pipeline heuristically before spending much on a proof that there is none.
        tried_depth_first = tried_beam = False
        while True:
            tracked = sum(1 << each for each in critical)
            tracked = sum(twin for twin in twins if twin & tracked)
            if not tried_beam and sum(twin & tracked != 0 for twin in twins) > _MAX_CRITICAL_WITHOUT_BEAM:
                tried_beam = True
                for ranking in (int.bit_count, self._used_fraction):
                    if (found := self._find_walk(self._all, twins, stop, ranking)) is not None:
                        return found
            walk = self._find_walk(tracked, twins, stop)
            if walk is None:
                return None
            devices = [stage.device for stage in walk]
            repeated = {device for device in devices if devices.count(device) > 1}
            if not repeated:
                return walk
            critical |= repeated
            if not tried_depth_first and (found := self._depth_first(_MAX_DEPTH_FIRST_STEPS, stop)) is not None:
                return found
            tried_depth_first = True

    # ---- walks that may repeat devices ---------------------------------------------------------------------------------

    def _walks_to_end(self) -> tuple[dict[int, int], int]:
        back, startable = {self._n: self._all}, 0
        # By device, the next position with a walk to the end; nearest last.
        nearest: _DeviceLimits = [(self._n, self._all)]
        for position in reversed(self._positions):
            startable = 0
            for limit, mask in self._limits[position]:
                startable |= mask & sum(devices for end, devices in nearest if end <= limit)
            if position:
                graph = self._graphs[position]
                devices_onward = (
                    sum(1 << each for each in set_bits(self._all) if graph[each] & startable) if startable else 0
                )
                back[position] = devices_onward
                if devices_onward:
                    nearest = [
                        (end, devices & ~devices_onward) for end, devices in nearest if devices & ~devices_onward
                    ]
                    nearest.append((position, devices_onward))
        return back, startable

    # ---- depth-first search, for a quick positive answer ---------------------------------------------------------------

    def _depth_first(self, steps: int, stop: Stop) -> Stages | None:
        def ways_on(path: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
            if stop():
                return iter(())
            end, device = path[-1] if path else (0, None)
            return self._next_stages(end, device, sum(1 << each for _, each in path))

        path = depth_first_search(ways_on, lambda path: path[-1][0] == self._n, steps)
        return _to_stages(path) if path else None

    def _next_stages(self, position: int, device: int | None, used: int) -> Iterator[tuple[int, int]]:
        """The next stages, longest first; for one length, devices with the fewest successors first."""
        ahead = (self._all if device is None else self._graphs[position][device]) & ~used
        for end in (self._n, *reversed(self._graphs)):
            if end <= position:
                return
            fits = sum(mask for limit, mask in self._limits[position] if limit >= end)
            possible = ahead & fits & self._reaches_end[end]
            if not possible:
                continue
            if end == self._n:
                yield end, next(set_bits(possible))
                continue
            graph = self._graphs[end]
            ranked = [((graph[each] & ~used).bit_count(), each) for each in set_bits(possible)]
            for _, each in sorted(pair for pair in ranked if pair[0]):
                yield end, each

    # ---- exact search --------------------------------------------------------------------------------------------------

    def _find_walk(
        self, tracked: int, twins: Sequence[int], stop: Stop, ranking: _Ranking | None = None
    ) -> Stages | None:
        """A walk that visits no tracked device twice, but may repeat others; None if there is none. Raises SearchLimitReached.

        With a ranking of used devices, only the best states are kept at each position (beam search): then None proves
        nothing.
        """
        groups = [twin for twin in twins if twin & tracked]
        # By tracked devices used: the last position at which the stage on each device may end. Past ones are dropped.
        active: dict[int, _DeviceLimits] = {}
        states_at: dict[int, dict[int, int]] = {}  # [position][tracked devices used]: devices whose stage may end there
        num_states = 0
        for position in self._positions:
            states = self._states_at(position, active, ranking) if position else {0: 0}
            states_at[position] = states
            num_states += len(states)
            if (ranking is None and num_states > _MAX_STATES) or stop():
                raise SearchLimitReached
            for used, devices in states.items():
                ahead = (successors_of(self._graphs[position], devices) if position else self._all) & ~used
                free = ahead & ~tracked
                chosen = [bit for bit in _first_unused(groups, used) if bit & ahead]
                for limit, mask in self._limits[position]:
                    if free & mask:
                        _record_limit(active, used, limit, free & mask)
                    for bit in chosen:
                        if bit & mask:
                            _record_limit(active, used | bit, limit, bit)
        done = ((used, mask) for used, parts in active.items() for until, mask in parts if until >= self._n)
        last = next(done, None)
        return self._reconstruct(states_at, tracked, *last) if last else None

    def _states_at(self, position: int, active: dict[int, _DeviceLimits], ranking: _Ranking | None) -> dict[int, int]:
        found = []
        for used, parts in list(active.items()):
            if parts[0][0] < position:
                parts = active[used] = [part for part in parts if part[0] >= position]
                if not parts:
                    del active[used]
                    continue
            devices = sum(mask for _, mask in parts) & self._reaches_end[position]
            if devices:
                found.append((used, devices))
        found.sort(key=lambda state: (ranking or int.bit_count)(state[0]))
        return _undominated(found if ranking is None else found[:_BEAM_WIDTH])

    def _used_fraction(self, used: int) -> float:
        """Estimate of the fraction of the model that the used devices could have held."""
        return sum(self._device_fractions[each] for each in set_bits(used))

    def _reconstruct(self, states_at: dict[int, dict[int, int]], tracked: int, used: int, devices: int) -> Stages:
        path: list[tuple[int, int]] = []
        position, seen = self._n, 0
        while position:
            # Prefer devices that the walk does not contain yet: fewer walks with repetitions result.
            device = next(set_bits(devices & ~seen or devices))
            path.append((position, device))
            seen |= 1 << device
            used &= ~(1 << device & tracked)
            position, devices = self._predecessor(states_at, position, device, used, seen)
        return _to_stages(path[::-1])

    def _predecessor(
        self, states_at: dict[int, dict[int, int]], end: int, device: int, used: int, seen: int
    ) -> tuple[int, int]:
        """The position at which this device's stage began, and the devices that the stage before may have."""
        found = []
        for position, states in states_at.items():
            if position >= end:
                break
            if used in states and any(mask >> device & 1 and limit >= end for limit, mask in self._limits[position]):
                if position == 0:
                    return 0, 0
                graph = self._graphs[position]
                before = sum(1 << each for each in set_bits(states[used]) if graph[each] >> device & 1)
                if before & ~seen:
                    return position, before
                if before:
                    found.append((position, before))
        return found[0]

    def _twins(self) -> list[int]:
        """Groups of interchangeable devices, as masks: those with the same links and the same stages at this beta."""
        keys: list[list[object]] = [[] for _ in range(self._all.bit_length())]
        for level in self._levels:
            out = self._links.graph_at_threshold(level)
            for device, key in zip(set_bits(self._all), _twin_keys(out, self._all), strict=True):
                keys[device].append(key)
        for position, parts in self._limits.items():
            for limit, mask in parts if len(parts) > 1 or parts[0][1] != self._all else ():
                for device in set_bits(mask):
                    keys[device].append((position, limit))
        groups: dict[tuple[object, ...], int] = {}
        for device in set_bits(self._all):
            key = tuple(keys[device])
            groups[key] = groups.get(key, 0) | 1 << device
        return list(groups.values())


class StageLimits:
    """The longest stages and the usable links of one problem, for any beta. Shared by its decisions."""

    def __init__(self, problem: PipelineProblem) -> None:
        self.problem = problem
        self.links = Links(problem, range(problem.num_devices))
        n, budgets = problem.num_blocks, np.array(problem.memory_bytes)
        # [N, K]: the end of the longest stage from each position, limited by memory alone.
        self._memory_limits: NDArray[np.int64] = np.array(
            [first + np.searchsorted(problem.stage_bytes[first, first:], budgets, side="right") for first in range(n)]
        )
        self._has_compute = bool(problem.seconds.any())
        self._cached_limits: dict[tuple[int, bytes], _DeviceLimits] = {}

    def stage_limits(self, positions: Sequence[int], beta: float) -> dict[int, _DeviceLimits]:
        """By position, the last ones at which a stage from there may end, each with its devices; farthest first."""
        limits = self._memory_limits
        if self._has_compute:
            limits = np.minimum(limits, self._ends_within(beta))
        return {first: self._by_limit(first, limits[first]) for first in positions}

    def _ends_within(self, beta: float) -> NDArray[np.int64]:
        """[N, K]: the last position at which a stage from each one ends in time."""
        elapsed, n = self.problem.cumulative_seconds, self.problem.num_blocks
        ends = np.stack([np.searchsorted(column, column[:-1] + beta, "right") - 1 for column in elapsed.T], axis=1)
        firsts, devices = np.arange(n)[:, None], np.arange(elapsed.shape[1])
        while True:  # the sum was rounded; the difference of both times decides
            late = (ends > firsts) & (elapsed[ends, devices] - elapsed[:-1] > beta)
            after = np.minimum(ends + 1, n)
            early = (ends < n) & (elapsed[after, devices] - elapsed[:-1] <= beta)
            if not late.any() and not early.any():
                return ends
            ends = np.where(early, after, ends - late)

    def _by_limit(self, first: int, limits: NDArray[np.int64]) -> _DeviceLimits:
        key = (first, limits.tobytes())
        if key not in self._cached_limits:
            self._cached_limits[key] = [
                (limit, sum(1 << device for device in np.flatnonzero(limits == limit).tolist()))
                for limit in sorted(set(limits.tolist()), reverse=True)
                if limit > first
            ] or [(first, 0)]
        return self._cached_limits[key]

    def device_fractions(self, beta: float) -> list[float]:
        """[K]: estimate of the fraction of the model that each device could take, by memory and by time."""
        whole = max(int(self.problem.stage_bytes[0, -1]), 1)
        by_memory = [budget / whole for budget in self.problem.memory_bytes]
        if not self._has_compute:
            return by_memory
        times = self.problem.cumulative_seconds[-1].tolist()
        return [min(share, beta / max(time, 1e-30)) for share, time in zip(by_memory, times, strict=True)]


def _to_stages(path: Sequence[tuple[int, int]]) -> Stages:
    return stages_from([end - 1 for end, _ in path], [device for _, device in path])


def _record_limit(active: dict[int, _DeviceLimits], used: int, limit: int, mask: int) -> None:
    """Record that stages of these devices may end as late as `limit`; entries stay sorted by limit."""
    parts = active.get(used)
    if parts is None:
        active[used] = [(limit, mask)]
        return
    kept: _DeviceLimits = []
    for until, devices in parts:
        if until >= limit:
            mask &= ~devices
        elif devices & mask:
            devices &= ~mask
        if devices:
            kept.append((until, devices))
    if mask:
        kept.append((limit, mask))
        kept.sort()
    active[used] = kept


def _first_unused(groups: Sequence[int], used: int) -> list[int]:
    """The lowest unused bit of each group."""
    left = [group & ~used for group in groups]
    return [mask & -mask for mask in left if mask]


def _undominated(states: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Remove devices that an earlier state reaches with a subset of the used devices."""
    kept: dict[int, int] = {}
    for used, devices in states:
        for fewer, reached in kept.items():
            if fewer & ~used == 0:
                devices &= ~reached
                if not devices:
                    break
        if devices:
            kept[used] = devices
    return kept


def _twin_keys(out: AdjacencyMasks, devices: int) -> list[object]:
    """A key per device: equal for two devices that can be swapped without changing the graph, linked or not."""
    into = [0] * len(out)
    for sender in set_bits(devices):
        for receiver in set_bits(out[sender]):
            into[receiver] |= 1 << sender
    closed = {each: (out[each] | 1 << each, into[each] | 1 << each) for each in set_bits(devices)}
    count = Counter(closed.values())
    return [
        (True, *closed[each]) if count[closed[each]] > 1 else (False, out[each], into[each])
        for each in set_bits(devices)
    ]
