"""Measurements that need the same machine never overlap; none waits for another one."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import ready_device, with_telemetry

from coordinator.devices.profiling import measure_each, run_apart
from coordinator.devices.registry import Device
from hearth.errors import DeviceLost


@given(st.lists(st.tuples(st.frozensets(st.sampled_from("abcde"), min_size=1, max_size=2), st.integers(1, 5))))
def test_each_runs_once_and_never_with_another_on_the_same_machine(jobs: list[tuple[frozenset[str], int]]) -> None:
    busy: list[str] = []
    done: list[int] = []

    async def run(index: int) -> None:
        hosts, num_turns = jobs[index]
        assert hosts.isdisjoint(busy)
        busy.extend(hosts)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        for host in hosts:
            busy.remove(host)
        done.append(index)

    def job(index: int) -> tuple[frozenset[str], object]:
        return jobs[index][0], lambda: run(index)

    asyncio.run(run_apart([job(index) for index in range(len(jobs))]))  # type: ignore[misc]
    assert sorted(done) == list(range(len(jobs)))


async def test_fast_links_do_not_wait_for_a_slow_one() -> None:
    released = asyncio.Event()
    done: list[tuple[str, str]] = []

    async def measure(pair: tuple[str, str]) -> None:
        if pair == ("a", "b"):
            await released.wait()
        done.append(pair)
        if set(permutations("cde", 2)) == set(done):
            released.set()

    links = [(frozenset(pair), partial(measure, pair)) for pair in permutations("abcde", 2)]
    await asyncio.wait_for(run_apart(links), 5.0)
    assert len(done) == 20


def test_error_cancels_the_other_measurements() -> None:
    cancelled: list[str] = []

    async def measure(pair: tuple[str, str]) -> None:
        if pair == ("a", "b"):
            raise RuntimeError("a bug")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(pair[0])
            raise

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(run_apart([(frozenset(pair), partial(measure, pair)) for pair in [("c", "d"), ("a", "b")]]))
    assert cancelled == ["c"]


def test_agents_of_one_machine_are_measured_in_turn_and_machines_at_the_same_time() -> None:
    devices = [with_telemetry(ready_device(name), host_id=host) for name, host in zip("abcd", "xxyy", strict=True)]
    running: set[str] = set()
    together: set[str] = set()

    async def measure(device: Device) -> str:
        running.add(device.name)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        together.add("".join(sorted(running)))
        running.remove(device.name)
        if device.name == "c":
            raise DeviceLost(device="c", reason="of all times now")
        return device.name.upper()

    results, failures = asyncio.run(measure_each(devices, measure))
    assert results == {"a": "A", "b": "B", "d": "D"}
    assert list(failures) == ["c"]
    assert together <= {"ac", "c", "bd", "d"}
    assert {"ac", "bd"} <= together
