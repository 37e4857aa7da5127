"""A step of a pipeline of layers as a graph of tasks. Pure.

S rows of a step, which pass the stages in chunks; H hidden. Stage r runs on the cluster's device r.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.plan.simulator import Task, compute_of, sides_of
from coordinator.plan.transformer.cost.decode import head_bytes
from coordinator.plan.transformer.cost.step_graph import wire_seconds
from hearth.plan.geometry import Span, spans
from hearth.plan.model_spec import ModelSpec
from hearth.plan.parts import WireFormat
from hearth.plan.phases import Phase, Work
from hearth.plan.profile import BlockProfile, ClusterProfile
from hearth.plan.transformer import Pipeline
from hearth.plan.value_formats import BYTES_PER_VALUE


def chunks_of(seq_len: int, chunk_rows: int) -> tuple[Span, ...]:
    """The rows of each chunk; all of them in one where `chunk_rows` is 0."""
    size = chunk_rows or seq_len
    return tuple(Span(start, min(start + size, seq_len)) for start in range(0, seq_len, size))


def layer_seconds(spec: ModelSpec, blocks: BlockProfile, rows: Span) -> float:
    """One layer, all its heads and columns, on these rows of a sequence; a decoder's attend to the rows before them."""
    share = rows.size / blocks.seq_len
    heads, columns = spec.num_heads, spec.ffn_size
    gemms = blocks.qkv(heads) + blocks.out(heads) + blocks.up(columns) + blocks.down(columns)
    core = blocks.core(heads) * (rows.stop**2 - rows.start**2) / blocks.seq_len**2
    return gemms * share * blocks.tile_factor(rows.size) + core + 2 * blocks.connective(rows.size)


def pipeline_tasks(
    spec: ModelSpec, body: Pipeline, cluster: ClusterProfile, seq_len: int, wire: WireFormat
) -> list[Task]:
    """One step: every stage runs the chunks in order, and hands each to the next when it is done with it.

    A chunk begins no sooner than what is in flight allows. A decoder's last row goes back to the first stage, which has
    the output head.
    """
    return _Graph(spec, body, cluster, wire).build(chunks_of(seq_len, body.chunk_rows))


class _Graph:
    def __init__(self, spec: ModelSpec, body: Pipeline, cluster: ClusterProfile, wire: WireFormat) -> None:
        self._spec, self._body, self._cluster, self._wire = spec, body, cluster, wire
        self._blocks = [device.blocks for device in cluster.devices]
        self._tasks: list[Task] = []

    def build(self, chunks: Sequence[Span]) -> list[Task]:
        spec, depth, last = self._spec, self._body.max_steps_in_flight, len(self._blocks) - 1
        ended: list[int] = []  # the last stage's task of each chunk
        for number, rows in enumerate(chunks):
            after = () if number < depth else (ended[number - depth],)
            task = self._compute(Work.EMBEDDING, None, number, 0, self._blocks[0].embedding(rows.size), after)
            for rank, stage in enumerate(spans(self._body.layers)):
                seconds = stage.size * layer_seconds(spec, self._blocks[rank], rows)
                task = self._compute(Work.LAYERS, stage.start, number, rank, seconds, (task,))
                if rank < last:
                    task = self._hop(Phase.STAGE_ROWS, stage.start, number, (rank, rank + 1), rows.size, task)
            ended.append(task)
        if spec.causal:
            if last:
                task = self._hop(Phase.HEAD_ROWS, 0, None, (last, 0), 1, task)
            head = self._blocks[0].decode_seconds_per_byte * head_bytes(spec, spec.vocab_size)
            self._compute(Work.HEAD, None, None, 0, head, (task,))
        return self._tasks

    def _compute(
        self, kind: Work, layer: int | None, chunk: int | None, rank: int, seconds: float, after: tuple[int, ...]
    ) -> int:
        self._tasks.append(Task(kind, layer, chunk, None, compute_of(rank), seconds, after))
        return len(self._tasks) - 1

    def _hop(
        self, phase: Phase, layer: int, chunk: int | None, ends: tuple[int, int], num_rows: int, after: int
    ) -> int:
        """The transfer, and the work of both its ends."""
        devices, (source, target) = self._cluster.devices, ends
        link = self._cluster.link(devices[source].device_id, devices[target].device_id)
        format_ = self._body.values_on(source, target, self._wire.values)
        values = num_rows * self._spec.hidden_size
        num_bytes = values * BYTES_PER_VALUE[format_]
        costs = [wire_seconds(self._blocks[rank].wire, values, format_) for rank in ends]
        sent = self._compute(Work.WIRE, layer, chunk, source, costs[0], (after,))
        seconds, latency = num_bytes / link.bytes_per_second, link.round_trip_seconds / 2
        self._tasks.append(Task(phase, layer, chunk, target, sides_of(*ends), seconds, (sent,), latency, num_bytes))
        return self._compute(Work.WIRE, layer, chunk, target, costs[1], (sent + 1,))
