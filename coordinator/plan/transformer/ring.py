"""The order of devices in the ring: traffic between neighbours should avoid slow links. Pure."""

from __future__ import annotations

from itertools import combinations, permutations

from hearth.plan.profile import ClusterProfile

# If the rates of all links differ by at most 10 %, the order is kept: a new one would follow the noise of the measurements.
_SIMILAR_RATE_TOLERANCE = 0.10
_MAX_EXHAUSTIVE_DEVICES = 8  # (8-1)! = 5040 orders; beyond, improve by swaps


def best_ring(cluster: ClusterProfile) -> ClusterProfile:
    """The same devices in the order whose slowest hop is fastest; among equals, the order with the least total time.

    Every rank sends about the same bytes per collective, so the slowest hop sets the pace of the ring. Exhaustive up to 8
    devices; beyond that, swaps of two devices until none helps.
    """
    ids = tuple(device.device_id for device in cluster.devices)
    cost = {(link.source, link.target): 1.0 / link.bytes_per_second for link in cluster.links}
    costs = [cost[a, b] for a in ids for b in ids if a != b]
    if len(ids) < 3 or max(costs) <= (1 + _SIMILAR_RATE_TOLERANCE) * min(costs):
        return cluster

    def hop_cost(order: tuple[str, ...]) -> tuple[float, float]:
        hops = [cost[a, b] for a, b in zip(order, (*order[1:], order[0]), strict=True)]
        return max(hops), sum(hops)

    best = ids
    if len(ids) <= _MAX_EXHAUSTIVE_DEVICES:
        best = min(((ids[0], *rest) for rest in permutations(ids[1:])), key=hop_cost)
    improved = len(ids) > _MAX_EXHAUSTIVE_DEVICES
    while improved:
        improved = False
        for i, j in combinations(range(1, len(best)), 2):
            swapped = (*best[:i], best[j], *best[i + 1 : j], best[i], *best[j + 1 :])
            if hop_cost(swapped) < hop_cost(best):
                best, improved = swapped, True
    return cluster.subset(best) if hop_cost(best) < hop_cost(ids) else cluster
