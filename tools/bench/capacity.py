"""Kind `capacity`: a model too large for any single device, served by several under kernel memory limits.

The real coordinator plans, deploys and serves. After as many concurrent answers of full context as the plan allows, the
planned memory of each device is compared with its worker's peak resident memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from coordinator.models.checkpoint.chunk_layout import all_chunks, num_chunk_weights
from hearth.plan.model_spec import ModelSpec, WeightFormat
from hearth.plan.parts import MemoryUse
from hearth.platform.units import format_bytes
from tools.bench.clients import Outcome, Request
from tools.bench.experiment import Context, Experiment
from tools.bench.findings import COUNT, PERCENT, RATIO, Finding, at_least, at_most, equal, summarise, within
from tools.bench.homes import GenerationClients, Model, agent_names, agents, decoder_directory, hub_scenario
from tools.bench.results import Summary, Table
from tools.bench.watch import COORDINATOR_BYTES, MemoryWatch, peak_bytes, worker_peaks
from tools.testbed.scenario import NumBytes

PLAN_TOLERANCE = 0.10  # target: largest difference of the actual peak from the planned memory, relative to it


class DeviceMemory(BaseModel):
    """Memory of one device: its limit, its part in the plan, and its peaks (of the worker, and of all its processes)."""

    model_config = ConfigDict(frozen=True)

    device: str
    limit_bytes: int
    planned: MemoryUse
    worker_peak_bytes: int
    held_peak_bytes: int

    @property
    def off(self) -> float:
        """The worker's peak / planned - 1."""
        return self.worker_peak_bytes / self.planned.total - 1

    @property
    def held_share(self) -> float:
        return self.held_peak_bytes / self.limit_bytes


class Capacity(Experiment):
    """Answers of full context by a model that fits no single device, and the memory that they take."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(Finding | DeviceMemory)

    model: Model = "gpt2-large"
    weights: WeightFormat = "bfloat16"
    devices: int = Field(4, ge=2, le=4)
    limit: Annotated[NumBytes, Field(ge=64 << 20)] = 900_000_000  # of each device's memory, enforced by the kernel
    agent: NumBytes = 80_000_000  # part of the limit reserved for the agent
    context: int = Field(256, ge=2)  # tokens of each answer, with its prompt
    sequences: int = Field(4, ge=1, le=64)  # concurrent answers
    mbit: float = Field(500.0, ge=1)  # real rate of every link

    def measure(self, context: Context) -> Iterator[Finding | DeviceMemory]:
        scenario = hub_scenario(self.devices, memory_bytes=self.limit)
        reserved = ("--memory-bytes", str(self.limit - self.agent))
        with agents(scenario, context.folder, self.mbit, *reserved) as testbed, GenerationClients(testbed) as clients:
            context.report("making the model")
            model_dir = decoder_directory(self.model, context.folder)
            names = agent_names(testbed)
            with MemoryWatch({name: testbed.cgroups[name].held_bytes for name in names}) as watch:
                context.report("planning, pushing and loading")
                coordinator = testbed.start_coordinator(
                    str(model_dir), "--weights", self.weights, "--context", str(self.context), "--sequences",
                    str(self.sequences), "--min-devices", str(self.devices),
                )  # fmt: skip
                plan = clients.served_plan()
                context.report("answering")
                outcomes = clients.generate(self._requests(plan.model.vocab_size))
                peaks = worker_peaks(testbed, [device.name for device in plan.devices])
            rows = [
                DeviceMemory(
                    device=device.name, limit_bytes=self.limit, planned=device.memory, worker_peak_bytes=peak,
                    held_peak_bytes=watch.peak[device.name],
                )
                for device, peak in zip(plan.devices, peaks, strict=True)
            ]  # fmt: skip
            killed = sum(testbed.cgroups[name].times_out_of_memory() for name in names)
            yield from self._of_answers(plan.model, outcomes)
            yield from _of_memory(rows, killed, peak_bytes(coordinator.pid))
            yield from rows

    @property
    def _new_tokens(self) -> int:
        return max(self.context // 4, 1)

    def _requests(self, vocab_size: int) -> list[Request]:
        length, num = self.context - self._new_tokens, self._new_tokens
        ids = [[3 + (7919 * i + start) % (vocab_size - 3) for i in range(length)] for start in range(self.sequences)]
        return [Request(token_ids=prompt, max_tokens=num) for prompt in ids]

    def _of_answers(self, spec: ModelSpec, outcomes: Sequence[Outcome]) -> Iterator[Finding]:
        size = int(sum(num_chunk_weights(spec, kind, grain) for kind, _, grain in all_chunks(spec)) * spec.matrix_bytes)
        detail = f"{format_bytes(size)}, limit {format_bytes(self.limit)}"
        figure = f"the model's weights in {spec.weights}, over a device's limit"
        yield at_least(figure, size / self.limit, 1.0, RATIO, detail)
        whole = sum(not each.error and len(each.tokens) == self._new_tokens for each in outcomes)
        errors = "; ".join(sorted({each.error for each in outcomes if each.error}))
        detail = f"at once, {self.context} tokens each {errors}".strip()
        yield equal("answers of full length", whole, len(outcomes), COUNT, detail)

    def summary(self, rows: Sequence[Finding | DeviceMemory]) -> Summary:
        findings = [row for row in rows if isinstance(row, Finding)]
        devices = [row for row in rows if isinstance(row, DeviceMemory)]
        title = (
            f"{self.devices} devices of {format_bytes(self.limit)}, {self.weights}, "
            f"{self.sequences} answers of {self.context} tokens at once"
        )
        return summarise(title, findings, Table.of("Memory by device", _COLUMNS, map(_cells, devices)))


def _of_memory(rows: Sequence[DeviceMemory], killed: int, coordinator_bytes: int) -> Iterator[Finding]:
    fullest = max(rows, key=lambda row: row.held_share)
    detail = f"{format_bytes(fullest.held_peak_bytes)} on {fullest.device}, agent and worker"
    yield at_most("the most that a device held, of its limit", fullest.held_share, 1.0, PERCENT, detail)
    yield equal("processes killed for memory", killed, 0, COUNT)
    worst = max((row.off for row in rows), key=abs)
    yield within("a worker's actual peak against the planned memory, worst device", worst, PLAN_TOLERANCE)
    yield at_most("the coordinator's peak", coordinator_bytes, COORDINATOR_BYTES, format_bytes)


_COLUMNS = ("device", "limit", "weights", "embeddings", "KV cache", "activations", "workspace", "planned", "actual peak",
            "off by")  # fmt: skip


def _cells(row: DeviceMemory) -> tuple[str, ...]:
    use = row.planned
    planned = (use.weights, use.embeddings, use.kv_cache, use.activations, use.workspace, use.total)
    parts = (row.limit_bytes, *planned, row.worker_peak_bytes)
    return (row.device, *map(format_bytes, parts), f"{row.off:+.1%}")
