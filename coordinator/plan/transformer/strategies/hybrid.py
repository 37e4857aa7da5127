"""Galaxy's hybrid model parallelism, and Megatron's tensor parallelism: the tasks of one layer.

Hybrid: tensor parallel in attention and MLP, sequence parallel in between (Galaxy, section III-B). With one device it is
`local`; with all weights on every device it is `sp`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from coordinator.plan.simulator import Task, simulate
from coordinator.plan.transformer.cost import decode
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.cost.ring_tasks import RingTasks
from coordinator.plan.transformer.strategies.base import Timing, TransformerStrategy
from hearth.plan.geometry import Span
from hearth.plan.model_spec import ModelSpec
from hearth.plan.phases import Phase, Work
from hearth.plan.transformer import GenerationLimits, LayerMode, TensorParallel

# The number of equal layers that are simulated: the first one starts without predecessors; each further one takes as long as
# the last of them.
_SIMULATED_LAYERS = 2
_LAYERS_TO_SETTLE = 4  # layers until micro-batches in flight reach a steady state


@dataclass(frozen=True)
class TensorParallelStrategy(TransformerStrategy[TensorParallel]):
    """A strategy that divides every layer among all ranks; subclasses append the tasks of one layer."""

    @abstractmethod
    def add_layer(self, ring: RingTasks, mode: LayerMode) -> None:
        """Append the tasks of one layer."""

    # ---- prefill ----------------------------------------------------------------------------------------------------

    def tasks(self, layout: PlanLayout[TensorParallel]) -> list[Task]:
        return self.step_tasks(layout)[0]

    def step_tasks(
        self, layout: PlanLayout[TensorParallel], modes: Sequence[LayerMode] | None = None, first_row: int = 0
    ) -> tuple[list[Task], list[list[int]]]:
        """The tasks of a step with all its micro-batches, and the indices of the tasks of each layer.

        `modes` replace the plan's own, to simulate fewer layers; `first_row` is as in `timing`. A later micro-batch attends
        once the keys and values of those before it have been computed.
        """
        modes = _modes(layout) if modes is None else modes
        seq_len, count = layout.body.seq_len, layout.body.micro_batches
        if count == 1:
            whole, layers = self._part_tasks(layout, Span(first_row, first_row + seq_len), modes, has_head=True)
            return whole, [list(range(*span)) for span in layers]
        edges = [first_row + seq_len * index // count for index in range(count + 1)]
        tasks: list[Task] = []
        by_layer: list[list[int]] = [[] for _ in modes]
        previous_qkv: dict[tuple[int, int], list[int]] = {}  # by layer and rank: QKV tasks of the previous micro-batch
        for part in map(Span, edges, edges[1:]):
            of_part, layers = self._part_tasks(layout, part, modes, has_head=part.stop == edges[-1])
            offset, current_qkv = len(tasks), dict[tuple[int, int], list[int]]()
            tasks += [task._replace(after=tuple(index + offset for index in task.after)) for task in of_part]
            for layer, (first, end) in enumerate(layers):
                for index in range(first + offset, end + offset):
                    by_layer[layer].append(index)
                    task = tasks[index]
                    where = (layer, task.resources[0].rank)
                    if task.kind is Work.QKV:
                        current_qkv.setdefault(where, []).append(index)
                    elif task.kind in (Work.ATTENTION, Work.OUT) and where in previous_qkv:
                        tasks[index] = task._replace(after=(*task.after, *previous_qkv[where]))
            previous_qkv = current_qkv
        return tasks, by_layer

    def _part_tasks(
        self, layout: PlanLayout[TensorParallel], part: Span, modes: Sequence[LayerMode], has_head: bool
    ) -> tuple[list[Task], list[tuple[int, int]]]:
        """The tasks of some rows of the step, and the span of tasks of each layer.

        `has_head`: with the output head, if the plan generates tokens. Other plans return hidden rows.
        """
        ring = RingTasks(layout, part)
        ring.embedding([part.size] * len(ring.ranks) if layout.body.traits.replicates_rows else ring.rows)
        layers = []
        for index, mode in enumerate(modes):
            ring.layer, start = index, len(ring.tasks)
            self.add_layer(ring, mode)
            layers.append((start, len(ring.tasks)))
        ring.layer = None
        if layout.body.generation is not None and has_head:
            ring.head()
        return ring.tasks, layers

    def timing(self, layout: PlanLayout[TensorParallel], first_row: int = 0) -> Timing:
        """Simulate only a few layers of each run of equal layers, and add the time of the last one for each of the others.

        The layers of a run differ only at its ends.
        """
        modes = _modes(layout)
        if layout.body.micro_batches > 1:
            return self._timing_of_micro_batches(layout, modes, first_row)
        runs = [(mode, len(list(same))) for mode, same in groupby(modes)]
        simulated_modes = [mode for mode, count in runs for _ in range(min(count, _SIMULATED_LAYERS))]
        tasks, by_layer = self.step_tasks(layout, simulated_modes, first_row)
        timeline = simulate(tasks)
        total, extra, last = timeline.makespan, dict.fromkeys(timeline.busy_seconds, 0.0), -1
        for _, count in runs:
            last += min(count, _SIMULATED_LAYERS)
            repeats = count - min(count, _SIMULATED_LAYERS)
            if repeats:
                end, before = (
                    max((timeline.ends[i] for i in by_layer[layer]), default=0.0) for layer in (last, last - 1)
                )
                total += repeats * (end - before)
                for task in (tasks[index] for index in by_layer[last]):
                    for resource in task.resources:
                        extra[resource] += repeats * task.seconds
        return total, {resource: seconds + extra[resource] for resource, seconds in timeline.busy_seconds.items()}

    def _timing_of_micro_batches(
        self, layout: PlanLayout[TensorParallel], modes: Sequence[LayerMode], first_row: int
    ) -> Timing:
        """With micro-batches, extrapolate from a few layers after the first ones.

        An early micro-batch runs layers ahead of a late one, so each layer adds the same time only after a few layers.
        Unequal layers are all simulated.
        """
        num_simulated = 2 * _LAYERS_TO_SETTLE
        if len(set(modes)) > 1 or len(modes) <= num_simulated:
            timeline = simulate(self.step_tasks(layout, modes, first_row)[0])
            return timeline.makespan, timeline.busy_seconds
        counts = (num_simulated // 2, num_simulated)
        short, long = (simulate(self.step_tasks(layout, modes[:count], first_row)[0]) for count in counts)
        repeats = (len(modes) - num_simulated) / _LAYERS_TO_SETTLE
        busy = {
            key: seconds + repeats * (seconds - short.busy_seconds.get(key, 0.0))
            for key, seconds in long.busy_seconds.items()
        }
        return long.makespan + repeats * (long.makespan - short.makespan), busy

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def decode_seconds(self, layout: PlanLayout[TensorParallel], num_tokens: float) -> float:
        """Seconds per token.

        These are all layers, the output head, the candidates to rank 0, the step order from rank 0 to all, and the next
        word embedding row from its owner (the slowest counts) to all, unless every rank holds it.
        """
        spec, body, ranks, H = layout.spec, layout.body, layout.ranks, layout.spec.hidden_size

        def after(ready: Sequence[float], num_bytes: Sequence[float], num_layers: float) -> list[float]:
            """The time at which each rank has read its bytes and made the calls of `num_layers` layers."""
            return [
                start + (blocks.decode_seconds_per_byte * read + num_layers * blocks.decode_layer_seconds)
                for start, blocks, read in zip(ready, layout.blocks, num_bytes, strict=True)
            ]

        head_blocks = zip(body.heads, layout.blocks, strict=True)
        attention = [decode.attention_bytes(spec, heads, num_tokens, blocks) for heads, blocks in head_blocks]
        mlp = [decode.mlp_bytes(spec, columns) for columns in body.columns]
        head = [decode.head_bytes(spec, vocabulary) for vocabulary in body.vocabulary]
        with_heads = [rank for rank in ranks if body.heads[rank]]
        with_columns = [rank for rank in ranks if body.columns[rank]]
        owners = [rank for rank in ranks if body.vocabulary[rank]]

        ready = [0.0 for _ in ranks]
        ends = []
        for _ in range(min(spec.num_layers, _SIMULATED_LAYERS)):
            ready = decode.simulate_exchange(layout, after(ready, attention, 0.5), H, with_heads, ranks)
            ready = decode.simulate_exchange(layout, after(ready, mlp, 0.5), H, with_columns, ranks)
            ends.append(max(ready))
        further = max(spec.num_layers - _SIMULATED_LAYERS, 0) * (ends[-1] - (ends[-2] if len(ends) > 1 else 0.0))
        ready = [seconds + further for seconds in ready]
        ready = after(ready, head, decode.STEP_OVERHEAD_LAYERS)
        ready = decode.simulate_exchange(layout, ready, decode.SMALL_MESSAGE_VALUES, owners, [0], exact=True)
        ready = decode.simulate_exchange(layout, ready, decode.SMALL_MESSAGE_VALUES, [0], ranks, exact=True)
        if body.embedding == "replicated":
            return max(ready)
        return max(max(decode.simulate_exchange(layout, ready, H, [owner], ranks)) for owner in owners)

    def decoding_values(self, spec: ModelSpec, body: TensorParallel, limits: GenerationLimits) -> int:
        """Values of the partial sums [B,H] of every rank, for B sequences."""
        return len(body.heads) * limits.max_sequences * spec.hidden_size


def _modes(layout: PlanLayout[TensorParallel]) -> list[LayerMode]:
    return [layout.body.mode(layer) for layer in range(layout.spec.num_layers)]


@dataclass(frozen=True)
class HybridStrategy(TensorParallelStrategy):
    """Galaxy's layer: heads and columns are shared inside blocks, rows between them."""

    def add_layer(self, ring: RingTasks, mode: LayerMode) -> None:
        if mode.attention == "rows":
            _attention_by_rows(ring)
        else:
            (_exchange_qkv if mode.qkv == "replicated" else _gather_qkv)(ring)
            (_exchange_out if mode.out == "replicated" else _reduce_out)(ring)
        ring.connective(Work.CONNECTIVE_ATTENTION, ring.rows)
        if mode.mlp == "replicated":
            ring.compute(Work.MLP_BLOCK, [ring.blocks[r].mlp_rows(ring.rows[r]) for r in ring.ranks])
        else:
            up = ring.tile_seconds(lambda r: ring.blocks[r].up(ring.body.columns[r]))
            down = ring.tile_seconds(lambda r: ring.blocks[r].down(ring.body.columns[r]))
            ring.gather_and_scatter(Phase.GATHER_MLP, up, Phase.REDUCE_MLP, down)
        ring.connective(Work.CONNECTIVE_MLP, ring.rows)


@dataclass(frozen=True)
class MegatronStrategy(TensorParallelStrategy):
    """Megatron-LM's layer: heads and columns are shared, and every rank has all rows."""

    def add_layer(self, ring: RingTasks, mode: LayerMode) -> None:
        """Each AllReduce is a ReduceScatter overlapped with its GEMM, then a plain AllGather."""
        blocks, body, everywhere = ring.blocks, ring.body, [ring.num_rows] * len(ring.ranks)
        ring.compute(Work.QKV, [blocks[r].qkv(body.heads[r]) * ring.scale[r] for r in ring.ranks])
        _reduce_out(ring)
        ring.gather(Phase.REDUCE_GATHER_ATTENTION, ring.zero_seconds)
        ring.connective(Work.CONNECTIVE_ATTENTION, everywhere)
        ring.compute(Work.UP, [blocks[r].up(body.columns[r]) * ring.scale[r] for r in ring.ranks])
        ring.scatter(Phase.REDUCE_MLP, ring.tile_seconds(lambda r: blocks[r].down(body.columns[r])))
        ring.gather(Phase.REDUCE_GATHER_MLP, ring.zero_seconds)
        ring.connective(Work.CONNECTIVE_MLP, everywhere)


LOCAL = HybridStrategy("local", search="rows", device_limit=1)
SP = HybridStrategy("sp", search="rows", whole_prompts=True)
HMP = HybridStrategy("hmp", search="shares", leaves_one_out=True, refinements=("replicate", "micro-batches"))


MEGATRON = MegatronStrategy("megatron-tp", search="shares", refinements=("micro-batches",))


def _gather_qkv(ring: RingTasks) -> None:
    ring.gather(Phase.GATHER_ATTENTION, ring.tile_seconds(lambda r: ring.blocks[r].qkv(ring.body.heads[r])))


def _reduce_out(ring: RingTasks) -> None:
    """Attention and output projection, tile by tile, with a ring ReduceScatter of the partial sums."""
    out = ring.tile_seconds(lambda r: ring.blocks[r].out(ring.body.heads[r]))
    for rank in ring.ranks:
        core = ring.blocks[rank].core(ring.body.heads[rank]) * ring.core_scale[rank]
        out[rank] = [s + core * rows / ring.num_rows for s, rows in zip(out[rank], ring.rows, strict=True)]
    ring.scatter(Phase.REDUCE_ATTENTION, out)


def _exchange_qkv(ring: RingTasks) -> None:
    """Replicated QKV: a rank projects its own rows for the heads of each rank in turn, and sends each part when done."""
    spec, heads = ring.spec, ring.body.heads
    whole = [ring.own_rows_seconds(r, ring.blocks[r].qkv(spec.num_heads)) for r in ring.ranks]
    arrived = ring.exchange(
        Phase.EXCHANGE_QKV,
        [[whole[r] * heads[target] / spec.num_heads for target in ring.ranks] for r in ring.ranks],
        [[ring.rows[r] * spec.qkv_width(heads[target]) for target in ring.ranks] for r in ring.ranks],
    )
    ring.wait_for(arrived)


def _exchange_out(ring: RingTasks) -> None:
    """Replicated output projection.

    A rank sends its heads' outputs to the owners of the rows, and projects its own rows part by part as the outputs of other
    ranks' heads arrive.
    """
    spec, heads = ring.spec, ring.body.heads
    core = [ring.blocks[r].core(heads[r]) * ring.core_scale[r] for r in ring.ranks]
    arrived = ring.exchange(
        Phase.EXCHANGE_HEADS,
        [[core[r] * ring.rows[target] / ring.num_rows for target in ring.ranks] for r in ring.ranks],
        [[ring.rows[target] * spec.q_width(heads[r]) for target in ring.ranks] for r in ring.ranks],
        tiled=True,
    )
    for rank in ring.ranks:
        whole = ring.own_rows_seconds(rank, ring.blocks[rank].out(spec.num_heads))
        ends = []
        for source in (rank, *((rank - offset) % len(ring.ranks) for offset in range(1, len(ring.ranks)))):
            seconds = whole * heads[source] / spec.num_heads
            after = arrived[rank].get(source, ring.last_tasks[rank])
            ends.append(ring.add_task(Work.OUT, rank, seconds, after, rank, source))
        ring.last_tasks[rank] = tuple(ends)


def _attention_by_rows(ring: RingTasks) -> None:
    heads = ring.spec.num_heads
    ring.compute(Work.QKV, [ring.own_rows_seconds(r, ring.blocks[r].qkv(heads)) for r in ring.ranks])
    for phase in (Phase.GATHER_KEYS, Phase.GATHER_VALUES):
        ring.gather(phase, ring.zero_seconds, row_values=ring.spec.kv_width(heads))
    core = [ring.blocks[r].core(heads) * ring.core_scale[r] * ring.rows[r] / ring.num_rows for r in ring.ranks]
    ring.compute(Work.ATTENTION, core)
    ring.compute(Work.OUT, [ring.own_rows_seconds(r, ring.blocks[r].out(heads)) for r in ring.ranks])
