"""A fake fleet whose agents answer immediately: the messages are real, the devices' computations are not."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from support.devices import ready_device
from support.plans import device_profile

from coordinator.devices import registry
from coordinator.devices.registry import Device
from coordinator.models.graph_file import GraphFile
from hearth.errors import DeviceLost, HearthError, StepFailed
from hearth.plan.geometry import rows_per_rank, spans
from hearth.plan.profile import BlockProfile, WireCost
from hearth.platform.asyncio_tools import loop_time
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array, pack_arrays, unpack_arrays
from hearth.wire.rpc import Reply


class FakeFleet(ABC):
    """Agents, mostly with one-letter names. `slow` multiplies computing times, `link_factor` transfer times."""

    holder = "test"

    def may_compute(self) -> bool:
        return self.has_majority

    def leased(self) -> set[str]:
        return set(self.devices) - self.without_lease

    def __init__(self, names: Sequence[str], link_bytes_per_second: float) -> None:
        self.has_majority = True
        self.without_lease: set[str] = set()
        self.last_epoch = 0
        self.running_epochs: dict[str, int] = {}
        self.devices = {name: ready_device(name) for name in names}
        self.slow = dict.fromkeys(names, 1.0)
        self.link_factor = 1.0
        self.link_bytes_per_second = link_bytes_per_second
        self.stored: dict[str, set[str]] = {name: set() for name in names}
        self.loads: dict[str, wire.Load] = {}
        self.other_loads: dict[tuple[str, str], wire.Load] = {}  # of other deployments, by their name and device
        self.asked: list[tuple[str, wire.Message]] = []
        self.running: Counter[str] = Counter()  # number of running requests by device
        self.most_running = 0  # largest number of concurrent requests on a device
        self.released = asyncio.Event()  # if cleared, requests wait on the devices
        self.released.set()
        self.num_usable_calls = 0  # calls of `usable`, mainly by the re-planner
        self.failures: list[HearthError] = []  # errors of the next requests
        self.broken: HearthError | None = None  # error of every request
        self.reject_ones = False  # whether a request with an input of ones fails

    def add(self, name: str) -> None:
        self.devices[name] = ready_device(name)
        self.slow[name] = 1.0
        self.stored[name] = set()

    def kill(self, name: str) -> Device:
        self.devices[name] = replace(self.devices[name], health="dead", reason="no answer")
        return self.devices[name]

    def usable(self) -> list[Device]:
        self.num_usable_calls += 1
        return registry.usable(list(self.devices.values()), loop_time())

    async def settle(self, *_: float) -> list[Device]:
        return self.usable()

    async def refresh_telemetry(self) -> None:
        return

    def record_fault(self, planned: Sequence[Any], error: HearthError, may_restart: bool = False) -> list[str]:
        named = [device.device_id for device in planned if device.name == error.device_name]
        for name in named:
            self.devices[name] = registry.after_device_fault(self.devices[name], error, loop_time(), may_restart)
        return named

    async def answers_again(self, device_id: str) -> bool:
        return False

    def pardon(self) -> bool:
        needed = registry.needed_despite_quarantine(list(self.devices.values()), loop_time())
        for device in needed:
            self.devices[device.device_id] = registry.after_pardon(device, loop_time())
        return bool(needed)

    @asynccontextmanager
    async def bulk_connection(self, device_id: str) -> AsyncIterator[Any]:
        fleet = self

        class Connection:
            async def call(
                self, message: wire.Message, payload: Sequence[Any] = (), *, timeout_seconds: float
            ) -> Reply:
                return await fleet.call(device_id, message, payload, timeout_seconds)

        yield Connection()

    async def ask(
        self, device_id: str, message: wire.Message, expected: type[Any], timeout_seconds: float = 10.0
    ) -> Any:
        reply = (await self.call(device_id, message, (), timeout_seconds)).message
        assert isinstance(reply, expected)
        return reply

    async def call(
        self, device_id: str, message: wire.Message, payload: Sequence[Any] = (), timeout_seconds: float = 10.0
    ) -> Reply:
        self.asked.append((device_id, message))
        await asyncio.sleep(0)
        if self.devices[device_id].health == "dead":
            raise DeviceLost(device=device_id, reason="it is gone")
        stored = self.stored[device_id]
        if isinstance(message, wire.Profile):
            return Reply(wire.Profiled(result=self.profile(message, payload)))
        if isinstance(message, wire.MeasureLink):
            rate = self.link_bytes_per_second / self.link_factor
            return Reply(wire.LinkMeasured(bytes_per_second=rate, round_trip_seconds=1e-9, num_bytes=1, stable=True))
        if isinstance(message, wire.FindMissing):
            missing = tuple(chunk for chunk in message.hashes if chunk not in stored)
            num_stored = (len(message.hashes) - len(missing)) * message.read_ahead  # as if chunks had one byte
            return Reply(wire.ChunksMissing(hashes=missing, stored_bytes=num_stored, read_ahead_bytes=num_stored))
        if isinstance(message, wire.FetchChunks):
            stored |= set(message.hashes)
            return Reply(wire.ChunksFetched(missing=()))
        if isinstance(message, wire.PutChunk):
            assert hashlib.sha256(payload[0]).hexdigest() == message.hash
            stored.add(message.hash)
            return Reply(wire.Done())
        if isinstance(message, wire.Load):
            assert set(message.parts.hashes) <= stored
            if message.deployment == DEFAULT_DEPLOYMENT:
                self.loads[device_id] = message
            else:
                self.other_loads[message.deployment, device_id] = message
            return Reply(wire.WorkerBound(port=1, public_key="0" * 40, num_bytes_loaded=0))
        if isinstance(message, wire.Run):
            return await self._run(device_id, message, payload)
        return Reply(wire.Done())

    async def _run(self, device_id: str, message: wire.Run, payload: Sequence[Any]) -> Reply:
        assert self.loaded(device_id, message).plan.epoch == message.epoch
        self.running[device_id] += 1
        self.most_running = max(self.most_running, self.running[device_id])
        try:
            if self.broken is not None:
                raise self.broken
            if self.failures and self.released.is_set():
                raise self.failures.pop(0)
            await self.released.wait()
        finally:
            self.running[device_id] -= 1
        arrays = unpack_arrays(message.names, payload)
        if self.reject_ones and any(array.any() and (array == 1).all() for array in arrays.values()):
            raise StepFailed(device=device_id, reason="the input is all ones")
        return self.run(device_id, message, arrays)

    def loaded(self, device_id: str, message: wire.Run) -> wire.Load:
        """What the worker that a request is for has loaded."""
        if message.deployment == DEFAULT_DEPLOYMENT:
            return self.loads[device_id]
        return self.other_loads[message.deployment, device_id]

    @abstractmethod
    def profile(self, message: wire.Profile, payload: Sequence[Any]) -> BlockProfile | wire.GraphProfile:
        """The answer of every device."""

    @abstractmethod
    def run(self, device_id: str, message: wire.Run, arrays: dict[str, np.ndarray[Any, Any]]) -> Reply:
        """The answer of one rank to a request."""


class TransformerFleet(FakeFleet):
    """A step takes the predicted time, times `slow`; `errors` and `speeds` hold the effects of formats."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names, link_bytes_per_second=1e12)  # fast, so that distribution always pays
        self.errors = {None: 0.0, "exact": 0.0, "bf16": 4e-3, "fp16": 1e-3, "int8": 5e-2}
        self.speeds = {None: 1.0, "exact": 1.0, "bf16": 0.6, "fp16": 0.7, "int8": 0.4}

    def profile(self, message: wire.Profile, payload: Sequence[Any]) -> BlockProfile:
        assert isinstance(message.subject, wire.BlocksOf)
        return device_profile(0, 1.0, message.subject.model, message.subject.seq_len).blocks

    def run(self, device_id: str, message: wire.Run, arrays: dict[str, np.ndarray[Any, Any]]) -> Reply:
        load = self.loaded(device_id, message)
        plan, rank = load.plan, load.rank
        num_rows, num_sequences = len(arrays["token_ids"]), len(arrays["cumulative_lengths"]) - 1
        own = spans(rows_per_rank(plan.body.row_weights, num_rows))[rank].size
        share = num_rows / plan.body.seq_len
        slowest = max(self.slow[device.device_id] for device in plan.devices)
        latency = plan.predicted.latency_seconds * share * slowest * self.link_factor * self.speeds[message.values]
        done = wire.RunDone(
            names=(message.output,), began_seconds=0.0, ended_seconds=latency,
            compute_seconds=(plan.devices[rank].compute_seconds * share * self.slow[device_id],),
            wire=wire.WireStats(), dropped_messages=0,
        )  # fmt: skip
        shape = (own if message.output == "hidden" else num_sequences, plan.model.hidden_size)
        return Reply(done, pack_array(np.ones(shape, np.float32) * (1 + self.errors[message.values])))


class GraphFleet(FakeFleet):
    """Every operator takes 10 ms, divided among its tiles, times `slow`."""

    def __init__(self, names: str, graph: GraphFile) -> None:
        super().__init__(names, link_bytes_per_second=1e9)
        self.graph = graph

    def profile(self, message: wire.Profile, payload: Sequence[Any]) -> wire.GraphProfile:
        from onnx import ModelProto

        assert isinstance(message.subject, wire.OperatorsOf)
        names = [node.name for node in ModelProto.FromString(b"".join(payload)).graph.node]
        num_tiles = Counter(name.partition("/tile")[0] for name in names if "/tile" in name)
        seconds = {name: 0.01 / num_tiles.get(name.partition("/tile")[0], 1) for name in names}
        seconds |= {name: 0.0 for name in names if name.partition("/")[2][:3] in ("gat", "par", "sum")}
        kernels = tuple(
            wire.Kernel(name=name, kind="", provider="cpu", seconds=seconds[name], operators=(name,)) for name in names
        )
        return wire.GraphProfile(
            kernels=kernels, run_seconds=sum(seconds.values()), provider="cpu", process_bytes=1 << 20,
            load_bytes=1 << 20, peak_bytes=3 << 20, run_bytes=1 << 20, wire=WireCost(),
        )  # fmt: skip

    def run(self, device_id: str, message: wire.Run, arrays: dict[str, np.ndarray[Any, Any]]) -> Reply:
        load = self.loaded(device_id, message)
        plan, rank = load.plan, load.rank
        made = [name for segment in plan.body.segments_of(rank) for name in segment.outputs]
        outputs = {name: np.ones((1, 40), np.float32) for name in plan.model.outputs if name in made}
        done = wire.RunDone(
            names=tuple(outputs), began_seconds=0.0, ended_seconds=0.1,
            compute_seconds=tuple(
                (each.seconds if plan.model.tiles else 0.01 * len(each.operators)) * self.slow[device_id]
                for each in plan.body.segments_of(rank)
            ),
            wire=wire.WireStats(), dropped_messages=0,
        )  # fmt: skip
        return Reply(done, pack_arrays(outputs))
