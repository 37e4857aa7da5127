"""Distribution of chunks: each leaves the coordinator once, owners pass it on, and every device gets all."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Iterable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from support.fleets import TransformerFleet
from support.waiting import let_tasks_run

from coordinator.deploy.chunk_scheduler import Chunk, ChunkScheduler
from coordinator.deploy.distribution import Distribution

LEAST, MOST = 250, 600  # bytes of a batch; a chunk has about 100


def chunk(index: int) -> Chunk:
    digest = hashlib.sha256(str(index).encode()).hexdigest()
    return Chunk(digest, 100 + index, bytes)


def missing_chunks(**needs: Iterable[int]) -> dict[str, list[Chunk]]:
    return {device: [chunk(index) for index in indexes] for device, indexes in needs.items()}


def test_new_chunk_leaves_the_coordinator_once_and_is_passed_on() -> None:
    scheduler = ChunkScheduler(missing_chunks(a=[0, 1], b=[0]), {})
    assert scheduler.next_from_coordinator("a") == chunk(0)
    assert scheduler.next_from_coordinator("b") is None  # device a is receiving it and will pass it on
    assert scheduler.next_from_coordinator("a") == chunk(1)
    assert scheduler.next_from_device("a", "b", LEAST, MOST) == []
    scheduler.mark_received(None, "a", [chunk(0)])
    assert scheduler.next_from_device("a", "b", LEAST, MOST) == []  # less than a full batch, and more may follow
    scheduler.mark_received(None, "a", [chunk(1)])
    assert scheduler.next_from_device("a", "b", LEAST, MOST) == [chunk(0)]
    assert not scheduler.is_complete("b")
    scheduler.mark_received("a", "b", [chunk(0)])
    assert scheduler.is_complete("a")
    assert scheduler.is_complete("b")


def test_chunk_held_by_a_device_is_not_sent_by_the_coordinator() -> None:
    scheduler = ChunkScheduler(missing_chunks(a=[0]), {"old": {chunk(0).hash}})
    assert scheduler.next_from_coordinator("a") is None
    assert scheduler.next_from_device("old", "a", LEAST, MOST) == [chunk(0)]


def test_coordinator_sends_each_device_a_different_part() -> None:
    """The coordinator sends the model once, and all devices share in passing it on."""
    scheduler = ChunkScheduler(missing_chunks(**dict.fromkeys("abcd", range(40))), {})
    sent = {device: [scheduler.next_from_coordinator(device) for _ in range(10)] for device in "abcd"}
    assert {each for chunks in sent.values() for each in chunks} == {chunk(index) for index in range(40)}
    assert all(scheduler.next_from_coordinator(device) is None for device in "abcd")


def test_chunks_needed_by_most_devices_are_sent_first() -> None:
    scheduler = ChunkScheduler(missing_chunks(a=[0, 1, 2], b=[2]), {})
    assert scheduler.next_from_coordinator("a") == chunk(2)


def test_device_that_fails_to_send_is_not_asked_again() -> None:
    scheduler = ChunkScheduler(
        missing_chunks(a=[0, 1]), {"old": {chunk(0).hash, chunk(1).hash}, "other": {chunk(1).hash}}
    )
    batch = scheduler.next_from_device("old", "a", LEAST, MOST)
    assert batch == [chunk(0), chunk(1)]
    scheduler.mark_missed("old", "a", batch, give_up_pair=True)
    assert scheduler.pair_is_finished("old", "a")
    assert scheduler.next_from_device("old", "a", LEAST, MOST) == []
    assert scheduler.next_from_coordinator("a") == chunk(0)
    assert scheduler.next_from_coordinator("a") is None
    assert scheduler.next_from_device("other", "a", LEAST, MOST) == [chunk(1)]


def test_only_the_damaged_chunk_is_fetched_elsewhere() -> None:
    scheduler = ChunkScheduler(
        missing_chunks(a=[0, 1, 2, 3, 4, 5, 6]), {"old": {chunk(index).hash for index in range(7)}}
    )
    batch = scheduler.next_from_device("old", "a", LEAST, MOST)
    scheduler.mark_received("old", "a", batch[1:])
    scheduler.mark_missed("old", "a", batch[:1], give_up_pair=False)
    assert scheduler.next_from_coordinator("a") == batch[0]
    assert len(scheduler.next_from_device("old", "a", LEAST, MOST)) == 7 - len(batch)


DEVICES = ("a", "b", "c", "d")
INDEXES = st.sets(st.integers(0, 12))


@given(
    needs=st.dictionaries(st.sampled_from(DEVICES), INDEXES, max_size=4),
    has=st.dictionaries(st.sampled_from(DEVICES), INDEXES, max_size=4),
    broken=st.sets(st.tuples(st.sampled_from(DEVICES), st.sampled_from(DEVICES)), max_size=6),
    seed=st.integers(0, 10**6),
)
def test_every_device_gets_all_chunks_from_owners(
    needs: dict[str, set[int]], has: dict[str, set[int]], broken: set[tuple[str, str]], seed: int
) -> None:
    """Random order of events; some links do not work."""
    chance = random.Random(seed)
    got = {device: {chunk(index).hash for index in has.get(device, ())} for device in DEVICES}
    wanted = {
        device: [chunk(index) for index in sorted(indexes - has.get(device, set()))]
        for device, indexes in needs.items()
    }
    scheduler = ChunkScheduler(wanted, {device: set(hashes) for device, hashes in got.items()})
    on_way: list[tuple[str | None, str, list[Chunk]]] = []
    sent: Counter[str] = Counter()
    for _ in range(2000):
        if all(scheduler.is_complete(device) for device in wanted):
            break
        target = chance.choice(list(wanted))
        source = chance.choice(DEVICES)
        if chance.random() < 0.4 and on_way:
            came_from, where, chunks = on_way.pop(chance.randrange(len(on_way)))
            if came_from is not None and (came_from, where) in broken:
                keep = chance.randrange(len(chunks))
                scheduler.mark_received(came_from, where, chunks[:keep])
                scheduler.mark_missed(came_from, where, chunks[keep:], give_up_pair=keep == 0)
                chunks = chunks[:keep]
            else:
                scheduler.mark_received(came_from, where, chunks)
            assert not got[where] & {each.hash for each in chunks}
            got[where] |= {each.hash for each in chunks}
        elif chance.random() < 0.5:
            if (each := scheduler.next_from_coordinator(target)) is not None:
                sent[each.hash] += 1
                on_way.append((None, target, [each]))
        elif source != target and (batch := scheduler.next_from_device(source, target, LEAST, MOST)):
            assert {each.hash for each in batch} <= got[source]
            on_way.append((source, target, batch))
    assert all(scheduler.is_complete(device) for device in wanted)
    assert all({each.hash for each in chunks} <= got[device] for device, chunks in wanted.items())
    if not broken:
        assert max(sent.values(), default=1) == 1
        assert not set(sent) & {chunk(index).hash for indexes in has.values() for index in indexes}


async def test_paused_distribution_sends_no_chunk() -> None:
    data = [str(index).encode() for index in range(20)]
    chunks = [Chunk(hashlib.sha256(each).hexdigest(), len(each), partial(bytes, each)) for each in data]
    fleet, paused, resumed = TransformerFleet("ab"), asyncio.Event(), asyncio.Event()

    async def pause() -> None:
        paused.set()
        await resumed.wait()

    distribution = Distribution(fleet, lambda *_: None, pause)  # type: ignore[arg-type]
    running = asyncio.create_task(distribution.run({"a": chunks, "b": chunks}))
    await paused.wait()
    await let_tasks_run()
    assert not any(fleet.stored.values())
    resumed.set()
    await asyncio.wait_for(running, 60)
    assert fleet.stored["a"] == fleet.stored["b"] == {each.hash for each in chunks}
