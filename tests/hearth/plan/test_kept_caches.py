"""KV caches kept over a change of plan: whatever the plans, own parts and copies cover all rows but those of no holder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import LLAMA_1B, make_plan, with_generation

from hearth.plan.kept_caches import (
    CacheBlock,
    HeldBlock,
    cached_block,
    copied_block,
    covered_rows,
    keeper_of,
    plan_transfers,
    reserved_bytes,
)
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits

SPEC = LLAMA_1B
LIMITS = GenerationLimits(kv_tokens=1024, max_sequences=4, prefill_rows=64, kv_copies=True)


@dataclass(frozen=True)
class Change:
    """A change of plan: `ranks` are the old ranks of the new plan's devices; None: a device that joins."""

    old: TransformerPlan
    new: TransformerPlan
    ranks: tuple[int | None, ...]


@st.composite
def plans(draw: st.DrawFn, num_ranks: int) -> TransformerPlan:
    strategy = draw(st.sampled_from(["hmp", "megatron-tp", "pipeline"]))
    least = 1 if strategy == "pipeline" else 0
    possible = st.lists(st.integers(least, 4), min_size=num_ranks, max_size=num_ranks).filter(any)
    if strategy == "pipeline":  # every stage has a layer
        possible = possible.filter(lambda weights: SPEC.num_layers * min(weights) >= sum(weights))
    weights = draw(possible)
    return with_generation(make_plan(SPEC, strategy, weights), LIMITS)


@st.composite
def changes(draw: st.DrawFn) -> Change:
    old = draw(plans(draw(st.integers(2, 5))))
    lost = draw(st.one_of(st.none(), st.integers(0, old.num_ranks - 1)))
    left: list[int | None] = [rank for rank in range(old.num_ranks) if rank != lost]
    ranks = draw(st.permutations(left + [None] * draw(st.integers(0, 2))))
    return Change(old, draw(plans(len(ranks))), tuple(ranks))


def held_after(change: Change, num_rows: int) -> list[HeldBlock]:
    """What the new ranks hold: their own blocks, and copies that lag behind by as many rows as their rank."""
    held = []
    for rank, old_rank in enumerate(change.ranks):
        if old_rank is not None:
            copy = copied_block(SPEC, change.old.body, old_rank)
            assert copy is not None
            held.append(HeldBlock(rank, cached_block(SPEC, change.old.body, old_rank), num_rows))
            held.append(HeldBlock(rank, copy, num_rows - old_rank))
    return held


@given(changes())
def test_what_is_left_after_any_loss_covers_what_the_next_plan_needs(change: Change) -> None:
    held = held_after(change, 100)
    num_rows = covered_rows(SPEC, held)
    assert 95 <= num_rows <= 100
    cells = {rank: np.zeros((SPEC.num_layers, SPEC.num_kv_heads), int) for rank in range(change.new.num_ranks)}
    for source, target, block in plan_transfers(change.new, held, num_rows):
        assert any(each.rank == source and each.num_rows >= num_rows and each.block.covers(block) for each in held)
        cells[target][slice(*block.layers), slice(*block.heads)] += 1
    for rank, filled in cells.items():
        needed = np.zeros_like(filled)
        block = cached_block(SPEC, change.new.body, rank)
        needed[slice(*block.layers), slice(*block.heads)] = 1
        np.testing.assert_array_equal(filled, needed)


def test_without_copies_a_loss_leaves_nothing_that_is_whole() -> None:
    old = make_plan(SPEC, "hmp", (1, 1, 1))
    assert copied_block(SPEC, old.body, 0) is None
    assert covered_rows(SPEC, [HeldBlock(rank, cached_block(SPEC, old.body, rank), 50) for rank in (0, 1)]) == 0
    assert covered_rows(SPEC, [HeldBlock(rank, cached_block(SPEC, old.body, rank), 50) for rank in (0, 1, 2)]) == 50


def test_blocks_that_stay_on_their_rank_are_not_sent() -> None:
    plan = with_generation(make_plan(SPEC, "hmp", (1, 1)), LIMITS)
    held = [HeldBlock(rank, cached_block(SPEC, plan.body, rank), 10) for rank in range(2)]
    assert all(source == target for source, target, _ in plan_transfers(plan, held, 10))


def test_two_holders_share_the_sending() -> None:
    whole = cached_block(SPEC, make_plan(SPEC, "local", (1,)).body, 0)
    plan = make_plan(SPEC, "hmp", (0, 0, 1, 1))
    transfers = plan_transfers(plan, [HeldBlock(0, whole, 5), HeldBlock(1, whole, 5)], 5)
    assert sorted((source, target) for source, target, _ in transfers) == [(0, 2), (1, 3)]


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_rank_reserves_memory_for_the_copy_of_the_rank_before(num_ranks: int) -> None:
    plan = with_generation(make_plan(SPEC, "hmp", (1,) * num_ranks), LIMITS)
    of_token = 2 * SPEC.num_layers * SPEC.num_kv_heads * SPEC.head_dim * 4
    assert sum(reserved_bytes(SPEC, plan.body, rank) for rank in range(num_ranks)) == 2 * of_token * LIMITS.kv_tokens
    for rank in range(num_ranks):
        assert copied_block(SPEC, plan.body, keeper_of(rank, num_ranks)) == cached_block(SPEC, plan.body, rank)


def test_one_device_keeps_no_copy() -> None:
    plan = with_generation(make_plan(SPEC, "local", (1,)), LIMITS)
    assert copied_block(SPEC, plan.body, 0) is None
    assert cached_block(SPEC, plan.body, 0) == CacheBlock(*((0, n) for n in (SPEC.num_layers, SPEC.num_kv_heads)))  # type: ignore[arg-type]
