"""Galaxy's Algorithm 1, "Heterogeneity and Memory Aware Workload Planning", as published, with full memory accounting.

Line numbers in comments are the paper's. Beyond the paper: shares become whole grains (largest remainder), all memory of a
device counts (`coordinator.plan.transformer.cost.memory`), and the vocabulary is split by the same balancing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from coordinator.plan.transformer.request import PlanRequest, build_plan, excess_bytes, missing_bytes
from coordinator.plan.transformer.shares import ShareBudget, body_from_grains, device_capacity
from hearth.errors import ModelDoesNotFit
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, grains_to_items, largest_remainder, num_grains
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import ShareStrategy, TensorParallel


def balanced_partition(workload: float, capacities: Sequence[float]) -> list[float]:
    """BalancedPartition (lines 3-9): shares in proportion to capacity, regardless of memory."""
    return [capacity / sum(capacities) * workload for capacity in capacities]


def memory_aware_balancing(
    shares: Sequence[float], capacities: Sequence[float], max_share: Callable[[int], float], devices: Sequence[int]
) -> list[float]:
    """MemoryAwareBalancing (lines 14-27): shift each device's overflow to those with room, in proportion to capacity.

    `max_share(d)` is the largest share of this kind for which device d has memory, next to everything else that it holds. A
    handled device leaves the list. Overflow that no device can take stays where it is; the caller checks the budgets.
    """
    shares = list(shares)
    over = [d for d in devices if shares[d] > max_share(d)]
    free = [d for d in devices if shares[d] < max_share(d)]
    if not over or not free:  # without free devices the paper's line 23 would divide by zero
        return shares
    for device in over:
        overflow = shares[device] - max(max_share(device), 0.0)  # clamped: a device can give no more than it has
        shares[device] -= overflow
        for other in free:
            shares[other] += capacities[other] / sum(capacities[f] for f in free) * overflow
    return memory_aware_balancing(shares, capacities, max_share, [d for d in devices if d not in over])


def plan_galaxy(request: PlanRequest, strategy: ShareStrategy) -> TransformerPlan:
    """`hmp` (or `megatron-tp`, which shards in the same way) over all devices, in their order. Raises ModelDoesNotFit."""
    spec, devices = request.spec, request.cluster.devices
    budget, ranks = ShareBudget(request, strategy), range(len(devices))
    capacities = [device_capacity(request, device.blocks) for device in devices]
    num_columns = num_grains(spec.ffn_size, COLUMN_GRAIN)
    num_vocabulary = num_grains(spec.vocab_size, VOCABULARY_GRAIN)
    # Lines 11-12, in grains: KV groups, MLP columns, and vocabulary rows, which the paper leaves out.
    a = balanced_partition(spec.num_kv_heads, capacities)
    b = balanced_partition(num_columns, capacities)
    v = balanced_partition(num_vocabulary, capacities)
    # Lines 30-32: each call starts from the list of all devices; the finer grain first.
    b = memory_aware_balancing(
        b, capacities, lambda d: budget.remaining_bytes(d, a=a[d], v=v[d]) / budget.bytes_per_column_grain, ranks
    )
    v = memory_aware_balancing(
        v, capacities, lambda d: budget.remaining_bytes(d, a=a[d], b=b[d]) / budget.bytes_per_vocabulary_grain, ranks
    )
    a = memory_aware_balancing(
        a, capacities, lambda d: budget.remaining_bytes(d, b=b[d], v=v[d]) / budget.bytes_per_head_grain, ranks
    )
    groups = largest_remainder(a, spec.num_kv_heads)
    columns, vocabulary = largest_remainder(b, num_columns), largest_remainder(v, num_vocabulary)
    # S: equal; the connective is bound by memory access, not by speed.
    body = _repair(request, body_from_grains(request, strategy, groups, columns, vocabulary))
    if missing := missing_bytes(request, body):  # lines 33-34
        raise ModelDoesNotFit(model=spec.name, missing_bytes=missing)
    return build_plan(request, body, "galaxy")


def _repair(request: PlanRequest, body: TensorParallel) -> TensorParallel:
    """Repair budgets that rounding exceeded: move single grains to the device with most room, finest kind first."""
    while True:
        excess = [excess_bytes(request, body, rank) for rank in range(len(request.cluster.devices))]
        moved = next(_moves(request, body, excess), None) if max(excess) > 0 else None
        if moved is None:
            return body
        body = moved


def _moves(request: PlanRequest, body: TensorParallel, excess: Sequence[int]) -> Iterator[TensorParallel]:
    """Moves of one grain from the fullest device to another with room. The shorter last grain stays on the last device."""
    spec, source = request.spec, excess.index(max(excess))
    kinds = (
        ("columns", COLUMN_GRAIN, spec.ffn_size),
        ("vocabulary", VOCABULARY_GRAIN, spec.vocab_size),
        ("heads", spec.group_size, spec.num_heads),
    )
    for target in sorted(range(len(excess)), key=lambda rank: excess[rank]):
        for field, grain, total in kinds:
            grains = [-(-share // grain) for share in getattr(body, field)]
            if target != source and grains[source] > 0:
                grains[source] -= 1
                grains[target] += 1
                moved = body.model_copy(update={field: grains_to_items(grains, total, grain)})
                if excess_bytes(request, moved, target) <= 0:
                    yield moved
