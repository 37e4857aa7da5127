"""Push benchmark: time and bytes to send weights from the coordinator to real agents on a testbed.

The coordinator has its own uplink. Rates are given as fractions of the link rate. The bytes counted by the coordinator are
compared with those computed from the chunk lists.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.chunk_layout import chunks_for_rank
from coordinator.models.checkpoint.families import read_spec
from coordinator.models.checkpoint.sharding import cached_manifest
from hearth.errors import BadSetting
from hearth.plan.model_spec import ModelSpec, WeightFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits, Strategy
from hearth.platform.units import format_bytes, format_rate, format_seconds
from hearth.wire.messages import ChunkRef
from tools.bench.findings import Finding, at_least, at_most, equal
from tools.bench.generation import save_random_decoder
from tools.bench.processes import HubProcess
from tools.bench.shares import shared_plan
from tools.bench.watch import agent_of, peak_bytes
from tools.testbed import Testbed
from tools.testbed.cluster import wait_until

LEAST_SHARE = 0.85  # target for a push to one device: fraction of the link's rate
MOST_TIMES_LARGEST = 1.3  # target for a push to several: time / least time that the links allow
COORDINATOR_BYTES = 256 << 20  # target: most resident memory of the coordinator, independent of the model's size
_HUB_FACTOR = 4  # uplink of the coordinator / link of a device, when the uplink must not be the bottleneck
_PUSH_SECONDS = 900.0  # timeout of a push
_PROMISE = GenerationLimits(kv_tokens=512, max_sequences=4, prefill_rows=128, context=128)
# A tiny model: its workers show the base memory of any worker, with sockets and threads.
_TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip


class PushBench:
    """Runs on a started testbed with agents on all devices except the hub."""

    def __init__(
        self,
        testbed: Testbed,
        model_dir: Path,
        weights: WeightFormat,
        mbit: float,
        report: Callable[[str], None],
        found: Callable[[Finding], None],
    ) -> None:
        """`found` is called with each figure as soon as it is measured."""
        self._testbed, self._report, self._mbit, self._found = testbed, report, mbit, found
        self._model_dir, self._cache_dir = model_dir, testbed.folder / "manifests"
        self._spec = read_spec(model_dir).model_copy(update={"weights": weights})
        self._hub = testbed.scenario.coordinator_device
        self._names = [device.name for device in testbed.scenario.devices if device.name != self._hub]
        if len(self._names) < 2:
            raise BadSetting(setting="--devices", reason="a push needs at least two devices")
        self._pusher = HubProcess(testbed, "pusher")
        self._ids: dict[str, str] = {}
        self._refs: tuple[ChunkRef, ...] = ()
        self._killed_peak_bytes = 0  # of a coordinator that was killed

    def __enter__(self) -> PushBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._pusher.__exit__(None, None, None)

    def run(self) -> None:
        """Run all measurements (some minutes). Raises the errors of the pusher."""
        self._testbed.set_mbit(self._mbit)
        self._report("reading the checkpoint")
        self._read()
        self._wait_for(self._names)
        everyone = self._plan("hmp", self._names)
        self._to_one()
        self._to_all("each its share, all links alike", everyone, self._mbit)
        self._again(everyone)
        self._load(everyone)
        self._without_one(everyone)
        self._to_all(f"each its share, uplink {_HUB_FACTOR} x", everyone, self._mbit * _HUB_FACTOR)
        self._to_all("each the whole model, all links alike", self._plan("sp", self._names), self._mbit)
        self._interrupted(everyone)
        self._memory()

    # ---- what is measured ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        read = self._pusher.call(
            "read",
            _PUSH_SECONDS,
            model_dir=str(self._model_dir),
            cache_dir=str(self._cache_dir),
            weights=self._spec.weights,
        )
        with Checkpoint(self._model_dir) as checkpoint:
            self._refs = cached_manifest(checkpoint, self._spec, self._cache_dir)
        self._say(
            "checkpoint read and hashed, once",
            f"{format_bytes(read['num_bytes'])} in {format_seconds(read['seconds'])}",
            read["seconds"],
        )

    def _to_one(self) -> None:
        self._empty()
        self._report("pushing the whole model to one device")
        done = self._push(self._plan("local", self._names[:1]))
        share = done["sent_bytes"] * 8 / done["seconds"] / (self._mbit * 1e6)
        self._found(
            at_least(
                "to one device: share of the link's rate", share, LEAST_SHARE,
                f"{share:.1%} ({format_bytes(done['sent_bytes'])} in {format_seconds(done['seconds'])}, "
                f"{format_rate(done['sent_bytes'] / done['seconds'])} of {self._mbit:g} Mbit/s)",
                f"at least {LEAST_SHARE:.0%}",
            )
        )  # fmt: skip

    def _to_all(self, how: str, plan: TransformerPlan, hub_mbit: float) -> None:
        """Push a plan and compare with the least time that the links allow.

        That is the longer of the largest shard over its device's link and the coordinator's bytes over its uplink.
        """
        self._empty()
        self._report(f"pushing to {plan.num_ranks} devices: {how}")
        self._testbed.network.set_mbit(self._hub, hub_mbit)
        done = self._push(plan)
        self._testbed.network.set_mbit(self._hub, self._mbit)
        shards = self._shards(plan)
        largest = max(_bytes(shard) for shard in shards)
        once = _bytes({chunk.hash: chunk for shard in shards for chunk in shard}.values())
        shard_seconds = largest * 8 / (min(self._mbit, hub_mbit) * 1e6)
        least = max(shard_seconds, once * 8 / (hub_mbit * 1e6))
        times = done["seconds"] / least
        said = (
            f"{times:.2f} x ({format_seconds(done['seconds'])}; largest shard {format_bytes(largest)}, "
            f"{format_bytes(done['sent_bytes'])} from the coordinator over {hub_mbit:g} Mbit/s, "
            f"{format_bytes(done['passed_bytes'])} passed on)"
        )
        what = f"to {plan.num_ranks} devices, {how}: time over the least that the links allow"
        self._found(at_most(what, times, MOST_TIMES_LARGEST, said, f"at most {MOST_TIMES_LARGEST}"))
        if least == shard_seconds:
            return
        self._say(
            f"to {plan.num_ranks} devices, {how}: time over that of the largest shard alone",
            f"{done['seconds'] / shard_seconds:.2f} x (the model crosses the uplink once, whatever is done)",
            done["seconds"] / shard_seconds,
        )

    def _again(self, plan: TransformerPlan) -> None:
        self._report("the same plan once more")
        done = self._push(plan)
        moved = done["sent_bytes"] + done["passed_bytes"]
        self._found(equal("the same plan once more: bytes of weights that move", moved, 0, f"{moved} bytes", "0 bytes"))

    def _load(self, plan: TransformerPlan) -> None:
        """Load the shards; compare each worker's peak memory with its base (that of a tiny model) and its shard."""
        self._report("loading the shards")
        tiny_dir = save_random_decoder(self._testbed.folder / "tiny", _TINY)
        tiny = self._plan("hmp", self._names, read_spec(tiny_dir))
        tiny_peaks = self._peaks(tiny, tiny_dir)
        peaks = self._peaks(plan, self._model_dir)
        largest_chunk = max(chunk.num_bytes for chunk in self._refs)
        bases = [peak - held for peak, held in zip(tiny_peaks, _shard_bytes(tiny), strict=True)]
        beyond = zip(peaks, bases, _shard_bytes(plan), strict=True)
        most = max(peak - base - held for peak, base, held in beyond)
        self._found(
            at_most(
                "a worker's peak while loading, beyond its base and its shard", most, largest_chunk,
                f"{format_bytes(most)} (base {format_bytes(statistics.median(bases))}, "
                f"largest shard {format_bytes(max(_shard_bytes(plan)))})",
                f"at most one chunk: {format_bytes(largest_chunk)}",
            )
        )  # fmt: skip

    def _without_one(self, before: TransformerPlan) -> None:
        """Remove the last device; the others get their missing chunks, from each other if possible."""
        self._report("planning again without one device")
        gone, left = self._names[-1], self._names[:-1]
        self._end_agent(gone)
        self._wait_for(left)
        plan = self._plan("hmp", left)
        had = {
            name: {chunk.hash for chunk in shard} for name, shard in zip(self._names, self._shards(before), strict=True)
        }
        lacking = {
            name: [chunk for chunk in shard if chunk.hash not in had[name]]
            for name, shard in zip(left, self._shards(plan), strict=True)
        }
        elsewhere = set().union(*(had[name] for name in left))
        needed = _bytes(chunk for chunks in lacking.values() for chunk in chunks)
        nowhere = _bytes({c.hash: c for chunks in lacking.values() for c in chunks if c.hash not in elsewhere}.values())
        done = self._push(plan)
        moved = done["sent_bytes"] + done["passed_bytes"]
        whole = _bytes(chunk for shard in self._shards(plan) for chunk in shard)
        change = f"from {len(self._names)} devices to {len(left)}"
        self._found(
            equal(f"{change}: bytes that move", moved, needed,
                  f"{moved} ({format_bytes(moved)}; all shards: {format_bytes(whole)})", f"{needed}, what is missing")
        )  # fmt: skip
        self._found(
            equal(f"{change}: of these from the coordinator", done["sent_bytes"], nowhere,
                  f"{done['sent_bytes']} ({format_bytes(done['sent_bytes'])})", f"{nowhere}, what no other has")
        )  # fmt: skip
        self._testbed.start_agent(gone)
        self._wait_for(self._names)

    def _interrupted(self, plan: TransformerPlan) -> None:
        """Kill the coordinator half-way through a push; the next one sends the rest."""
        self._empty()
        self._report("killing the coordinator half-way")
        total = _bytes(chunk for shard in self._shards(plan) for chunk in shard)
        self._testbed.network.set_mbit(self._hub, self._mbit * _HUB_FACTOR)
        self._pusher.begin("push", plan=self._json(plan), **self._paths())
        wait_until("half of the push", lambda: sum(map(self._stored_bytes, self._names)) > total / 2, _PUSH_SECONDS)
        self._killed_peak_bytes = peak_bytes(psutil.Process(self._pusher.pid))
        self._pusher.kill()
        self._pusher = HubProcess(self._testbed, "pusher")
        self._wait_for(self._names)  # leases have expired, and chunks in flight are stored
        stored = sum(map(self._stored_bytes, self._names))
        done = self._push(plan)
        moved = done["sent_bytes"] + done["passed_bytes"]
        self._testbed.network.set_mbit(self._hub, self._mbit)
        self._found(
            equal("after the coordinator was killed half-way: bytes that the next one moves", moved, total - stored,
                  f"{moved} ({format_bytes(moved)} of {format_bytes(total)})", f"{total - stored}, what was not there")
        )  # fmt: skip

    def _memory(self) -> None:
        coordinator = max(self._killed_peak_bytes, self._pusher.call("peak")["num_bytes"])
        size = _bytes(self._refs)
        agents = max(peak_bytes(agent) for name in self._names if (agent := agent_of(self._testbed, name)) is not None)
        self._found(
            at_most("the coordinator's peak over all of this", coordinator, COORDINATOR_BYTES,
                    f"{format_bytes(coordinator)} (model {format_bytes(size)})",
                    f"at most {format_bytes(COORDINATOR_BYTES)}")
        )  # fmt: skip
        self._say("an agent's peak over all of this", format_bytes(agents), agents)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _wait_for(self, names: Sequence[str]) -> None:
        self._ids = {**self._ids, **self._pusher.call("devices", names=list(names))["ids"]}

    def _plan(self, strategy: Strategy, names: Sequence[str], spec: ModelSpec | None = None) -> TransformerPlan:
        ids = [self._ids[name] for name in names]
        return shared_plan(spec or self._spec, strategy, [1.0] * len(names), _PROMISE, ids)

    def _shards(self, plan: TransformerPlan) -> list[tuple[ChunkRef, ...]]:
        return [chunks_for_rank(self._refs, plan, rank) for rank in range(plan.num_ranks)]

    def _push(self, plan: TransformerPlan) -> dict[str, Any]:
        return self._pusher.call("push", _PUSH_SECONDS, plan=self._json(plan), **self._paths())

    @staticmethod
    def _json(plan: TransformerPlan) -> str:
        return plan.model_dump_json()

    def _paths(self) -> Mapping[str, str]:
        return {"model_dir": str(self._model_dir), "cache_dir": str(self._cache_dir)}

    def _store(self, name: str) -> Path:
        return self._testbed.folder / name / "store"

    def _stored_bytes(self, name: str) -> int:
        """Bytes of completely stored chunks."""
        return sum(file.stat().st_size for file in self._store(name).glob("??/" + "?" * 64))

    def _empty(self) -> None:
        """Empty the stores. Agents notice it and report all chunks as missing."""
        for name in self._names:
            for folder in self._store(name).glob("??"):
                shutil.rmtree(folder, ignore_errors=True)

    def _end_agent(self, name: str) -> None:
        agent = agent_of(self._testbed, name)
        if agent is not None:
            agent.terminate()
            psutil.wait_procs([agent], 10)

    def _peaks(self, plan: TransformerPlan, model_dir: Path) -> list[int]:
        """Peak memory of each rank's worker in bytes, once all are connected."""
        paths = {**self._paths(), "model_dir": str(model_dir)}
        peaks = self._pusher.call("load", _PUSH_SECONDS, plan=self._json(plan), **paths)["peaks"]
        self._pusher.call("unload")
        return [peaks[device.device_id] for device in plan.devices]

    def _say(self, what: str, measured: str, value: float) -> None:
        self._found(Finding(what=what, measured=measured, value=value))


def _shard_bytes(plan: TransformerPlan) -> list[int]:
    return [device.memory.weights + device.memory.embeddings for device in plan.devices]


def _bytes(chunks: Any) -> int:
    return sum(chunk.num_bytes for chunk in chunks)
