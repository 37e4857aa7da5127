"""Which KV caches a new plan keeps: whole ones of one attempt, with room, and if moving them is quicker than computing them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.plans import LLAMA_1B, make_plan, with_generation

from coordinator.deploy.kept_caches import kept_caches, kept_prefixes
from hearth.plan.kept_caches import cached_block
from hearth.plan.transformer import GenerationLimits
from hearth.wire.messages import HeldCache, HeldPrefixes, HeldRows, KeptCache, split_keys

TOKENS = list(range(100))
PLAN = with_generation(
    make_plan(LLAMA_1B, "hmp", (1, 1)), GenerationLimits(kv_tokens=400, max_sequences=4, prefill_rows=64)
)


def report(rank: int, tokens: Sequence[int] = TOKENS, num_rows: int = 100, stream: str = "a") -> HeldCache:
    part = HeldRows(block=cached_block(LLAMA_1B, PLAN.body, rank), num_rows=num_rows)
    return HeldCache(stream=stream, token_ids=np.asarray(tokens, "<i4").tobytes(), parts=(part,))


def kept(*reports: Sequence[HeldCache] | None, rate: float = 1e9) -> tuple[KeptCache, ...]:
    return kept_caches(PLAN, reports, lambda source, target: rate)


def test_whole_caches_are_kept_up_to_the_shortest_part() -> None:
    (cache,) = kept([report(0)], [report(1, TOKENS[:98], 97)])
    assert cache.num_rows == 97
    assert np.frombuffer(cache.token_ids, "<i4").tolist() == TOKENS
    assert cache.reserved_tokens == 100
    assert cache.transfer_seconds == 0


def test_parts_that_do_not_fit_together_are_dropped() -> None:
    assert kept([report(0)], []) == ()
    assert kept([report(0)], [report(1, [7, *TOKENS[1:]])]) == ()
    assert kept([report(0)], [report(1, stream="b")]) == ()


def test_nothing_is_kept_if_a_worker_does_not_know_of_it() -> None:
    assert kept([report(0)], None) == ()


def test_what_takes_longer_to_move_than_to_compute_is_dropped() -> None:
    assert len(kept([report(1)], [report(0)])) == 1  # the ranks have changed places
    assert kept([report(1)], [report(0)], rate=1e6) == ()
    assert len(kept([report(0)], [report(1)], rate=1e6)) == 1


# ---- the prefix cache -------------------------------------------------------------------------------------------------

KEYS = [bytes([number]) * 16 for number in range(6)]


def held(rank: int, keys: Sequence[bytes] = KEYS) -> HeldPrefixes:
    return HeldPrefixes(block=cached_block(LLAMA_1B, PLAN.body, rank), keys=b"".join(keys))


def prefixes(*reports: HeldPrefixes | None, rate: float = 1e9) -> list[bytes]:
    found = kept_prefixes(PLAN, reports, lambda source, target: rate)
    return split_keys(found.keys) if found is not None else []


def test_blocks_that_all_ranks_hold_are_kept() -> None:
    assert prefixes(held(0), held(1)) == KEYS
    assert prefixes(held(0, KEYS[1:]), held(1, KEYS[:5])) == KEYS[1:5]
    assert prefixes(held(0), None) == []
    assert prefixes(held(0), held(1, [])) == []
    assert prefixes(held(0), held(0)) == []  # the other heads are nowhere
    assert prefixes() == []


def test_as_many_blocks_are_moved_as_time_permits_the_newest_ones() -> None:
    of_block = cached_block(LLAMA_1B, PLAN.body, 0).num_bytes(LLAMA_1B, 16)
    assert prefixes(held(1), held(0)) == KEYS
    assert prefixes(held(1), held(0), rate=of_block * 6.5) == KEYS[-3:]
    assert prefixes(held(1), held(0), rate=of_block) == []
    assert prefixes(held(0), held(1), rate=1) == KEYS  # nothing moves
    found = kept_prefixes(PLAN, [held(1), held(0)], lambda source, target: of_block * 20.0)
    assert found.transfer_seconds == pytest.approx(0.3)
