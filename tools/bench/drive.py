"""Controls the engines and gloo processes of a benchmark: loads plans, runs steps on all devices at once, times them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, TypeAlias

from agent.daemon.store import ShardStore
from coordinator.devices.block_profiling import smooth_profiles
from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.chunk_layout import chunks_for_rank
from coordinator.models.checkpoint.families import read_spec
from coordinator.models.checkpoint.sharding import build_manifest, chunk_bytes
from hearth.errors import BadSetting
from hearth.plan.kernels import choose_kernels
from hearth.plan.model_spec import ModelSpec, WeightFormat
from hearth.plan.plan import DRAFT_RANK, TransformerPlan
from hearth.plan.profile import DECODING_TIMES, BlockProfile, ClusterProfile, DeviceProfile, Link
from hearth.wire.messages import ChunkRef, TraceEvent
from tools.bench.load import calmest_of
from tools.bench.plans import reference_plan
from tools.bench.processes import ProcessGroup
from tools.testbed import Scenario, Testbed

_FIRST_GLOO_PORT = 29511  # counts up with every group that joins, because the last one's may not be free yet
_NOMINAL_BYTES_PER_SECOND = 1e9  # of a link that is measured: a peer needs a rate, but only codecs use it
_STORE_BYTES = 1 << 40  # more than any model, so that no chunk is evicted


Traces: TypeAlias = tuple[tuple[TraceEvent, ...], ...]  # of one step, by rank


@dataclass(frozen=True)
class Sample:
    """One step, timed from the first device's start to the last one's end. Bytes are 0 unless it was traced."""

    seconds: float
    sums: list[float]
    sent_bytes: int = 0  # by all devices, forwarded tiles included
    traces: Traces = ()


def made_up_prompt(vocab_size: int, num_tokens: int) -> list[int]:
    """Token ids that do not repeat themselves soon, without the special tokens at the beginning of a vocabulary."""
    return [3 + (7919 * i) % (vocab_size - 3) for i in range(num_tokens)]


class StoredModel:
    """A checkpoint whose chunks are in one store that all runners map. `weights`: their format in a device's memory."""

    def __init__(self, model_dir: Path, store_dir: Path, weights: WeightFormat = "float32") -> None:
        self.directory = model_dir
        self.store_dir = store_dir
        self.spec: ModelSpec = read_spec(model_dir).model_copy(update={"weights": weights})
        store = ShardStore(store_dir, _STORE_BYTES, "bench")
        checkpoint = Checkpoint(model_dir)
        self.refs: tuple[ChunkRef, ...] = build_manifest(checkpoint, self.spec)
        for ref in self.refs:
            if store.missing((ref.hash,)):
                store.put(ref.hash, chunk_bytes(checkpoint, self.spec, ref.kind, ref.layer, ref.grain))


class EngineRunners(ProcessGroup):
    """The worker's engine on every device; keeps several plans loaded.

    `all_busy`: devices not taking part in a step or profile run a dummy load within their limits. Emulated devices share
    cores, caches and memory bandwidth, so one is faster while others idle, unlike real devices.
    """

    def __init__(self, testbed: Testbed, devices: Sequence[str], all_busy: bool = False) -> None:
        super().__init__(testbed, "runner")
        for name in devices:
            self.start(name, testbed.address(name))
        self._devices = tuple(devices) if all_busy else ()
        self._plans: dict[str, TransformerPlan] = {}

    def load(
        self,
        plan_id: str,
        plan: TransformerPlan,
        model: StoredModel,
        link_bytes_per_second: float,
        text: str = "",
        encrypt: bool = True,
        profile: ClusterProfile | None = None,
        draft: StoredModel | None = None,
    ) -> None:
        """Load and connect a plan, whose device names are the testbed's. `text`: the plan in the runners' file format.

        `profile`: the devices multiply with the kernels measured in it, as in a home; without, with their defaults.
        `draft`: the plan's draft model.
        """
        names = [device.name for device in plan.devices]
        self._plans[plan_id] = plan
        shards = [chunks_for_rank(model.refs, plan, rank) for rank in range(plan.num_ranks)]
        parts: list[dict[str, Any]] = [
            {"rank": rank, "chunks": [ref.model_dump() for ref in shard]} for rank, shard in enumerate(shards)
        ]
        kernels = {each.name: choose_kernels(each.blocks.kernels) for each in profile.devices} if profile else {}
        for name, part in zip(names, parts, strict=True):
            if choices := kernels.get(name, ()):  # older checkouts do not know this argument
                part["kernels"] = [choice.model_dump() for choice in choices]
        if draft is not None:
            parts[DRAFT_RANK]["draft"] = [ref.model_dump() for ref in draft.refs], str(draft.store_dir)
        text, store = text or plan.model_dump_json(), str(model.store_dir)
        encrypt = encrypt and plan.num_ranks > 1
        bound = self.call_all(names, "load", parts, plan_id=plan_id, plan=text, store=store, encrypt=encrypt)
        peers = self._peers(names, bound, link_bytes_per_second)
        others = [{"peers": [peer for peer in peers if peer["rank"] != rank]} for rank in range(plan.num_ranks)]
        self.call_all(names, "connect", others, plan_id=plan_id)

    def run(self, plan_id: str, num_rows: int, trace: bool = False) -> Sample:
        names = self._names(plan_id)
        with self._others_busy(names):
            parts = list(self.call_all(names, "run", plan_id=plan_id, num_rows=num_rows, trace=trace).values())
        sums = [sum(values) for values in zip(*(part["sums"] for part in parts), strict=True)]
        traces = _traces(parts)
        sent_bytes = sum(event.num_bytes for events in traces for event in events if event.lane == "send")
        return Sample(_seconds(parts), sums, sent_bytes, traces)

    def compute(self, plan_id: str, num_rows: int) -> Traces:
        """Run the computations of one step on all its devices at once, without any communication. Returns their traces."""
        names = self._names(plan_id)
        with self._others_busy(names):
            return _traces(self.call_all(names, "compute", plan_id=plan_id, num_rows=num_rows).values())

    def generate(self, plan_id: str, prompt: Sequence[int], num_tokens: int, **settings: Any) -> dict[str, Any]:
        """Generate one answer: `tokens`, and the seconds of `prefill` and of `decode` (all tokens except the first).

        `settings`: see `Runner.generate`.
        """
        names = self._names(plan_id)
        answers = self.call_all(
            names, "generate", plan_id=plan_id, prompt=list(prompt), num_tokens=num_tokens, **settings
        )  # fmt: skip
        return answers[names[0]]

    def unload(self, plan_id: str) -> None:
        self.call_all(self._names(plan_id), "unload", plan_id=plan_id)
        del self._plans[plan_id]

    def profile(self, names: Sequence[str], spec: ModelSpec, seq_len: int) -> dict[str, BlockProfile]:
        """Profile these devices at once. No two may share a core."""
        threads = [{"num_threads": self._testbed.device(name).num_threads} for name in names]
        model = spec.model_dump(mode="json")
        with self._others_busy(names):
            answers = self.call_all(names, "profile", threads, model=model, seq_len=seq_len)
        return {name: BlockProfile.model_validate(answer["blocks"]) for name, answer in answers.items()}

    @contextmanager
    def _others_busy(self, names: Sequence[str]) -> Iterator[None]:
        others = [name for name in self._devices if name not in names]
        self.call_all(others, "begin_to_compute")
        yield  # after an exception the testbed ends the runners
        self.call_all(others, "end_computing")

    def measure_link(self, source: str, target: str, seconds: float) -> Link:
        """Measure a link over a data-plane socket for `seconds`."""
        with self._link(source, target):
            answers = {"do": "answer_link"}
            measured = self.call_each({target: answers, source: {"do": "measure_link", "seconds": seconds}})
        return Link(source=source, target=target, **measured[source])

    def ping_seconds(self, source: str, target: str, num_bytes: int, count: int) -> float:
        """One-way seconds of a message of this size over a data-plane socket."""
        ping = {"do": "ping_link", "num_bytes": num_bytes, "count": count}
        with self._link(source, target):
            echoed = self.call_each({target: {"do": "answer_link", "echo": True}, source: ping})
        return float(echoed[source]["seconds"])

    @contextmanager
    def _link(self, *ends: str) -> Iterator[None]:
        """An encrypted data-plane connection between two devices."""
        bound = self.call_all(ends, "open_link", [{"rank": rank} for rank in range(len(ends))])
        peers = self._peers(ends, bound, _NOMINAL_BYTES_PER_SECOND)
        self.call_all(ends, "connect_link", [{"peer": peer} for peer in reversed(peers)])
        yield  # after an exception the testbed ends the runners
        self.call_all(ends, "close_link")

    def _names(self, plan_id: str) -> list[str]:
        return [device.name for device in self._plans[plan_id].devices]

    def _peers(
        self, names: Sequence[str], bound: Mapping[str, Mapping[str, Any]], bytes_per_second: float
    ) -> list[dict[str, Any]]:
        return [
            {"rank": rank, "host": self._testbed.address(name), "bytes_per_second": bytes_per_second, **bound[name]}
            for rank, name in enumerate(names)
        ]


class GlooRunners(ProcessGroup):
    """torch.distributed on gloo; `join` selects the devices that take part."""

    def __init__(self, testbed: Testbed, devices: Sequence[str]) -> None:
        super().__init__(testbed, "baselines")
        self._members: list[str] = []
        self._next_port = _FIRST_GLOO_PORT
        for name in devices:
            self.start(name, "gloo")

    def join(self, devices: Sequence[str]) -> None:
        if self._members == list(devices):
            return
        if self._members:
            self.call_all(self._members, "leave")
        self._members = list(devices)
        host, ranks = self._testbed.address(devices[0]), [{"rank": rank} for rank in range(len(devices))]
        self.call_all(devices, "join", ranks, num_ranks=len(devices), host=host, port=self._next_port)
        self._next_port += 1

    def load(self, model: StoredModel, packed: bool) -> None:
        """Load the model, with one of both kinds of matrices; both may be loaded side by side."""
        self.call_all(self._members, "load", model_dir=str(model.directory), packed=packed)

    def unload(self) -> None:
        self.call_all(self._members, "unload")

    def run(self, num_rows: int, wire: str, packed: bool) -> Sample:
        """Run one step with one of both kinds of matrices. `sent_bytes` are counted by the network interfaces, with headers."""
        parts = list(self.call_all(self._members, "run", num_rows=num_rows, wire=wire, packed=packed).values())
        return Sample(_seconds(parts), parts[0]["sums"], sum(part["sent_bytes"] for part in parts))


def _traces(parts: Iterable[Mapping[str, Any]]) -> Traces:
    return tuple(tuple(map(TraceEvent.model_validate, part["trace"])) for part in parts)


def _seconds(parts: Sequence[Mapping[str, Any]]) -> float:
    """Seconds from the first device's start to the last one's end."""
    return float(max(part["ended"] for part in parts) - min(part["began"] for part in parts))


# ---- profiles for the planners -----------------------------------------------------------------------------------------

Report = Callable[[str], None]

_WITHOUT_LIMIT_BYTES = 8 << 30  # planner's memory budget of a device without a limit
_LINK_SECONDS = 1.0  # of one link measurement
_PROBE_KEY = "probe"
_PROBE_STEPS, _MOST_PROBE_STEPS = 3, 11  # least and most steps of a probe
_PROBE_SECONDS = 0.6  # intended total of a probe: short steps vary more, so more of them are run
_MOST_ATTEMPTS = 3  # to measure without background load


class Profiles:
    """Profiles of one testbed with started runners. Memory limits are the scenario's, not the testbed's.

    `repeat_disturbed`: measure again what other programs disturbed. Raises BadSetting if devices share a medium.
    """

    def __init__(
        self, scenario: Scenario, testbed: Testbed, engine: EngineRunners, report: Report, repeat_disturbed: bool = True
    ) -> None:
        if scenario.media:
            reason = f"the devices of {scenario.name} share a medium, which only the experiment `scenarios` profiles"
            raise BadSetting(setting="scenario", reason=reason)
        self._scenario, self._testbed, self._engine, self._report = scenario, testbed, engine, report
        self._most_attempts = _MOST_ATTEMPTS if repeat_disturbed else 1
        self._blocks: dict[tuple[str, str, int], BlockProfile] = {}
        self._links: dict[tuple[float | None, str, str], Link] = {}

    def current(self, model: StoredModel, names: Sequence[str], seq_len: int, mbit: float | None) -> ClusterProfile:
        """The profile of these devices, scaled to the current speed of real steps, because the host's speed drifts."""
        return self.rescaled(self.profiled(model, names, seq_len, mbit), model, seq_len)

    def rescaled(self, cluster: ClusterProfile, model: StoredModel, seq_len: int) -> ClusterProfile:
        """The profile, scaled to the current speed of real steps.

        The times of decoding are left as they are: a step of many rows is bound by compute, a token by memory. Measured with
        a plan on one device: in a step of several, a device that waits saves CPU quota and then bursts.
        """
        alone = reference_plan(model.spec, cluster, seq_len)
        self._engine.load(_PROBE_KEY, alone, model, link_bytes_per_second=1e9, profile=cluster)
        wanted = math.ceil(_PROBE_SECONDS / self._engine.run(_PROBE_KEY, seq_len).seconds)
        count = min(max(wanted, _PROBE_STEPS), _MOST_PROBE_STEPS)
        seconds = statistics.median(self._engine.run(_PROBE_KEY, seq_len).seconds for _ in range(count))
        self._engine.unload(_PROBE_KEY)
        factor = seconds / alone.predicted.latency_seconds
        devices = tuple(
            device.model_copy(update={"blocks": _with_step_speed(device.blocks, factor)}) for device in cluster.devices
        )
        return cluster.model_copy(update={"devices": devices})

    def profiled(self, model: StoredModel, names: Sequence[str], seq_len: int, mbit: float | None) -> ClusterProfile:
        """The profile as it is measured, once for each shape and length, as a home does."""
        spec = model.spec
        shape = spec.model_copy(update={"num_layers": 1, "name": "", "vocab_size": 1}).model_dump_json()
        missing = [name for name in names if (name, shape, seq_len) not in self._blocks]
        for together in self._one_per_core(missing):
            self._report(f"{self._scenario.name}: profiling {spec.name} on {', '.join(together)}")
            found = calmest_of(partial(self._engine.profile, together, spec, seq_len), self._most_attempts)
            self._blocks.update({(name, shape, seq_len): blocks for name, blocks in found.items()})
        blocks = smooth_profiles({name: self._blocks[name, shape, seq_len] for name in names})
        memory = {device.name: device.memory_bytes or _WITHOUT_LIMIT_BYTES for device in self._scenario.devices}
        return ClusterProfile(
            devices=tuple(
                DeviceProfile(device_id=name, name=name, budget_bytes=memory[name], blocks=blocks[name])
                for name in names
            ),
            links=tuple(self._link(*pair, mbit) for pair in permutations(names, 2)),
        )

    def _one_per_core(self, names: Sequence[str]) -> list[list[str]]:
        """Groups of devices that share no core. A device that is not pinned to a core has its own group."""
        groups: list[dict[int | None, str]] = []  # by core
        for name in names:
            core = self._testbed.device(name).core
            free = (group for group in groups if core not in group and None not in (core, *group))
            if (group := next(free, None)) is not None:
                group[core] = name
            else:
                groups.append({core: name})
        return [list(group.values()) for group in groups]

    def _link(self, source: str, target: str, mbit: float | None) -> Link:
        """The link, measured once per rate. If all links and devices are equal, one pair is measured for all."""
        devices = self._scenario.devices
        alike = len({(device.mbit if mbit is None else 0, device.cpu_share, device.medium) for device in devices}) == 1
        first, second = (devices[0].name, devices[1].name) if alike else (source, target)
        if (mbit, first, second) not in self._links:
            rate = "" if mbit is None else f" at {mbit:.0f} Mbit/s"
            self._report(f"{self._scenario.name}: measuring the link from {first} to {second}{rate}")
            measure = partial(self._engine.measure_link, first, second, _LINK_SECONDS)
            self._links[mbit, first, second] = calmest_of(measure, self._most_attempts)
        return self._links[mbit, first, second].model_copy(update={"source": source, "target": target})


def _with_step_speed(blocks: BlockProfile, factor: float) -> BlockProfile:
    """The profile with all times but those of decoding multiplied by `factor`."""
    return blocks.scaled(factor).model_copy(update={name: getattr(blocks, name) for name in DECODING_TIMES})
