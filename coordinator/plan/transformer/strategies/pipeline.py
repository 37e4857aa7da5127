"""Pipeline parallelism over layers: each device is a stage of some whole layers. Pure.

The rows of a step pass the stages in chunks. Stage r runs on the cluster's device r.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.plan.simulator import Task, compute_resources, simulate, transfer_resources
from coordinator.plan.transformer.cost import decode
from coordinator.plan.transformer.cost.layout import PlanLayout, attention_ratio
from coordinator.plan.transformer.strategies.base import Timing, TransformerStrategy
from hearth.plan.common import BYTES_PER_VALUE
from hearth.plan.geometry import Span, spans
from hearth.plan.model_spec import ModelSpec
from hearth.plan.phases import Phase, Work
from hearth.plan.profile import BlockProfile
from hearth.plan.transformer import GenerationLimits, Pipeline


def prompt_chunks(seq_len: int, chunk_rows: int) -> tuple[Span, ...]:
    """The rows of each chunk; with `chunk_rows` 0, one chunk of all rows."""
    size = chunk_rows or seq_len
    return tuple(Span(start, min(start + size, seq_len)) for start in range(0, seq_len, size))


def layer_seconds(spec: ModelSpec, blocks: BlockProfile, rows: Span) -> float:
    """Seconds of one whole layer on these rows of a sequence. A decoder's rows also attend to the rows before them."""
    share = rows.size / blocks.seq_len
    heads, columns = spec.num_heads, spec.ffn_size
    gemms = blocks.qkv(heads) + blocks.out(heads) + blocks.up(columns) + blocks.down(columns)
    core = blocks.core(heads) * attention_ratio(spec, rows, blocks.seq_len)
    return gemms * share * blocks.tile_factor(rows.size) + core + 2 * blocks.connective(rows.size)


@dataclass(frozen=True)
class PipelineStrategy(TransformerStrategy[Pipeline]):
    """Whole layers on each rank, in the order of the ranks."""

    def max_devices(self, spec: ModelSpec) -> int:
        return spec.num_layers

    def tasks(self, layout: PlanLayout[Pipeline]) -> list[Task]:
        """Every stage runs the chunks in order and sends each to the next stage when it is done.

        At most `max_steps_in_flight` chunks are in flight. A decoder's last row goes back to the first stage, which has
        the output head.
        """
        return _PipelineTasks(layout).tasks

    def timing(self, layout: PlanLayout[Pipeline], first_row: int = 0) -> Timing:
        timeline = simulate(_PipelineTasks(layout, first_row).tasks)
        return timeline.makespan, timeline.busy_seconds

    def decode_seconds(self, layout: PlanLayout[Pipeline], num_tokens: float) -> float:
        """Seconds per token.

        The first stage sends the step order to all, the row passes the stages and returns to the first, which applies the
        output head and samples.
        """
        spec, ranks = layout.spec, layout.ranks
        ready = decode.simulate_exchange(
            layout, [0.0 for _ in ranks], decode.SMALL_MESSAGE_VALUES, [0], ranks, exact=True
        )
        for rank in ranks:
            ready[rank] += layout.body.layers[rank] * decode.token_layer_seconds(spec, layout.blocks[rank], num_tokens)
            following = (rank + 1) % len(ranks)
            if following != rank:
                ready = decode.simulate_exchange(layout, ready, spec.hidden_size, [rank], [following])
        return ready[0] + decode.token_head_seconds(spec, layout.blocks[0])

    def decoding_values(self, spec: ModelSpec, body: Pipeline, limits: GenerationLimits) -> int:
        """Values of the rows of all steps that may be in flight."""
        return body.max_steps_in_flight * max(body.max_step_rows, limits.max_sequences) * spec.hidden_size


PIPELINE = PipelineStrategy("pipeline", search="stages")


class _PipelineTasks:
    def __init__(self, layout: PlanLayout[Pipeline], first_row: int = 0) -> None:
        self.tasks: list[Task] = []
        self._layout = layout
        spec, body, blocks = layout.spec, layout.body, layout.blocks
        depth, last = body.max_steps_in_flight, len(blocks) - 1
        ended: list[int] = []  # the last stage's task of each chunk
        for number, rows in enumerate(prompt_chunks(body.seq_len, body.chunk_rows)):
            positions = Span(first_row + rows.start, first_row + rows.stop)
            after = () if number < depth else (ended[number - depth],)
            task = self._compute(Work.EMBEDDING, None, number, 0, blocks[0].embedding(rows.size), after)
            for rank, stage in enumerate(spans(body.layers)):
                seconds = stage.size * layer_seconds(spec, blocks[rank], positions)
                task = self._compute(Work.LAYERS, stage.start, number, rank, seconds, (task,))
                if rank < last:
                    task = self._hop(Phase.STAGE_ROWS, stage.start, number, (rank, rank + 1), rows.size, task)
            ended.append(task)
        if spec.causal and last:  # a plan that generates tokens needs the last row, others return all
            num_returned = 1 if body.generation is not None else body.seq_len
            task = self._hop(Phase.HEAD_ROWS, 0, None, (last, 0), num_returned, task)
        if body.generation is not None:
            head = blocks[0].decode_seconds_per_byte * decode.head_bytes(spec, spec.vocab_size)
            self._compute(Work.HEAD, None, None, 0, head, (task,))

    def _compute(
        self, kind: Work, layer: int | None, chunk: int | None, rank: int, seconds: float, after: tuple[int, ...]
    ) -> int:
        resources = compute_resources(rank) if kind is not Work.WIRE else self._layout.wire_resources(rank)
        self.tasks.append(Task(kind, layer, chunk, None, resources, seconds, after))
        return len(self.tasks) - 1

    def _hop(
        self, phase: Phase, layer: int, chunk: int | None, ends: tuple[int, int], num_rows: int, after: int
    ) -> int:
        """Append a transfer and the CPU work at both its ends."""
        layout, (source, target) = self._layout, ends
        link, format_ = layout.links[ends], layout.formats[ends]
        values = num_rows * layout.spec.hidden_size
        num_bytes = values * BYTES_PER_VALUE[format_]
        costs = [layout.wire_seconds(rank, values, format_) for rank in ends]
        sent = self._compute(Work.WIRE, layer, chunk, source, costs[0], (after,))
        seconds, latency = num_bytes / link.bytes_per_second, link.round_trip_seconds / 2
        sides = transfer_resources(*ends, layout.media[ends])
        self.tasks.append(Task(phase, layer, chunk, target, sides, seconds, (sent,), latency, num_bytes))
        return self._compute(Work.WIRE, layer, chunk, target, costs[1], (sent + 1,))
