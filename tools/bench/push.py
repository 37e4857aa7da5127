"""Kind `push`: time and bytes to send weights from the coordinator to real agents.

The coordinator has its own uplink. Rates are given as fractions of the link rate. The bytes counted by the coordinator are
compared with those computed from the chunk lists.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import psutil
from pydantic import Field, TypeAdapter

from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.chunk_layout import chunks_for_rank
from coordinator.models.checkpoint.families import read_spec
from coordinator.models.checkpoint.sharding import cached_manifest
from hearth.plan.model_spec import ModelSpec, WeightFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import Strategy
from hearth.platform.units import format_bytes, format_rate, format_seconds
from hearth.wire.messages import ChunkRef
from tools.bench.experiment import Context, Experiment
from tools.bench.findings import BYTES, PERCENT, RATIO, Finding, at_least, at_most, equal, summarise, without_target
from tools.bench.homes import Model, agent_names, agents, decoder_directory, hub_scenario
from tools.bench.processes import HubProcess
from tools.bench.profiles import Report
from tools.bench.results import Summary
from tools.bench.shapes import save_random_model
from tools.bench.shares import equal_plan
from tools.bench.watch import COORDINATOR_BYTES, agent_of, peak_bytes, worker_peaks
from tools.testbed import Testbed
from tools.testbed.cluster import wait_until

# Target for a push to one device: fraction of the link's rate; the rest allows for headers and encryption.
LEAST_SHARE = 0.85
MOST_RATIO = 1.3  # target for a push to several: time over the least that the links allow; leaves room for passing on
_HUB_FACTOR = 4  # uplink of the coordinator over the link of a device, when the uplink must not be the bottleneck
_PUSH_SECONDS = 900.0  # timeout of a push; enough for GPT-2 Large over 15 Mbit/s
# A tiny model: its workers show the base memory of any worker, with sockets and threads.
_TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip


class Push(Experiment):
    """Pushes to one device and to all, a second time, after the loss of a device, and after one of the coordinator."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(Finding)

    model: Model = "gpt2-large"
    weights: WeightFormat = "bfloat16"
    devices: int = Field(4, ge=2, le=4)  # that receive weights
    mbit: float = Field(250.0, ge=1)  # real rate of every link

    def measure(self, context: Context) -> Iterator[Finding]:
        with agents(hub_scenario(self.devices), context.folder, self.mbit) as testbed:
            context.report("making the model")
            model_dir = decoder_directory(self.model, context.folder)
            with HubProcess(testbed, "pusher") as pusher:
                yield from _Pushes(self, testbed, pusher, model_dir, context.report).measure()

    def summary(self, rows: Sequence[Finding]) -> Summary:
        return summarise(f"{self.devices} devices, {self.mbit:g} Mbit/s", rows)


class _Pushed(NamedTuple):
    """One push, as the coordinator counts it. `passed_bytes`: from device to device."""

    seconds: float
    sent_bytes: int
    passed_bytes: int

    @property
    def moved_bytes(self) -> int:
        return self.sent_bytes + self.passed_bytes


class _Pushes:
    """The measurements of one home. Their order matters, because each relies on what the last one left in the stores."""

    def __init__(self, push: Push, testbed: Testbed, pusher: HubProcess, model_dir: Path, report: Report) -> None:
        self._mbit, self._testbed, self._pusher, self._report = push.mbit, testbed, pusher, report
        self._model_dir, self._cache_dir = model_dir, testbed.folder / "manifests"
        self._spec = read_spec(model_dir).model_copy(update={"weights": push.weights})
        self._hub, self._names = testbed.scenario.coordinator_device, agent_names(testbed)
        self._stores = [testbed.folder / name / "store" for name in self._names]
        self._ids: dict[str, str] = {}
        self._refs: tuple[ChunkRef, ...] = ()
        self._killed_peak_bytes = 0  # of a coordinator that was killed

    def measure(self) -> Iterator[Finding]:
        """Run all measurements (some minutes). Raises the errors of the pusher."""
        yield self._read()
        self._wait_for(self._names)
        shares, copies = self._plan("hmp", self._names), self._plan("sp", self._names)
        yield self._to_one()
        yield from self._to_all("each its share, all links alike", shares, self._mbit)
        moved = self._push("the same plan once more", shares).moved_bytes
        yield equal("the same plan once more: bytes of weights that move", moved, 0, BYTES)
        yield self._load(shares)
        yield from self._without_one(shares)
        yield from self._to_all(f"each its share, uplink {_HUB_FACTOR} x", shares, self._mbit * _HUB_FACTOR)
        yield from self._to_all("each the whole model, all links alike", copies, self._mbit)
        yield self._interrupted(shares)
        yield from self._memory()

    # ---- measurements ----------------------------------------------------------------------------------------------

    def _read(self) -> Finding:
        self._report("reading the checkpoint")
        folders = {"model_dir": str(self._model_dir), "cache_dir": str(self._cache_dir)}
        read = self._pusher.call("read", _PUSH_SECONDS, weights=self._spec.weights, **folders)
        with Checkpoint(self._model_dir) as checkpoint:
            self._refs = cached_manifest(checkpoint, self._spec, self._cache_dir)
        size = format_bytes(read["num_bytes"])
        return without_target("time to read and hash the checkpoint, once", read["seconds"], format_seconds, size)

    def _to_one(self) -> Finding:
        self._empty_stores()
        done = self._push("pushing the whole model to one device", self._plan("local", self._names[:1]))
        rate = done.sent_bytes / done.seconds
        size, seconds = format_bytes(done.sent_bytes), format_seconds(done.seconds)
        detail = f"{size} in {seconds}, {format_rate(rate)} of {self._mbit:g} Mbit/s"
        share = rate * 8 / (self._mbit * 1e6)
        return at_least("to one device: share of the link's rate", share, LEAST_SHARE, PERCENT, detail)

    def _to_all(self, how: str, plan: TransformerPlan, hub_mbit: float) -> Iterator[Finding]:
        """Push a plan and compare with the least time that the links allow.

        That is the longer of the largest shard over its device's link and the coordinator's bytes over its uplink.
        """
        self._empty_stores()
        with self._uplink(hub_mbit):
            done = self._push(f"pushing to {plan.num_ranks} devices: {how}", plan)
        shards = self._shards(plan)
        largest = max(map(_bytes, shards))
        shard_seconds = largest * 8 / (min(self._mbit, hub_mbit) * 1e6)
        hub_seconds = _distinct_bytes(chain(*shards)) * 8 / (hub_mbit * 1e6)
        detail = (
            f"{format_seconds(done.seconds)}; largest shard {format_bytes(largest)}, "
            f"{format_bytes(done.sent_bytes)} from the coordinator over {hub_mbit:g} Mbit/s, "
            f"{format_bytes(done.passed_bytes)} passed on"
        )
        to_all = f"to {plan.num_ranks} devices, {how}: time over"
        ratio = done.seconds / max(shard_seconds, hub_seconds)
        yield at_most(f"{to_all} the least that the links allow", ratio, MOST_RATIO, RATIO, detail)
        if hub_seconds > shard_seconds:
            figure, detail = f"{to_all} that of the largest shard alone", "the whole model must cross the uplink once"
            yield without_target(figure, done.seconds / shard_seconds, RATIO, detail)

    def _load(self, plan: TransformerPlan) -> Finding:
        """Load the shards; compare each worker's peak memory with its base (that of a tiny model) and its shard."""
        tiny_dir = save_random_model(self._testbed.folder / "tiny", _TINY)
        base = self._beyond_weights(self._plan("hmp", self._names, read_spec(tiny_dir)), tiny_dir)
        beyond = self._beyond_weights(plan, self._model_dir)
        most = max(peak - least for peak, least in zip(beyond, base, strict=True))
        chunk = max(ref.num_bytes for ref in self._refs)
        detail = f"base {format_bytes(statistics.median(base))}, largest shard {format_bytes(max(_weight_bytes(plan)))}"
        figure = "a worker's peak while loading, beyond its base and its shard: at most one chunk"
        return at_most(figure, most, chunk, format_bytes, detail)

    def _without_one(self, before: TransformerPlan) -> Iterator[Finding]:
        """Remove the last device; the others get their missing chunks, from each other if possible."""
        *left, gone = self._names
        if agent := agent_of(self._testbed, gone):
            agent.terminate()
            psutil.wait_procs([agent], 10)
        self._wait_for(left)
        plan = self._plan("hmp", left)
        had = [{chunk.hash for chunk in shard} for shard in self._shards(before)[:-1]]
        shards, stored = self._shards(plan), set().union(*had)
        missing = [chunk for shard, own in zip(shards, had, strict=True) for chunk in shard if chunk.hash not in own]
        nowhere = _distinct_bytes(chunk for chunk in missing if chunk.hash not in stored)
        done = self._push("planning again without one device", plan)
        change = f"from {len(self._names)} devices to {len(left)}"
        detail = f"{format_bytes(done.moved_bytes)} of {format_bytes(_bytes(chain(*shards)))}"
        yield equal(f"{change}: only missing chunks move", done.moved_bytes, _bytes(missing), BYTES, detail)
        figure, detail = f"{change}: of these from the coordinator, those of no other device", format_bytes(nowhere)
        yield equal(figure, done.sent_bytes, nowhere, BYTES, detail)
        self._testbed.start_agent(gone)
        self._wait_for(self._names)

    def _interrupted(self, plan: TransformerPlan) -> Finding:
        """Kill the coordinator half-way through a push; the next one sends the rest."""
        self._empty_stores()
        self._report("killing the coordinator half-way")
        total = _bytes(chain(*self._shards(plan)))
        with self._uplink(self._mbit * _HUB_FACTOR):
            self._pusher.begin("push", **self._arguments(plan, self._model_dir))
            wait_until("half of the push", lambda: self._stored_bytes() > total / 2, _PUSH_SECONDS)
            self._killed_peak_bytes = peak_bytes(self._pusher.pid)
            self._pusher.restart()
            self._wait_for(self._names)  # leases have expired, and chunks in flight are stored
            missing = total - self._stored_bytes()
            moved = self._push("pushing the rest", plan).moved_bytes
        figure = "after the coordinator was killed half-way: the next one moves only missing chunks"
        return equal(figure, moved, missing, BYTES, f"{format_bytes(moved)} of {format_bytes(total)}")

    def _memory(self) -> Iterator[Finding]:
        coordinator = max(self._killed_peak_bytes, peak_bytes(self._pusher.pid))
        figure, detail = "the coordinator's peak over all of this", f"model {format_bytes(_bytes(self._refs))}"
        yield at_most(figure, coordinator, COORDINATOR_BYTES, format_bytes, detail)
        peak = max(peak_bytes(agent.pid) for name in self._names if (agent := agent_of(self._testbed, name)))
        yield without_target("an agent's peak over all of this", peak, format_bytes)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _wait_for(self, names: list[str]) -> None:
        """Wait until exactly these devices are usable, and note their ids."""
        self._ids |= self._pusher.call("devices", names=names)["ids"]

    def _plan(self, strategy: Strategy, names: Sequence[str], spec: ModelSpec | None = None) -> TransformerPlan:
        return equal_plan(spec or self._spec, strategy, [self._ids[name] for name in names])

    def _shards(self, plan: TransformerPlan) -> list[tuple[ChunkRef, ...]]:
        return [chunks_for_rank(self._refs, plan, rank) for rank in range(plan.num_ranks)]

    def _arguments(self, plan: TransformerPlan, model_dir: Path) -> dict[str, str]:
        """Of the pusher's calls."""
        return {"plan": plan.model_dump_json(), "model_dir": str(model_dir), "cache_dir": str(self._cache_dir)}

    def _push(self, step: str, plan: TransformerPlan) -> _Pushed:
        self._report(step)
        return _Pushed(**self._pusher.call("push", _PUSH_SECONDS, **self._arguments(plan, self._model_dir)))

    def _beyond_weights(self, plan: TransformerPlan, model_dir: Path) -> list[int]:
        """Each worker's peak memory less its planned weights, in bytes and by rank, once all are connected."""
        self._report(f"loading the shards of {plan.model.name}")
        self._pusher.call("load", _PUSH_SECONDS, **self._arguments(plan, model_dir))
        peaks = worker_peaks(self._testbed, self._names)
        self._pusher.call("unload")
        return [peak - held for peak, held in zip(peaks, _weight_bytes(plan), strict=True)]

    @contextmanager
    def _uplink(self, mbit: float) -> Iterator[None]:
        """Another rate of the coordinator's uplink."""
        self._testbed.network.set_mbit(self._hub, mbit)
        yield  # after an exception the testbed ends
        self._testbed.network.set_mbit(self._hub, self._mbit)

    def _stored_bytes(self) -> int:
        """Bytes of all completely stored chunks."""
        return sum(file.stat().st_size for store in self._stores for file in store.glob("??/" + "?" * 64))

    def _empty_stores(self) -> None:
        """Empty the stores. Agents notice it and report all chunks as missing."""
        for folder in chain.from_iterable(store.glob("??") for store in self._stores):
            shutil.rmtree(folder, ignore_errors=True)


def _bytes(chunks: Iterable[ChunkRef]) -> int:
    return sum(chunk.num_bytes for chunk in chunks)


def _distinct_bytes(chunks: Iterable[ChunkRef]) -> int:
    return _bytes({chunk.hash: chunk for chunk in chunks}.values())


def _weight_bytes(plan: TransformerPlan) -> list[int]:
    """Planned memory of the weights, by rank."""
    return [device.memory.weights + device.memory.embeddings for device in plan.devices]
