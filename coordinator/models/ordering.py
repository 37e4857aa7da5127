"""A topological order. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence


def topological_order(needs: Sequence[Iterable[int]], priority: Callable[[int], float] = int) -> list[int]:
    """The indices of `needs`, each after all those that it depends on.

    Among several candidates, the one with the lowest `priority` comes first, then the lowest index. Indices on a cycle,
    and those that depend on one, are left out.
    """
    waits_for = [len(set(before)) for before in needs]
    needed_by: defaultdict[int, list[int]] = defaultdict(list)
    for index, before in enumerate(needs):
        for other in set(before):
            needed_by[other].append(index)
    ready = [(priority(index), index) for index, count in enumerate(waits_for) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready)[1])
        for index in needed_by[order[-1]]:
            waits_for[index] -= 1
            if not waits_for[index]:
                heapq.heappush(ready, (priority(index), index))
    return order
