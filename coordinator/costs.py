"""Turns a plan and a cluster's profile into the task graph of one step, from the same ring schedules the workers run.

S rows, H hidden, w = heads * head_dim of a rank. Ranks are the cluster's devices in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.simulator import Task, Timeline, simulate
from hearth import schedules
from hearth.geometry import rows_for
from hearth.model.spec import ModelSpec
from hearth.plan import Prediction, TransformerPlan, WireFormat
from hearth.profile import ClusterProfile

_BYTES_PER_VALUE = {"exact": 4, "bf16": 2, "fp16": 2, "int8": 1}


class StepGraph:
    """Builds the tasks of one step. Every `_x` method appends one phase for all ranks.

    `self._last[r]` are the tasks that rank r's next compute must wait for.
    """

    def __init__(
        self, spec: ModelSpec, body: TransformerPlan, cluster: ClusterProfile, seq_len: int, wire: WireFormat
    ) -> None:
        self.tasks: list[Task] = []
        self._spec = spec
        self._body = body
        self._cluster = cluster
        self._blocks = [device.blocks for device in cluster.devices]
        self._num_ranks = len(cluster.devices)
        self._seq_len = seq_len
        self._rows = rows_for(body.row_weights, seq_len)
        self._row_bytes = spec.hidden_size * _BYTES_PER_VALUE[wire.values]
        self._last: list[tuple[int, ...]] = [()] * self._num_ranks
        self._ranks = range(self._num_ranks)
        self._build()

    def _build(self) -> None:
        strategy = self._body.strategy
        layer = {"sp": self._sequence_layer, "megatron-tp": self._megatron_layer}.get(strategy, self._hybrid_layer)
        self._embedding(everywhere=strategy == "megatron-tp")
        for _ in range(self._spec.num_layers):
            layer()

    # ---- layers ---------------------------------------------------------------------------------------------------

    def _hybrid_layer(self) -> None:
        attention = [self._blocks[r].attention(self._body.heads[r]) * self._scale(r) for r in self._ranks]
        qkv, core, out = _attention_parts(self._spec, self._seq_len)
        self._gather(_tiled(attention, qkv, self._rows))
        self._compute("attention", [seconds * core for seconds in attention])
        self._scatter(_tiled(attention, out, self._rows))
        self._connective(self._rows)
        mlp = [self._blocks[r].mlp(self._body.columns[r]) * self._scale(r) for r in self._ranks]
        self._gather(_tiled(mlp, 0.5, self._rows))
        self._scatter(_tiled(mlp, 0.5, self._rows))
        self._connective(self._rows)

    def _megatron_layer(self) -> None:
        """Ring AllReduce after each block: a ReduceScatter overlapped with its GEMM, then a plain AllGather."""
        attention = [self._blocks[r].attention(self._body.heads[r]) * self._scale(r) for r in self._ranks]
        mlp = [self._blocks[r].mlp(self._body.columns[r]) * self._scale(r) for r in self._ranks]
        qkv, core, out = _attention_parts(self._spec, self._seq_len)
        nothing = [[0.0] * self._num_ranks for _ in self._ranks]
        for seconds, before, after in ((attention, qkv + core, out), (mlp, 0.5, 0.5)):
            self._compute("block", [s * before for s in seconds])
            self._scatter(_tiled(seconds, after, self._rows))
            self._gather(nothing)
            self._connective([self._seq_len] * self._num_ranks)

    def _sequence_layer(self) -> None:
        """The paper's SP: the rows' K and V are gathered, then everything runs on own rows."""
        whole = [self._blocks[r].sequence_layer(self._rows[r]) * self._scale(r) for r in self._ranks]
        projection = 3 * self._spec.hidden_size / _layer_work(self._spec, self._seq_len)
        nothing = [[0.0] * self._num_ranks for _ in self._ranks]
        self._compute("qkv", [seconds * projection for seconds in whole])
        self._gather(nothing)
        self._gather(nothing)
        self._compute("layer", [seconds * (1 - projection) for seconds in whole])

    # ---- phases ---------------------------------------------------------------------------------------------------

    def _embedding(self, everywhere: bool) -> None:
        """Each vocabulary owner sends its rows straight to the rank that needs them (tokens taken as spread evenly)."""
        owned = [share / self._spec.vocab_size for share in self._body.vocabulary]
        rows = [self._seq_len] * self._num_ranks if everywhere else list(self._rows)
        sends = {
            (source, target): self._transfer(source, target, rows[target] * owned[source], self._last[source])
            for source in self._ranks
            for target in self._ranks
            if source != target and rows[target] * owned[source] > 0
        }
        for target in self._ranks:
            arrived = tuple(index for (_, to), index in sends.items() if to == target)
            self._last[target] = arrived
        self._compute("embedding", [self._blocks[r].embedding(rows[r]) for r in self._ranks])

    def _compute(self, name: str, seconds: Sequence[float]) -> None:
        for rank in self._ranks:
            self._last[rank] = (self._task(f"{name} {rank}", rank, seconds[rank], self._last[rank]),)

    def _connective(self, rows: Sequence[int]) -> None:
        self._compute("connective", [self._blocks[r].connective(rows[r]) for r in self._ranks])

    def _gather(self, seconds: Sequence[Sequence[float]]) -> None:
        """Ring AllGather: `seconds[r][k]` is rank r's GEMM on tile k, which may start when the tile is there."""
        arrived: dict[tuple[int, int], tuple[int, ...]] = {(r, r): self._last[r] for r in self._ranks}
        for t in range(self._num_ranks - 1):
            for rank in self._ranks:
                tile = schedules.ring_all_gather(self._num_ranks, rank)[t].send
                assert tile is not None
                following = (rank + 1) % self._num_ranks
                if self._rows[tile]:
                    index = self._transfer(rank, following, self._rows[tile], arrived[rank, tile])
                    arrived[following, tile] = (index,)
        ends: list[list[int]] = [[] for _ in self._ranks]
        everything = tuple(index for after in arrived.values() for index in after)
        for rank in self._ranks:
            before = self._last[rank]
            for step in schedules.ring_all_gather(self._num_ranks, rank):
                tile = step.compute
                if not self._rows[tile]:
                    continue
                after = arrived[rank, tile] if self._body.overlap else everything
                ends[rank].append(self._task(f"gather {tile}", rank, seconds[rank][tile], (*before, *after)))
        for rank in self._ranks:
            self._last[rank] = tuple(ends[rank]) or self._last[rank]

    def _scatter(self, seconds: Sequence[Sequence[float]]) -> None:
        """Ring ReduceScatter: a tile is computed, the partial sum that arrived is added, and it goes on."""
        partial: dict[tuple[int, int], tuple[int, ...]] = {}
        start = list(self._last)
        if not self._body.overlap:
            for rank in self._ranks:
                index = self._task(f"reduce {rank}", rank, sum(seconds[rank]), start[rank])
                start[rank] = (index,)
            seconds = [[0.0] * self._num_ranks for _ in self._ranks]
        computed: dict[tuple[int, int], int] = {}
        for rank in self._ranks:
            before = start[rank]
            for step in schedules.ring_reduce_scatter(self._num_ranks, rank):
                if self._rows[step.compute]:
                    index = self._task(f"reduce {step.compute}", rank, seconds[rank][step.compute], before)
                    computed[rank, step.compute] = index
                    before = (index,)
            self._last[rank] = before
        for t in range(self._num_ranks):
            for rank in self._ranks:
                step = schedules.ring_reduce_scatter(self._num_ranks, rank)[t]
                tile = step.compute
                if not self._rows[tile]:
                    continue
                after = (computed[rank, tile], *partial.get((rank, tile), ()))
                if step.send is not None:
                    following = (rank + 1) % self._num_ranks
                    partial[following, tile] = (self._transfer(rank, following, self._rows[tile], after),)
                else:
                    self._last[rank] = (*self._last[rank], *after)

    # ---- tasks ----------------------------------------------------------------------------------------------------

    def _task(self, name: str, rank: int, seconds: float, after: tuple[int, ...]) -> int:
        self.tasks.append(Task(name, (f"compute:{rank}",), seconds, tuple(dict.fromkeys(after))))
        return len(self.tasks) - 1

    def _transfer(self, source: int, target: int, rows: float, after: tuple[int, ...]) -> int:
        devices = self._cluster.devices
        link = self._cluster.link(devices[source].device_id, devices[target].device_id)
        seconds = rows * self._row_bytes / link.bytes_per_second
        sides = (f"send:{source}", f"receive:{target}")
        self.tasks.append(Task(f"{source}->{target}", sides, seconds, after, link.round_trip_seconds / 2))
        return len(self.tasks) - 1

    def _scale(self, rank: int) -> float:
        """A profile taken at another length is scaled by the rows; planning profiles at its own length."""
        return self._seq_len / self._blocks[rank].seq_len


def predict(
    spec: ModelSpec, body: TransformerPlan, cluster: ClusterProfile, seq_len: int, wire: WireFormat
) -> tuple[Prediction, tuple[float, ...]]:
    """Price one step: the prediction, and each rank's busy seconds."""
    timeline = simulate(StepGraph(spec, body, cluster, seq_len, wire).tasks)
    compute = tuple(timeline.busy.get(f"compute:{rank}", 0.0) for rank in range(len(cluster.devices)))
    return (
        Prediction(
            total_seconds=timeline.makespan,
            compute_seconds=max(compute),
            transfer_seconds=_busiest_link(timeline),
        ),
        compute,
    )


def _busiest_link(timeline: Timeline) -> float:
    return max((s for name, s in timeline.busy.items() if not name.startswith("compute")), default=0.0)


def _attention_parts(spec: ModelSpec, seq_len: int) -> tuple[float, float, float]:
    """Shares of an attention block's work per row: QKV 3H·w, attention 2S·w, output projection H·w."""
    parts = (3 * spec.hidden_size, 2 * seq_len, spec.hidden_size)
    return parts[0] / sum(parts), parts[1] / sum(parts), parts[2] / sum(parts)


def _layer_work(spec: ModelSpec, seq_len: int) -> float:
    """Work of a whole layer per row, in units of H: QKV, attention, output projection, MLP."""
    return 4 * spec.hidden_size + 2 * seq_len + 2 * spec.ffn_size


def _tiled(seconds: Sequence[float], share: float, rows: Sequence[int]) -> list[list[float]]:
    """Split each rank's part of a block over the tiles by their rows."""
    total = sum(rows)
    return [[block * share * tile / total for tile in rows] for block in seconds]
