"""The order of devices in the ring: traffic between neighbours should avoid slow links. Pure."""

from __future__ import annotations

from itertools import permutations

from hearth.plan.profile import ClusterProfile

_ALIKE = 0.10  # links that differ by less leave the order as it is
_MAX_EXHAUSTIVE = 8  # (8-1)! = 5040 orders; beyond, improve by swaps


def best_ring(cluster: ClusterProfile) -> ClusterProfile:
    """The same devices in the order whose slowest hop is fastest, and of those the one with the least time in all.

    Every rank sends about the same bytes per collective, and the slowest hop paces the ring. Exhaustive up to 8 devices,
    beyond that swaps of two devices until none helps.
    """
    ids = tuple(device.device_id for device in cluster.devices)
    cost = {(link.source, link.target): 1.0 / link.bytes_per_second for link in cluster.links}
    between = [cost[a, b] for a in ids for b in ids if a != b]
    if len(ids) < 3 or max(between) <= (1 + _ALIKE) * min(between):
        return cluster

    def price(order: tuple[str, ...]) -> tuple[float, float]:
        hops = [cost[a, b] for a, b in zip(order, (*order[1:], order[0]), strict=True)]
        return max(hops), sum(hops)

    if len(ids) <= _MAX_EXHAUSTIVE:
        best = min(((ids[0], *rest) for rest in permutations(ids[1:])), key=price)
    else:
        best = _by_swaps(ids, price)
    return cluster.subset(best) if price(best) < price(ids) else cluster


def _by_swaps(order: tuple[str, ...], price) -> tuple[str, ...]:  # type: ignore[no-untyped-def]
    improved = True
    while improved:
        improved = False
        for i in range(1, len(order)):
            for j in range(i + 1, len(order)):
                swapped = (*order[:i], order[j], *order[i + 1 : j], order[i], *order[j + 1 :])
                if price(swapped) < price(order):
                    order, improved = swapped, True
    return order
