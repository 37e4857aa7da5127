"""Allocation of blocks of the KV cache: none is lost or shared wrongly, and prefixes are found until they are evicted. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from agent.worker.transformer.generation.block_pool import BlockPool, num_blocks_for, prefix_keys
from hearth.plan.transformer import KV_BLOCK_TOKENS

N = KV_BLOCK_TOKENS


@dataclass
class Holder:
    """A sequence: its blocks, and the tokens of the full ones."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


# A sequence begins with one of few prefixes, or grows by a block, or ends.
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["begin", "grow", "end"]), st.integers(0, 5), st.integers(0, 4)), max_size=60
)


@given(st.integers(1, 24), ACTIONS)
def test_no_block_is_lost_or_shared_wrongly(num_blocks: int, actions: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(num_blocks)
    holders: list[Holder] = []
    content: dict[int, tuple[int, ...]] = {}  # of published blocks: all tokens up to their last one
    for action, which, size in actions:
        if action == "begin":
            tokens = [which % 2] * N * size + [which] * N
            keys = list(prefix_keys("app", tokens))
            shared = pool.take_prefix(keys)
            for index, block in enumerate(shared):
                assert content[block] == tuple(tokens[: (index + 1) * N])
            if pool.num_free < len(keys) - len(shared):
                pool.release(shared)
                continue
            new = pool.allocate(len(keys) - len(shared), shared[-1] if shared else None)
            blocks = shared + new
            for index in range(len(shared), len(blocks)):
                pool.publish(blocks[index], keys[index])
                content[blocks[index]] = tuple(tokens[: (index + 1) * N])
            holders.append(Holder(tokens, blocks))
        elif holders and action == "grow" and pool.num_free:
            holder = holders[which % len(holders)]
            (block,) = pool.allocate(1, holder.blocks[-1])
            content.pop(block, None)
            holder.blocks.append(block)
        elif holders and action == "end":
            pool.release(holders.pop(which % len(holders)).blocks)
        used = {block for holder in holders for block in holder.blocks}
        assert pool.num_free == num_blocks - len(used)
        assert all(0 <= block < num_blocks for block in used)
        for holder in holders:
            assert len(set(holder.blocks)) == len(holder.blocks)
            for other in holders:
                if other is not holder:
                    for block in set(holder.blocks) & set(other.blocks):
                        index = holder.blocks.index(block)
                        assert other.blocks.index(block) == index
                        assert holder.tokens[: (index + 1) * N] == other.tokens[: (index + 1) * N]
    for holder in holders:
        pool.release(holder.blocks)
    assert pool.num_free == num_blocks
    assert sorted(pool.allocate(num_blocks)) == list(range(num_blocks))
    assert pool.num_cached == 0


def test_end_of_the_prefix_that_was_used_longest_ago_is_evicted_first() -> None:
    pool = BlockPool(6)
    keys = {name: list(prefix_keys("app", [ord(name)] * 3 * N)) for name in "ab"}
    for name in "ab":
        blocks = pool.allocate(3)
        for block, key in zip(blocks, keys[name], strict=True):
            pool.publish(block, key)
        pool.release(blocks)
    pool.release(pool.take_prefix(keys["a"]))
    pool.allocate(2)
    assert [len(pool.take_prefix(keys[name])) for name in "ab"] == [3, 1]


def test_sequences_grow_in_adjacent_blocks_while_there_is_room() -> None:
    pool = BlockPool(64)
    sequences = [pool.allocate(2) for _ in range(4)]
    for _ in range(8):
        for blocks in sequences:
            blocks += pool.allocate(1, blocks[-1])
    for blocks in sequences:
        assert blocks == list(range(blocks[0], blocks[0] + 10))


def test_keys_depend_on_scope_and_all_tokens_before() -> None:
    tokens = list(range(3 * N + 5))
    keys = list(prefix_keys("app", tokens))
    assert len(keys) == 3 == num_blocks_for(3 * N)
    assert num_blocks_for(3 * N + 1) == 4
    assert not set(keys) & set(prefix_keys("another", tokens))
    assert not set(keys) & set(prefix_keys("app", [9, *tokens[1:]]))
    assert [*keys[:1], *prefix_keys("app", tokens[N:], keys[0])] == keys
