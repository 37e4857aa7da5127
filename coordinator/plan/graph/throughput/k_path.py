"""Find simple paths of k vertices by colour coding (Alon, Yuster and Zwick 1995), for the published planner. Pure.

Vertices get random colours. A path whose colours all differ visits no vertex twice, and dynamic programming over sets of
colours finds such paths. A path that is found is correct; the result "no path" is wrong with a bounded probability. Exact
tests come first: a short depth-first search for a path, and checks that a walk of this length and a component of this
size exist.

A graph is a list of bit masks: bit b of `graph[a]` is set if there is an edge from vertex a to vertex b. `Links` makes them
of the links of a problem that are fast enough.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations
from random import Random
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.plan.graph.bits import set_bits
from coordinator.plan.graph.throughput.problem import PipelineProblem

T = TypeVar("T")
AdjacencyMasks = Sequence[int]
_Words = NDArray[np.uint64]
_Tables = dict[tuple[int, ...], _Words]  # by set of colours

# Probability of missing a path that exists. A miss costs a step of the binary search, not correctness.
FAILURE_PROBABILITY = 0.01
# More colours than vertices of the path: good colourings become likelier, and the tables larger.
_COLOURS_PER_VERTEX = 1.3
# Table entries: 2^colours times trials, of 8 bytes or more each. Beyond this (`longest_coloured_path`) only the depth-first
# search looks for a path.
_MAX_TABLE_ENTRIES = 1 << 24
# Steps of the depth-first search, per vertex of the path: enough for a path that is easy to find; colour coding comes after it.
_STEPS_PER_VERTEX = 40


class Links:
    """The communication graph of some devices. `thresholds` are its distinct rates in bytes per second, fastest first."""

    def __init__(self, problem: PipelineProblem, devices: Sequence[int]) -> None:
        self.devices = sum(1 << device for device in devices)
        self._rates = problem.link_rates
        chosen = problem.link_rates[np.ix_(devices, devices)]
        self.thresholds: list[float] = sorted(set(chosen[chosen > 0].tolist()), reverse=True)
        self._graphs: dict[int, AdjacencyMasks] = {}

    def graph_at_threshold(self, index: int) -> AdjacencyMasks:
        """Links at least as fast as the threshold of this index; -1: no link at all."""
        if index not in self._graphs:
            fast = self._rates >= self.thresholds[index] if index >= 0 else np.zeros_like(self._rates, dtype=bool)
            rows = np.packbits(fast, axis=1, bitorder="little")
            self._graphs[index] = [int.from_bytes(row.tobytes(), "little") & self.devices for row in rows]
        return self._graphs[index]

    def slowest_threshold_within(self, num_bytes: float, seconds: float) -> int:
        """Index of the slowest threshold at which `num_bytes` take at most `seconds`; -1 if none is fast enough."""
        return bisect_right(self.thresholds, seconds, key=lambda rate: num_bytes / rate) - 1


def k_path(
    graph: AdjacencyMasks,
    allowed: int,
    k: int,
    start: int | None,
    end: int | None,
    rng: Random,
    failure_probability: float = FAILURE_PROBABILITY,
) -> tuple[int, ...] | None:
    """A simple path of k vertices out of `allowed` (a mask), from `start` to `end` where these are given.

    `start` and `end` need not be in `allowed`. Returns None if there is no path, or if it was missed: with at most
    `failure_probability` while the vertices between the given ends are at most `longest_coloured_path`, without such a
    limit beyond that.
    """
    ends = [each for each in (start, end) if each is not None]
    free = k - len(ends)
    allowed &= ~sum(1 << each for each in ends)
    if free < 0 or free > allowed.bit_count():
        return None
    if free == 0:
        path = tuple(ends)
        return path if all(graph[a] >> b & 1 for a, b in zip(path, path[1:], strict=False)) else None
    first = allowed if start is None else graph[start] & allowed
    last = allowed if end is None else allowed & sum(1 << each for each in set_bits(allowed) if graph[each] >> end & 1)
    for part in _components(graph, allowed):
        layers = _walk_layers(graph, part, free, first & part, last & part)
        if layers is None:
            continue
        found = _depth_first_path(graph, layers, _STEPS_PER_VERTEX * free)
        found = found or colour_coded_path(graph, layers, rng, failure_probability)
        if found is not None:
            return (*([] if start is None else [start]), *found, *([] if end is None else [end]))
    return None


def successors_of(graph: AdjacencyMasks, mask: int) -> int:
    """The mask of all successors of the vertices in `mask`."""
    reached = 0
    while mask:
        low = mask & -mask
        reached |= graph[low.bit_length() - 1]
        mask ^= low
    return reached


def colour_coded_path(
    graph: AdjacencyMasks, layers: Sequence[int], rng: Random, failure_probability: float
) -> tuple[int, ...] | None:
    """A simple path whose i-th vertex is in the mask `layers[i]`; None is wrong with at most `failure_probability`.

    Also returns None for more than `longest_coloured_path` vertices, whose tables would be too large.
    """
    k = len(layers)
    used = sorted({vertex for mask in layers for vertex in set_bits(mask)})
    if len(used) < k or k > longest_coloured_path(failure_probability):
        return None
    num_colours, trials = _num_colours(k), num_trials(k, failure_probability)
    place = {vertex: index for index, vertex in enumerate(used)}
    words = -(-len(used) // 64)
    colours = np.frombuffer(rng.randbytes(4 * trials * len(used)), dtype=np.uint32) % np.uint32(num_colours)
    of_colour = np.zeros((num_colours, trials, words), dtype=np.uint64)
    for index, column in enumerate(colours.reshape(trials, len(used)).T):
        of_colour[column, np.arange(trials), index // 64] |= np.uint64(1 << index % 64)
    reaches = _successor_table(graph, used, place, words)
    masks = [_to_words(sum(1 << place[vertex] for vertex in set_bits(mask)), words) for mask in layers]
    # tables[i][set of i + 1 colours] [trials, words]: the ends of paths of i + 1 vertices in exactly these colours.
    tables: list[_Tables] = [{(colour,): of_colour[colour] & masks[0] for colour in range(num_colours)}]
    for mask in masks[1:]:
        sets = list(combinations(range(num_colours), len(tables) + 1))
        ends = {key: _successor_masks(table, reaches) & mask for key, table in tables[-1].items()}
        grown: _Tables = {}
        for key in sets:
            grown[key] = np.bitwise_or.reduce(
                [ends[key[:i] + key[i + 1 :]] & of_colour[colour] for i, colour in enumerate(key)]
            )
        tables.append(grown)
    for key, table in tables[-1].items():
        hits = np.flatnonzero(table.any(axis=1))
        if hits.size:
            return _reconstruct(graph, tables, of_colour, key, int(hits[0]), used)
    return None


def num_trials(k: int, failure_probability: float) -> int:
    """Number of random colourings such that one of them gives the k vertices of a path different colours.

    With probability at least 1 - `failure_probability`.
    """
    num_colours = _num_colours(k)
    success = math.perm(num_colours, k) / num_colours**k
    return 1 if success >= 1 else math.ceil(math.log(failure_probability) / math.log1p(-success))


@cache
def longest_coloured_path(failure_probability: float = FAILURE_PROBABILITY) -> int:
    """The most vertices of a path that colour coding looks for: more would need more than `_MAX_TABLE_ENTRIES`."""
    k = 1
    while num_trials(k + 1, failure_probability) << _num_colours(k + 1) <= _MAX_TABLE_ENTRIES:
        k += 1
    return k


def _num_colours(k: int) -> int:
    return math.ceil(_COLOURS_PER_VERTEX * k)


# ---- exact tests ------------------------------------------------------------------------------------------------------


def _components(graph: AdjacencyMasks, allowed: int) -> Iterator[int]:
    """The weakly connected components, largest first."""
    joined = [graph[each] & allowed if allowed >> each & 1 else 0 for each in range(len(graph))]
    for vertex in set_bits(allowed):
        for other in set_bits(joined[vertex]):
            joined[other] |= 1 << vertex
    parts, left = [], allowed
    while left:
        part = grown = left & -left
        while grown:
            grown = successors_of(joined, grown) & ~part
            part |= grown
        parts.append(part)
        left &= ~part
    return iter(sorted(parts, key=lambda part: -part.bit_count()))


def _walk_layers(graph: AdjacencyMasks, allowed: int, k: int, first: int, last: int) -> list[int] | None:
    """By position, the vertices at that position of walks of k vertices from `first` to `last`.

    None if there is no walk, or if the walks have too few vertices for a path.
    """
    if allowed.bit_count() < k or not first or not last:
        return None
    layers = [first]
    for _ in range(k - 1):
        layers.append(successors_of(graph, layers[-1]) & allowed)
    layers[-1] &= last
    for index in range(k - 2, -1, -1):
        after = layers[index + 1]
        layers[index] = sum(1 << each for each in set_bits(layers[index]) if graph[each] & after)
    if not layers[0]:
        return None
    union = 0
    for mask in layers:
        union |= mask
    return layers if union.bit_count() >= k else None


def depth_first_search(
    choices: Callable[[Sequence[T]], Iterator[T]], is_done: Callable[[Sequence[T]], bool], steps: int
) -> list[T] | None:
    """Depth-first search: the first path for which `is_done`; None if there is none, or none was found in `steps` steps.

    `choices` gives the next elements of a path, best first.
    """
    path: list[T] = []
    todo = [choices(path)]
    while todo and steps:
        step = next(todo[-1], None)
        if step is None:
            todo.pop()
            del path[-1:]
            continue
        steps -= 1
        path.append(step)
        if is_done(path):
            return path
        todo.append(choices(path))
    return None


def _depth_first_path(graph: AdjacencyMasks, layers: Sequence[int], steps: int) -> tuple[int, ...] | None:
    """Depth-first search that tries vertices with the fewest successors first; gives up after `steps` steps."""

    def ways_on(path: Sequence[int]) -> Iterator[int]:
        used = sum(1 << each for each in path)
        ahead = layers[len(path)] & ~used & (graph[path[-1]] if path else -1)
        after = layers[len(path) + 1] & ~used if len(path) + 1 < len(layers) else 0
        ranked = sorted(((graph[each] & after & ~(1 << each)).bit_count(), each) for each in set_bits(ahead))
        return iter([each for ways, each in ranked if ways or not after])

    found = depth_first_search(ways_on, lambda path: len(path) == len(layers), steps)
    return tuple(found) if found else None


# ---- tables of bit masks, one for each trial ----------------------------------------------------------------------------


def _to_words(mask: int, words: int) -> _Words:
    return np.frombuffer(mask.to_bytes(8 * words, "little"), dtype="<u8").astype(np.uint64)


def _successor_table(
    graph: AdjacencyMasks, used: Sequence[int], place: dict[int, int], words: int
) -> NDArray[np.uint64]:
    """[bytes, 256, words]: for each byte of a mask and each value of it, the mask of the successors of its vertices."""
    onward = [
        _to_words(sum(1 << place[other] for other in set_bits(graph[vertex]) if other in place), words)
        for vertex in used
    ]
    table = np.zeros((8 * words, 256, words), dtype=np.uint64)
    for index, reach in enumerate(onward):
        values = np.arange(256) >> index % 8 & 1 == 1
        table[index // 8, values] |= reach
    return table


def _successor_masks(table: _Words, reaches: NDArray[np.uint64]) -> _Words:
    """[trials, words]: masks of vertices to the masks of their successors."""
    masks = np.zeros_like(table)
    for index, byte in enumerate(table.view(np.uint8).T):
        masks |= reaches[index, byte]
    return masks


def _reconstruct(
    graph: AdjacencyMasks,
    tables: Sequence[_Tables],
    of_colour: NDArray[np.uint64],
    key: tuple[int, ...],
    trial: int,
    used: Sequence[int],
) -> tuple[int, ...]:
    """Reconstruct the path from one trial's tables, from its end to its start."""

    def held(table: _Words) -> list[int]:
        mask = int.from_bytes(table[trial].astype("<u8").tobytes(), "little")
        return [used[index] for index in set_bits(mask)]

    path = [held(tables[-1][key])[0]]
    for table in reversed(tables[:-1]):
        colour = next(each for each in key if path[-1] in held(of_colour[each]))
        key = tuple(each for each in key if each != colour)
        path.append(next(each for each in held(table[key]) if graph[each] >> path[-1] & 1))
    return tuple(reversed(path))
