"""Who sends which chunk: each leaves the coordinator at most once, and only who has one passes it on. Pure."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from coordinator.distribution import assign
from hearth.messages import ChunkRef


def chunk(index: int) -> ChunkRef:
    digest = hashlib.sha256(str(index).encode()).hexdigest()
    return ChunkRef(hash=digest, num_bytes=100 + index, kind="mlp", layer=0, grain=index)


def test_what_nobody_has_comes_from_here_once_and_is_passed_on() -> None:
    both, one = chunk(0), chunk(1)
    first, then = assign({"a": [both, one], "b": [both]}, {"a": set(), "b": set()})
    assert [(each.target, each.source, each.chunk) for each in first] == [("a", None, both), ("a", None, one)]
    assert [(each.target, each.source, each.chunk) for each in then] == [("b", "a", both)]


def test_what_another_device_has_is_not_sent_from_here() -> None:
    first, then = assign({"a": [chunk(0)]}, {"a": set(), "old": {chunk(0).hash}})
    assert [each.source for each in first] == ["old"]
    assert not then


def test_devices_share_the_sending() -> None:
    chunks = [chunk(index) for index in range(40)]
    hashes = {each.hash for each in chunks}
    first, _ = assign({"a": chunks}, {"b": hashes, "c": hashes})
    sent = {name: sum(each.chunk.num_bytes for each in first if each.source == name) for name in ("b", "c")}
    assert abs(sent["b"] - sent["c"]) < 200


DEVICES = ("a", "b", "c", "d")


@given(
    needs=st.dictionaries(st.sampled_from(DEVICES), st.sets(st.integers(0, 12)), max_size=4),
    has=st.dictionaries(st.sampled_from(DEVICES), st.sets(st.integers(0, 12)), max_size=4),
)
def test_everyone_gets_what_it_lacks_from_one_that_has_it_by_then(
    needs: dict[str, set[int]], has: dict[str, set[int]]
) -> None:
    held = {device: {chunk(index).hash for index in indexes} for device, indexes in has.items()}
    lacking = {
        device: [chunk(index) for index in sorted(indexes - has.get(device, set()))]
        for device, indexes in needs.items()
    }
    first, then = assign(lacking, held)
    got = {device: set(hashes) for device, hashes in held.items()}
    from_here: list[str] = []
    for transfers in (first, then):
        for each in transfers:
            if each.source is None:
                from_here.append(each.chunk.hash)
            else:
                assert each.source != each.target
                assert each.chunk.hash in got[each.source]
        for each in transfers:
            assert each.chunk.hash not in got.get(each.target, set())
            got.setdefault(each.target, set()).add(each.chunk.hash)
    assert len(from_here) == len(set(from_here))
    assert not set(from_here) & {each for hashes in held.values() for each in hashes}
    assert all({each.hash for each in chunks} <= got.get(device, set()) for device, chunks in lacking.items())
