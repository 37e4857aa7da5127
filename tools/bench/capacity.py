"""Capacity benchmark: a model too large for any single device, served by several under kernel memory limits.

The real coordinator plans, deploys and serves. After as many concurrent answers of full context as the plan allows, the
planned memory of each device is compared with its worker's peak resident memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import psutil

from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.chunk_layout import all_chunks, num_chunk_weights
from coordinator.models.checkpoint.families import read_spec
from hearth.plan.model_spec import WeightFormat
from hearth.plan.parts import PlannedDevice
from hearth.plan.plan import TransformerPlan
from hearth.platform.units import format_bytes
from tools.bench.client_runner import ClientRunner
from tools.bench.clients import Ask, Outcome
from tools.bench.findings import Finding, at_least, at_most, equal, table
from tools.bench.watch import peak_bytes, worker_of
from tools.testbed import Testbed

COORDINATOR_BYTES = 256 << 20  # most resident memory of the coordinator
PLAN_TOLERANCE = 0.10  # of the actual peak against the planned memory
_SAMPLE_SECONDS = 0.2  # interval of memory samples


class CapacityBench:
    """Runs on a started testbed with agents on all devices except the hub."""

    def __init__(
        self,
        testbed: Testbed,
        model_dir: Path,
        weights: WeightFormat,
        context: int,
        sequences: int,
        report: Callable[[str], None],
    ) -> None:
        self._testbed, self._model_dir, self._report = testbed, model_dir, report
        self._spec = read_spec(model_dir).model_copy(update={"weights": weights})
        self._context, self._sequences = context, sequences
        self._names = [d.name for d in testbed.scenario.devices if d.name != testbed.scenario.coordinator_device]
        self._held: dict[str, int] = dict.fromkeys(self._names, 0)
        self._clients = ClientRunner(testbed)

    def __enter__(self) -> CapacityBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clients.__exit__(kind, error, trace)

    def run(self) -> tuple[list[Finding], str]:
        """The findings, and a table with one row per device."""
        ended = threading.Event()
        watching = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        watching.start()
        try:
            plan, outcomes, coordinator = self._serve()
            workers = {name: worker for name in self._names if (worker := worker_of(self._testbed, name)) is not None}
            peaks = {name: peak_bytes(worker) for name, worker in workers.items()}
        finally:
            ended.set()
            watching.join()
        return self._findings(plan, outcomes, peaks, peak_bytes(coordinator)), self._by_device(plan, peaks)

    def _serve(self) -> tuple[TransformerPlan, list[Outcome], psutil.Process]:
        self._report("planning, pushing and loading")
        coordinator = self._testbed.start_coordinator(
            str(self._model_dir), "--weights", self._spec.weights, "--context", str(self._context), "--sequences",
            str(self._sequences), "--min-devices", str(len(self._names)),
        )  # fmt: skip
        plan = self._clients.ready()
        self._report("answering")
        new = max(self._context // 4, 1)
        asks = [
            Ask(prompt=[3 + (7919 * i + number) % (self._spec.vocab_size - 3) for i in range(self._context - new)],
                max_tokens=new)
            for number in range(self._sequences)
        ]  # fmt: skip
        return plan, self._clients.answers(asks, together=True), psutil.Process(coordinator.pid)

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            for name in self._names:
                self._held[name] = max(self._held[name], self._testbed.held_bytes(name))

    # ---- what is said ----------------------------------------------------------------------------------------------

    def _findings(
        self, plan: TransformerPlan, outcomes: list[Outcome], peaks: Mapping[str, int], coordinator_bytes: int
    ) -> list[Finding]:
        limits = {name: self._testbed.device(name).memory_bytes or 0 for name in self._names}
        new = max(self._context // 4, 1)
        whole = sum(1 for each in outcomes if not each.error and len(each.tokens) == new)
        errors = sorted({each.error for each in outcomes if each.error})
        off = {device.name: peaks.get(device.name, 0) / device.memory.total - 1 for device in plan.devices}
        worst = max(off.values(), key=abs)
        fullest = max(self._names, key=lambda name: self._held[name] / max(limits[name], 1))
        killed = sum(self._testbed.times_out_of_memory(name) for name in self._names)
        weights = self._weights_bytes()
        smallest = min(limits.values())
        return [
            at_least(f"the model's weights in {self._spec.weights}, over a device's limit", weights / smallest, 1.0,
                     f"{weights / smallest:.2f} x ({format_bytes(weights)}, limit {format_bytes(smallest)})",
                     "more than any device has"),
            equal("answers of full length", whole, len(outcomes),
                  f"{whole} of {len(outcomes)}, at once, {self._context} tokens each {'; '.join(errors)}", "all"),
            at_most("the most that a device held, of its limit", self._held[fullest] / max(limits[fullest], 1), 1.0,
                    f"{self._held[fullest] / max(limits[fullest], 1):.1%} ({format_bytes(self._held[fullest])} on "
                    f"{fullest}, agent and worker)", "at most 100%"),
            equal("killed for memory", killed, 0, str(killed), "none"),
            at_most("a worker's actual peak against what was planned, the worst device", abs(worst), PLAN_TOLERANCE,
                    f"{worst:+.1%}", f"within {PLAN_TOLERANCE:.0%}"),
            at_most("the coordinator's peak", coordinator_bytes, COORDINATOR_BYTES, format_bytes(coordinator_bytes),
                    f"at most {format_bytes(COORDINATOR_BYTES)}"),
        ]  # fmt: skip

    def _weights_bytes(self) -> int:
        """Size of all weights in memory, if one device held them."""
        with Checkpoint(self._model_dir):
            weights = sum(num_chunk_weights(self._spec, kind, grain) for kind, _, grain in all_chunks(self._spec))
        return int(weights * self._spec.matrix_bytes)

    def _by_device(self, plan: TransformerPlan, peaks: Mapping[str, int]) -> str:
        rows = [self._device_row(device, peaks.get(device.name, 0)) for device in plan.devices]
        headings = (
            "device", "limit", "weights", "embeddings", "KV cache", "activations", "workspace", "planned",
            "actual peak", "off by",
        )  # fmt: skip
        return f"\n{plan.body.title} on {', '.join(device.name for device in plan.devices)}\n\n{table(headings, rows)}"

    def _device_row(self, device: PlannedDevice, peak: int) -> list[str]:
        memory = device.memory
        parts = (memory.weights, memory.embeddings, memory.kv_cache, memory.activations, memory.workspace, memory.total)
        limit = self._testbed.device(device.name).memory_bytes or 0
        return [
            device.name, format_bytes(limit), *map(format_bytes, parts), format_bytes(peak),
            f"{peak / memory.total - 1:+.1%}",
        ]  # fmt: skip
