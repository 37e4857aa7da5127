"""The schedule of AllGather and ReduceScatter around a ring."""

from __future__ import annotations

import pytest

from hearth.plan.phases import forward_target, ring_all_gather, ring_reduce_scatter

RINGS = range(1, 9)


@pytest.mark.parametrize("num_ranks", RINGS)
def test_all_gather_delivers_every_tile_to_every_rank(num_ranks: int) -> None:
    held = [{rank} for rank in range(num_ranks)]
    schedules = [ring_all_gather(num_ranks, rank) for rank in range(num_ranks)]
    for t in range(num_ranks):
        moving = []
        for rank in range(num_ranks):
            step = schedules[rank][t]
            assert step.compute in held[rank]
            if step.send is not None:
                assert step.send in held[rank]
                moving.append(((rank + 1) % num_ranks, step.send))
        for receiver, tile in moving:
            assert schedules[receiver][t].receive == tile
            held[receiver].add(tile)
    assert all(tiles == set(range(num_ranks)) for tiles in held)
    assert all({step.compute for step in schedule} == set(range(num_ranks)) for schedule in schedules)


@pytest.mark.parametrize("num_ranks", RINGS)
def test_reduce_scatter_sums_each_tile_over_all_ranks_once(num_ranks: int) -> None:
    carried: dict[tuple[int, int], set[int]] = {}  # (receiver, tile): the ranks whose partial sums it holds
    for t in range(num_ranks):
        sent = {}
        for rank in range(num_ranks):
            step = ring_reduce_scatter(num_ranks, rank)[t]
            total = {rank}
            if step.receive is not None:
                assert step.receive == step.compute
                total |= carried.pop((rank, step.receive))
            if step.send is not None:
                sent[(rank + 1) % num_ranks, step.send] = total
            else:
                assert step.compute == rank
                assert total == set(range(num_ranks))
        carried.update(sent)
    assert not carried


@pytest.mark.parametrize("num_ranks", RINGS)
def test_forwarding_stops_before_the_owner(num_ranks: int) -> None:
    for tile in range(num_ranks):
        visited, rank = [tile], forward_target(num_ranks, tile, tile)
        while rank is not None:
            visited.append(rank)
            rank = forward_target(num_ranks, rank, tile)
        assert sorted(visited) == list(range(num_ranks))
