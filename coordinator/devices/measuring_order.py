"""Order of measurements: those that need the same machine run one after the other, all others at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from coordinator.devices.registry import Device
from hearth.errors import HearthError
from hearth.platform.asyncio_tools import cancel_all

T = TypeVar("T")

Measurement: TypeAlias = Callable[[], Awaitable[None]]


async def measure_each(
    devices: Sequence[Device], measure: Callable[[Device], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, HearthError]]:
    """Measure devices concurrently, but agents on one machine in turn, since they would slow each other down.

    Returns the results by device id, and the errors by device name.
    """
    results: dict[str, T] = {}
    failures: dict[str, HearthError] = {}

    def one(device: Device) -> Measurement:
        async def run() -> None:
            try:
                results[device.device_id] = await measure(device)
            except HearthError as error:
                failures[device.name] = error

        return run

    await run_apart([(frozenset([device.host_id]), one(device)) for device in devices])
    return results, failures


async def measure_pairs(
    pairs: Sequence[tuple[str, str]],
    hosts: Mapping[str, str],
    measure: Callable[[tuple[str, str]], Awaitable[None]],
) -> None:
    """Measure pairs of devices concurrently, but only one at a time on each machine. `hosts`: machine by device id."""

    def one(pair: tuple[str, str]) -> Measurement:
        return lambda: measure(pair)

    await run_apart([(frozenset(hosts[each] for each in pair), one(pair)) for pair in pairs])


async def run_apart(measurements: Sequence[tuple[frozenset[str], Measurement]]) -> None:
    """Run each as soon as its machines are free; first those whose machines have the most measurements left.

    If one raises, the others are cancelled. None waits for the end of a round: where links are unequally fast, a machine with
    slow ones delays no other.
    """
    waiting = list(measurements)
    running: dict[asyncio.Future[None], frozenset[str]] = {}
    try:
        while waiting or running:
            left = Counter(host for hosts, _ in waiting for host in hosts)
            busy = {host for hosts in running.values() for host in hosts}
            for entry in sorted(waiting, key=lambda entry: -sum(left[host] for host in entry[0])):
                hosts, measurement = entry
                if busy.isdisjoint(hosts):
                    busy |= hosts
                    waiting.remove(entry)
                    running[asyncio.ensure_future(measurement())] = hosts
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                del running[each]
                each.result()
    finally:
        await cancel_all(running)
