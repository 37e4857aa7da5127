"""The task graph of one step of a plan, from a cluster's profile and the same ring schedules that the workers run. Pure.

S rows, H hidden, D ranks. Ranks are the cluster's devices in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.plan.simulator import Task, compute_of, sides_of
from hearth.plan import rings
from hearth.plan.geometry import rows_for
from hearth.plan.model_spec import ModelSpec
from hearth.plan.parts import WireFormat
from hearth.plan.phases import Phase, TaskKind, Work
from hearth.plan.profile import ClusterProfile, WireCost
from hearth.plan.transformer import LayerMode, TransformerBody
from hearth.plan.value_formats import BYTES_PER_VALUE, Values


def wire_seconds(cost: WireCost, values: float, format_: Values, converted: float = 0.5) -> float:
    """Compute time of one end of a transfer: encryption, TCP, and its part of the conversion."""
    num_chunks = max(1, min(values * 4 // rings.CHUNK_BYTES, rings.MAX_CHUNKS))
    return (
        values * BYTES_PER_VALUE[format_] * cost.encrypted_seconds_per_byte
        + values * converted * cost.convert_seconds_per_value.get(format_, 0.0)
        + num_chunks * cost.seconds_per_message
    )


def step_tasks(
    spec: ModelSpec,
    body: TransformerBody,
    cluster: ClusterProfile,
    seq_len: int,
    wire: WireFormat,
    modes: Sequence[LayerMode] | None = None,
) -> tuple[list[Task], list[list[int]]]:
    """The tasks of one step, all its micro-batches, and which of them belong to each layer.

    A later micro-batch attends when the keys and values of those before it are there.
    """
    if body.micro_batches == 1:
        whole = StepGraph(spec, body, cluster, seq_len, wire, modes)
        return whole.tasks, [list(range(*span)) for span in whole.layers]
    tasks: list[Task] = []
    by_layer: list[list[int]] = [[] for _ in (modes if modes is not None else range(spec.num_layers))]
    edges = [seq_len * index // body.micro_batches for index in range(body.micro_batches + 1)]
    kept: dict[tuple[int, int], list[int]] = {}  # by layer and rank: the projections of the micro-batch before
    for start, stop in zip(edges, edges[1:], strict=False):
        graph = StepGraph(spec, body, cluster, stop - start, wire, modes, start, stop == seq_len)
        offset, keeps = len(tasks), dict[tuple[int, int], list[int]]()
        tasks += [task._replace(after=tuple(index + offset for index in task.after)) for task in graph.tasks]
        for layer, (first, end) in enumerate(graph.layers):
            for index in range(first + offset, end + offset):
                by_layer[layer].append(index)
                task = tasks[index]
                where = (layer, task.resources[0].rank)
                if task.kind is Work.QKV:
                    keeps.setdefault(where, []).append(index)
                elif task.kind in (Work.ATTENTION, Work.OUT) and where in kept:
                    tasks[index] = task._replace(after=(*task.after, *kept[where]))
        kept = keeps
    return tasks, by_layer


class StepGraph:
    """Builds the tasks of one step, or of one micro-batch of it. Every phase method appends its tasks for all ranks.

    `self._last[r]` are the tasks that rank r's next compute must wait for. `layers` are the spans of tasks of each layer.
    `modes` stand for the plan's own when fewer layers will do.
    """

    def __init__(
        self,
        spec: ModelSpec,
        body: TransformerBody,
        cluster: ClusterProfile,
        seq_len: int,
        wire: WireFormat,
        modes: Sequence[LayerMode] | None = None,
        earlier_rows: int = 0,
        is_last: bool = True,
    ) -> None:
        """Of a micro-batch: `earlier_rows` of the step come before its `seq_len`; the last one samples."""
        self.tasks: list[Task] = []
        self.layers: list[tuple[int, int]] = []
        self._spec = spec
        self._body = body
        self._blocks = [device.blocks for device in cluster.devices]
        self._ranks = range(len(cluster.devices))
        self._num_ranks = len(cluster.devices)
        self._seq_len = seq_len
        self._rows = rows_for(body.row_weights, seq_len)
        self._formats: dict[tuple[int, int], Values] = {
            (a, b): body.values_on(a, b, wire.values) for a in self._ranks for b in self._ranks if a != b
        }
        self._links = {
            (a, b): cluster.link(cluster.devices[a].device_id, cluster.devices[b].device_id)
            for a in self._ranks
            for b in self._ranks
            if a != b
        }
        self._compute_of = [compute_of(rank) for rank in self._ranks]
        self._sides_of = {ends: sides_of(*ends) for ends in self._links}
        # A profile taken at another length is scaled by the rows; planning profiles at its own length.
        self._scale = [seq_len / blocks.seq_len for blocks in self._blocks]
        attended = (earlier_rows + seq_len) ** 2 - earlier_rows**2
        self._core_scale = [attended / blocks.seq_len**2 for blocks in self._blocks]
        self._is_last = is_last
        self._tile_factor = [[blocks.tile_factor(rows) for rows in self._rows] for blocks in self._blocks]
        self._whole = [blocks.qkv(spec.num_heads) for blocks in self._blocks]
        self._last: list[tuple[int, ...]] = [()] * self._num_ranks
        self._layer: int | None = None
        self._build([body.mode(layer) for layer in range(spec.num_layers)] if modes is None else modes)

    def _build(self, modes: Sequence[LayerMode]) -> None:
        megatron = self._body.strategy == "megatron-tp"
        self._embedding(everywhere=megatron)
        for index, mode in enumerate(modes):
            self._layer = index
            start = len(self.tasks)
            if megatron:
                self._megatron_layer()
            else:
                self._hybrid_layer(mode)
            self.layers.append((start, len(self.tasks)))
        self._layer = None
        if self._spec.causal and self._is_last:
            self._head()

    # ---- layers ---------------------------------------------------------------------------------------------------

    def _hybrid_layer(self, mode: LayerMode) -> None:
        if mode.attention == "rows":
            self._attention_by_rows()
        else:
            (self._exchange_qkv if mode.qkv == "replicated" else self._gather_qkv)()
            (self._exchange_out if mode.out == "replicated" else self._reduce_out)()
        self._connective(Work.CONNECTIVE_ATTENTION, self._rows)
        if mode.mlp == "replicated":
            rows = [self._blocks[r].mlp_rows(self._rows[r]) for r in self._ranks]
            self._compute(Work.MLP_BLOCK, rows)
        else:
            up = self._tiled(lambda r: self._blocks[r].up(self._body.columns[r]))
            down = self._tiled(lambda r: self._blocks[r].down(self._body.columns[r]))
            self._gather_and_scatter((Work.UP, Phase.GATHER_MLP, up), (Work.DOWN, Phase.REDUCE_MLP, down))
        self._connective(Work.CONNECTIVE_MLP, self._rows)

    def _megatron_layer(self) -> None:
        """Ring AllReduce after each block: a ReduceScatter overlapped with its GEMM, then a plain AllGather."""
        nothing = [[0.0] * self._num_ranks for _ in self._ranks]
        everywhere = [self._seq_len] * self._num_ranks
        self._compute(Work.QKV, [self._blocks[r].qkv(self._body.heads[r]) * self._scale[r] for r in self._ranks])
        self._reduce_out()
        self._gather(None, Phase.REDUCE_GATHER_ATTENTION, nothing)
        self._connective(Work.CONNECTIVE_ATTENTION, everywhere)
        self._compute(Work.UP, [self._blocks[r].up(self._body.columns[r]) * self._scale[r] for r in self._ranks])
        self._scatter(Work.DOWN, Phase.REDUCE_MLP, self._tiled(lambda r: self._blocks[r].down(self._body.columns[r])))
        self._gather(None, Phase.REDUCE_GATHER_MLP, nothing)
        self._connective(Work.CONNECTIVE_MLP, everywhere)

    # ---- attention by mode ----------------------------------------------------------------------------------------

    def _gather_qkv(self) -> None:
        self._gather(Work.QKV, Phase.GATHER_ATTENTION, self._tiled(lambda r: self._blocks[r].qkv(self._body.heads[r])))

    def _reduce_out(self) -> None:
        """Attention of a tile's rows and their output projection, tile by tile."""
        out = self._tiled(lambda r: self._blocks[r].out(self._body.heads[r]))
        for rank in self._ranks:
            core = self._blocks[rank].core(self._body.heads[rank]) * self._core_scale[rank]
            out[rank] = [s + core * rows / self._seq_len for s, rows in zip(out[rank], self._rows, strict=True)]
        self._scatter(Work.OUT, Phase.REDUCE_ATTENTION, out)

    def _exchange_qkv(self) -> None:
        """Own rows are projected for each rank's heads in turn; each part leaves when it is done."""
        heads = self._body.heads
        whole = [self._own_rows(r, self._whole[r]) for r in self._ranks]
        self._exchange(
            Phase.EXCHANGE_QKV,
            Work.QKV,
            [[whole[r] * heads[target] / self._spec.num_heads for target in self._ranks] for r in self._ranks],
            [[self._rows[r] * self._spec.qkv_width(heads[target]) for target in self._ranks] for r in self._ranks],
        )

    def _exchange_out(self) -> None:
        """Our heads' outputs leave for the owners of their rows; own rows are projected part by part as they come."""
        heads, S = self._body.heads, self._seq_len
        core = [self._blocks[r].core(heads[r]) * self._core_scale[r] for r in self._ranks]
        arrived = self._exchange(
            Phase.EXCHANGE_HEADS,
            Work.ATTENTION,
            [[core[r] * self._rows[target] / S for target in self._ranks] for r in self._ranks],
            [[self._rows[target] * self._spec.q_width(heads[r]) for target in self._ranks] for r in self._ranks],
        )
        for rank in self._ranks:
            whole = self._own_rows(rank, self._blocks[rank].out(self._spec.num_heads))
            ends = []
            for source in (rank, *((rank - offset) % self._num_ranks for offset in range(1, self._num_ranks))):
                seconds = whole * heads[source] / self._spec.num_heads
                after = arrived[rank].get(source, self._last[rank])
                ends.append(self._task(Work.OUT, rank, seconds, after, rank, source))
            self._last[rank] = tuple(ends)

    def _attention_by_rows(self) -> None:
        heads = self._spec.num_heads
        self._compute(Work.QKV, [self._own_rows(r, self._whole[r]) for r in self._ranks])
        nothing = [[0.0] * self._num_ranks for _ in self._ranks]
        for phase in (Phase.GATHER_KEYS, Phase.GATHER_VALUES):
            self._gather(None, phase, nothing, row_values=self._spec.kv_width(heads))
        core = [self._blocks[r].core(heads) * self._core_scale[r] * self._rows[r] / self._seq_len for r in self._ranks]
        self._compute(Work.ATTENTION, core)
        self._compute(Work.OUT, [self._own_rows(r, self._blocks[r].out(heads)) for r in self._ranks])

    def _own_rows(self, rank: int, whole: float) -> float:
        """A GEMM over the rank's own rows, where one over all rows takes `whole`."""
        return whole * self._scale[rank] * self._rows[rank] / self._seq_len * self._tile_factor[rank][rank]

    def _tiled(self, block: Callable[[int], float]) -> list[list[float]]:
        """Seconds of rank r's block on tile k, as `[r][k]`."""
        return [
            [
                block(r) * self._scale[r] * tile / self._seq_len * factor
                for tile, factor in zip(self._rows, self._tile_factor[r], strict=True)
            ]
            for r in self._ranks
        ]

    # ---- phases ---------------------------------------------------------------------------------------------------

    def _embedding(self, everywhere: bool) -> None:
        """Each vocabulary owner sends its rows straight to the rank that needs them (tokens taken as spread evenly)."""
        owned = [share / self._spec.vocab_size for share in self._body.vocabulary]
        rows = [self._seq_len] * self._num_ranks if everywhere else list(self._rows)
        values = [
            [rows[target] * owned[source] * self._spec.hidden_size for target in self._ranks] for source in self._ranks
        ]
        nothing = [[0.0] * self._num_ranks for _ in self._ranks]
        arrived = self._exchange(Phase.EMBED, Work.EMBEDDING, nothing, values)
        for rank in self._ranks:
            self._last[rank] = (*self._last[rank], *(task for after in arrived[rank].values() for task in after))
        self._compute(Work.EMBEDDING, [self._blocks[r].embedding(rows[r]) for r in self._ranks])

    def _head(self) -> None:
        """The last row's logits, each rank's share of them; that it travels is next to nothing."""
        share_bytes = [share * self._spec.hidden_size * self._spec.head_bytes for share in self._body.vocabulary]
        self._compute(Work.HEAD, [self._blocks[r].decode_seconds_per_byte * share_bytes[r] for r in self._ranks])

    def _compute(self, kind: Work, seconds: Sequence[float]) -> None:
        for rank in self._ranks:
            self._last[rank] = (self._task(kind, rank, seconds[rank], self._last[rank]),)

    def _connective(self, kind: Work, rows: Sequence[int]) -> None:
        self._compute(kind, [self._blocks[r].connective(rows[r]) for r in self._ranks])

    def _gather(
        self, kind: Work | None, phase: Phase, seconds: Sequence[Sequence[float]], row_values: int | None = None
    ) -> None:
        """Ring AllGather: `seconds[r][k]` is rank r's GEMM on tile k, which may start when the tile is there.

        Without a GEMM (`kind` None), the rank's tasks of no seconds, of the phase itself, end when the tiles are there.
        """
        arrived, moved = self._ring_all_gather(phase, row_values or self._spec.hidden_size)
        for rank in self._ranks:
            before = self._last[rank]
            ends = []
            for tile in self._in_order_of_arrival(rank):
                if self._rows[tile]:
                    after = (*before, *arrived[rank, tile])
                    ends.append(self._task(kind or phase, rank, seconds[rank][tile], after, tile))
                if tile == rank:
                    ends.append(self._wire_task(rank, moved[rank], before))
            self._last[rank] = tuple(ends) or before

    def _scatter(self, kind: Work, phase: Phase, seconds: Sequence[Sequence[float]]) -> None:
        """Ring ReduceScatter: a tile is computed, the partial sum that arrived is added, and it goes on."""
        start = list(self._last)
        if not self._body.overlap:
            for rank in self._ranks:
                start[rank] = (self._task(kind, rank, sum(seconds[rank]), start[rank]),)
            seconds = [[0.0] * self._num_ranks for _ in self._ranks]
        computed: dict[tuple[int, int], int] = {}
        for rank in self._ranks:
            before = start[rank]
            for tile in self._in_order_of_sums(rank):
                computed[rank, tile] = self._task(kind, rank, seconds[rank][tile], before, tile)
                before = (computed[rank, tile],)
            self._last[rank] = before
        self._ring_reduce_scatter(phase, computed, start)

    def _gather_and_scatter(
        self,
        entering: tuple[Work, Phase, Sequence[Sequence[float]]],
        leaving: tuple[Work, Phase, Sequence[Sequence[float]]],
    ) -> None:
        """A gather and a scatter (kind, phase, seconds) whose GEMMs on a tile follow each other: the first partial sums
        leave while later tiles are still gathered."""
        if not self._body.overlap:
            self._gather(*entering)
            self._scatter(*leaving)
            return
        start = list(self._last)
        arrived, moved = self._ring_all_gather(entering[1], self._spec.hidden_size)
        computed: dict[tuple[int, int], int] = {}
        for rank in self._ranks:
            before = start[rank]
            if self._rows[rank]:
                before = (self._task(entering[0], rank, entering[2][rank][rank], before, rank),)
            wire = self._wire_task(rank, moved[rank], start[rank])
            for tile in self._in_order_of_sums(rank):
                if tile != rank:
                    after = (*before, *arrived[rank, tile])
                    before = (self._task(entering[0], rank, entering[2][rank][tile], after, tile),)
                computed[rank, tile] = self._task(leaving[0], rank, leaving[2][rank][tile], before, tile)
                before = (computed[rank, tile],)
            self._last[rank] = (*before, wire)
        self._ring_reduce_scatter(leaving[1], computed, start)

    def _in_order_of_arrival(self, rank: int) -> list[int]:
        return [step.compute for step in rings.ring_all_gather(self._num_ranks, rank)]

    def _in_order_of_sums(self, rank: int) -> list[int]:
        """Tiles without rows are left out."""
        return [step.compute for step in rings.ring_reduce_scatter(self._num_ranks, rank) if self._rows[step.compute]]

    def _ring_all_gather(
        self, phase: Phase, row_values: int
    ) -> tuple[dict[tuple[int, int], tuple[int, ...]], Sequence[float]]:
        """The transfers alone. Returns what rank r waits for before it has tile k, as `[r, k]`, and what each rank's end
        of the transfers takes from its compute."""
        arrived: dict[tuple[int, int], tuple[int, ...]] = {(r, r): self._last[r] for r in self._ranks}
        formats: dict[tuple[int, int], Values] = {(r, r): "exact" for r in self._ranks}  # in which a rank has a tile
        moved = [0.0] * self._num_ranks
        for t in range(self._num_ranks - 1):
            for rank in self._ranks:
                tile = rings.ring_all_gather(self._num_ranks, rank)[t].send
                assert tile is not None
                following = (rank + 1) % self._num_ranks
                if self._rows[tile]:
                    num_values = self._rows[tile] * row_values
                    had = formats[rank, tile]
                    # What has lost its precision once is forwarded as it is.
                    format_ = formats[following, tile] = self._formats[rank, following] if had == "exact" else had
                    index = self._transfer((rank, following), phase, tile, num_values, arrived[rank, tile], format_)
                    arrived[following, tile] = (index,)
                    moved[rank] += self._wire_seconds(rank, num_values, format_, 0.5 if had == "exact" else 0.0)
                    moved[following] += self._wire_seconds(following, num_values, format_)
        if not self._body.overlap:
            everything = tuple(index for after in arrived.values() for index in after)
            arrived = dict.fromkeys(arrived, everything)
        return arrived, moved

    def _ring_reduce_scatter(
        self, phase: Phase, computed: dict[tuple[int, int], int], start: Sequence[tuple[int, ...]]
    ) -> None:
        """The transfers alone; `computed[r, k]` is rank r's partial sum of tile k. What they take from the compute may be
        done from `start` on."""
        partial: dict[tuple[int, int], tuple[int, ...]] = {}
        moved = [0.0] * self._num_ranks
        for t in range(self._num_ranks):
            for rank in self._ranks:
                step = rings.ring_reduce_scatter(self._num_ranks, rank)[t]
                tile = step.compute
                if not self._rows[tile]:
                    continue
                after = (computed[rank, tile], *partial.get((rank, tile), ()))
                if step.send is not None:
                    following = (rank + 1) % self._num_ranks
                    num_values = self._rows[tile] * self._spec.hidden_size
                    partial[following, tile] = (self._transfer((rank, following), phase, tile, num_values, after),)
                    moved[rank] += self._wire_seconds(rank, num_values, self._formats[rank, following])
                    moved[following] += self._wire_seconds(following, num_values, self._formats[rank, following])
                else:
                    self._last[rank] = (*self._last[rank], *after)
        for rank in self._ranks:
            self._last[rank] = (*self._last[rank], self._wire_task(rank, moved[rank], start[rank]))

    def _exchange(
        self,
        phase: Phase,
        kind: Work,
        seconds: Sequence[Sequence[float]],
        num_values: Sequence[Sequence[float]],
    ) -> list[dict[int, tuple[int, ...]]]:
        """All-to-all: rank r computes what rank k needs (`seconds[r][k]`), and sends it; its own part comes last.

        Returns what arrived at each rank, by its source; each rank's `_last` becomes its own compute.
        """
        arrived: list[dict[int, tuple[int, ...]]] = [{} for _ in self._ranks]
        moved = [0.0] * self._num_ranks
        start = list(self._last)
        for rank in self._ranks:
            before = start[rank]
            for offset in (*range(1, self._num_ranks), 0):
                target = (rank + offset) % self._num_ranks
                if seconds[rank][target] > 0:
                    # A part of the own rows' projection is for the target's heads; attention is of the target's rows.
                    tile, peer = (target, None) if kind is Work.ATTENTION else (rank, target)
                    before = (self._task(kind, rank, seconds[rank][target], before, tile, peer),)
                values = num_values[rank][target]
                if offset and values > 0:
                    index = self._transfer((rank, target), phase, target, values, before)
                    arrived[target][rank] = (index,)
                    moved[rank] += self._wire_seconds(rank, values, self._formats[rank, target])
                    moved[target] += self._wire_seconds(target, values, self._formats[rank, target])
            self._last[rank] = before
        for rank in self._ranks:
            self._last[rank] = (*self._last[rank], self._wire_task(rank, moved[rank], start[rank]))
            if phase is Phase.EXCHANGE_QKV:
                self._last[rank] = (*self._last[rank], *(task for after in arrived[rank].values() for task in after))
            arrived[rank][rank] = self._last[rank]
        return arrived

    # ---- tasks ----------------------------------------------------------------------------------------------------

    def _task(
        self,
        kind: TaskKind,
        rank: int,
        seconds: float,
        after: tuple[int, ...],
        tile: int | None = None,
        peer: int | None = None,
    ) -> int:
        resources = self._compute_of[rank]
        self.tasks.append(Task(kind, self._layer, tile, peer, resources, seconds, tuple(dict.fromkeys(after))))
        return len(self.tasks) - 1

    def _transfer(
        self,
        ends: tuple[int, int],
        phase: Phase,
        tile: int,
        values: float,
        after: tuple[int, ...],
        format_: Values | None = None,
    ) -> int:
        """`ends` are the sender and the receiver. Without a format, the link's own."""
        link = self._links[ends]
        num_bytes = values * BYTES_PER_VALUE[format_ or self._formats[ends]]
        seconds, latency = num_bytes / link.bytes_per_second, link.round_trip_seconds / 2
        sides = self._sides_of[ends]
        self.tasks.append(Task(phase, self._layer, tile, ends[1], sides, seconds, after, latency, int(num_bytes)))
        return len(self.tasks) - 1

    def _wire_seconds(self, rank: int, values: float, format_: Values, converted: float = 0.5) -> float:
        return wire_seconds(self._blocks[rank].wire, values, format_, converted)

    def _wire_task(self, rank: int, seconds: float, after: tuple[int, ...]) -> int:
        """The compute seconds that a phase's traffic takes: one task, somewhere in the phase."""
        return self._task(Work.WIRE, rank, seconds, after)
