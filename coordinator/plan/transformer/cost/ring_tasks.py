"""Tasks of the collectives of a tensor-parallel step, from the same ring schedules that the workers run. Pure.

H hidden, D ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from coordinator.plan.simulator import Task, compute_resources, transfer_resources
from coordinator.plan.transformer.cost.layout import PlanLayout, attention_ratio
from hearth.plan.common import BYTES_PER_VALUE, ValueFormatName
from hearth.plan.geometry import Span, rows_per_rank
from hearth.plan.phases import Phase, TaskKind, Work, ring_all_gather, ring_reduce_scatter
from hearth.plan.transformer import TensorParallel

TaskIndices = tuple[int, ...]  # the tasks that another one waits for
RankPair = tuple[int, int]  # the ranks that send and receive


class RingTasks:
    """Builder of the tasks of a step or of one micro-batch. Each method appends its tasks for all ranks.

    `last[r]` are the tasks that rank r's next computation must wait for. `rows[r]` is the number of rows that rank r owns.
    """

    def __init__(self, layout: PlanLayout[TensorParallel], part: Span) -> None:
        self.tasks: list[Task] = []
        self.spec, self.body, self.blocks, self.ranks = layout.spec, layout.body, layout.blocks, layout.ranks
        self.num_rows = part.size
        self.rows = rows_per_rank(self.body.row_weights, part.size)
        self.last_tasks: list[TaskIndices] = [()] * len(self.ranks)
        self.layer: int | None = None  # of the tasks being appended; None: outside the layers
        self._layout = layout
        self._num_ranks = len(self.ranks)
        self._sides_of = {ends: transfer_resources(*ends, layout.media[ends]) for ends in layout.links}
        # A profile measured at another sequence length is scaled by the rows; planning profiles at the request's length.
        self.scale = [part.size / blocks.seq_len for blocks in self.blocks]
        self.core_scale = [attention_ratio(self.spec, part, blocks.seq_len) for blocks in self.blocks]
        self._tile_factor = [[blocks.tile_factor(rows) for rows in self.rows] for blocks in self.blocks]

    # ---- seconds ----------------------------------------------------------------------------------------------------

    @property
    def zero_seconds(self) -> list[list[float]]:
        """Zero seconds for every tile on every rank, as `[r][k]`."""
        return [[0.0] * self._num_ranks for _ in self.ranks]

    def own_rows_seconds(self, rank: int, whole: float) -> float:
        """Seconds of a GEMM over the rank's own rows, if one over all rows takes `whole`."""
        return whole * self.scale[rank] * self.rows[rank] / self.num_rows * self._tile_factor[rank][rank]

    def tile_seconds(self, block: Callable[[int], float]) -> list[list[float]]:
        """Seconds of rank r's block on tile k, as `[r][k]`."""
        return [
            [
                block(r) * self.scale[r] * tile / self.num_rows * factor
                for tile, factor in zip(self.rows, self._tile_factor[r], strict=True)
            ]
            for r in self.ranks
        ]

    # ---- phases ---------------------------------------------------------------------------------------------------

    def embedding(self, rows: Sequence[int]) -> None:
        """Each owner of vocabulary sends embedding rows straight to the rank that needs them; rank r needs `rows[r]`.

        Tokens are assumed to be spread evenly over the vocabulary. Replicated embeddings are not sent.
        """
        if self.body.embedding == "sharded":
            owned = [share / self.spec.vocab_size for share in self.body.vocabulary]
            values = [
                [rows[target] * owned[source] * self.spec.hidden_size for target in self.ranks] for source in self.ranks
            ]
            self.wait_for(self.exchange(Phase.EMBED, self.zero_seconds, values))
        self.compute(Work.EMBEDDING, [self.blocks[r].embedding(rows[r]) for r in self.ranks])

    def head(self) -> None:
        """The logits of the last row, each rank's share of them. Sending the row is negligible and left out."""
        share_bytes = [share * self.spec.hidden_size * self.spec.head_bytes for share in self.body.vocabulary]
        self.compute(Work.HEAD, [self.blocks[r].decode_seconds_per_byte * share_bytes[r] for r in self.ranks])

    def compute(self, kind: Work, seconds: Sequence[float]) -> None:
        for rank in self.ranks:
            self.last_tasks[rank] = (self.add_task(kind, rank, seconds[rank], self.last_tasks[rank]),)

    def connective(self, kind: Work, rows: Sequence[int]) -> None:
        self.compute(kind, [self.blocks[r].connective(rows[r]) for r in self.ranks])

    def gather(self, phase: Phase, seconds: Sequence[Sequence[float]], row_values: int | None = None) -> None:
        """Ring AllGather: `seconds[r][k]` is rank r's GEMM on tile k, which may start when the tile has arrived.

        Without a GEMM (no `phase.work`), tasks of the phase itself that take no time end when the tiles have arrived.
        """
        arrived, wire_seconds = self._ring_all_gather(phase, row_values or self.spec.hidden_size)
        for rank in self.ranks:
            before = self.last_tasks[rank]
            ends = []
            for tile in (step.compute for step in ring_all_gather(self._num_ranks, rank)):
                if self.rows[tile]:
                    after = (*before, *arrived[rank, tile])
                    ends.append(self.add_task(phase.work or phase, rank, seconds[rank][tile], after, tile))
                if tile == rank:
                    ends.append(self.add_task(Work.WIRE, rank, wire_seconds[rank], before))
            self.last_tasks[rank] = tuple(ends) or before

    def scatter(self, phase: Phase, seconds: Sequence[Sequence[float]]) -> None:
        """Ring ReduceScatter: compute a tile, add the partial sum that arrived, and send it on."""
        kind = phase.work or phase
        start = list(self.last_tasks)
        if not self.body.overlap:
            for rank in self.ranks:
                start[rank] = (self.add_task(kind, rank, sum(seconds[rank]), start[rank]),)
            seconds = self.zero_seconds
        computed: dict[tuple[int, int], int] = {}
        for rank in self.ranks:
            before = start[rank]
            for tile in self._reduction_order(rank):
                computed[rank, tile] = self.add_task(kind, rank, seconds[rank][tile], before, tile)
                before = (computed[rank, tile],)
            self.last_tasks[rank] = before
        self._ring_reduce_scatter(phase, computed, start)

    def gather_and_scatter(
        self, entering: Phase, first: Sequence[Sequence[float]], leaving: Phase, second: Sequence[Sequence[float]]
    ) -> None:
        """A gather and a scatter that run both GEMMs of a tile one after the other.

        The first partial sums are sent while later tiles are still being gathered. `first` and `second` are the seconds of
        the GEMMs, as in `gather`.
        """
        if not self.body.overlap:
            self.gather(entering, first)
            self.scatter(leaving, second)
            return
        up, down = entering.work or entering, leaving.work or leaving
        start = list(self.last_tasks)
        arrived, wire_seconds = self._ring_all_gather(entering, self.spec.hidden_size)
        computed: dict[tuple[int, int], int] = {}
        for rank in self.ranks:
            before = start[rank]
            if self.rows[rank]:
                before = (self.add_task(up, rank, first[rank][rank], before, rank),)
            wire = self.add_task(Work.WIRE, rank, wire_seconds[rank], start[rank])
            for tile in self._reduction_order(rank):
                if tile != rank:
                    after = (*before, *arrived[rank, tile])
                    before = (self.add_task(up, rank, first[rank][tile], after, tile),)
                computed[rank, tile] = self.add_task(down, rank, second[rank][tile], before, tile)
                before = (computed[rank, tile],)
            self.last_tasks[rank] = (*before, wire)
        self._ring_reduce_scatter(leaving, computed, start)

    def _reduction_order(self, rank: int) -> list[int]:
        """The tiles in the order in which the ring sums them; tiles without rows are left out."""
        return [step.compute for step in ring_reduce_scatter(self._num_ranks, rank) if self.rows[step.compute]]

    def _ring_all_gather(
        self, phase: Phase, row_values: int
    ) -> tuple[dict[tuple[int, int], TaskIndices], Sequence[float]]:
        """Append the transfers.

        Returns the tasks after which rank r has tile k, as `[r, k]`, and the CPU seconds that each rank's ends of the
        transfers take.
        """
        arrived: dict[tuple[int, int], TaskIndices] = {(r, r): self.last_tasks[r] for r in self.ranks}
        formats: dict[tuple[int, int], ValueFormatName] = {
            (r, r): "exact" for r in self.ranks
        }  # format of tile k on rank r
        wire_seconds = [0.0] * self._num_ranks
        for t in range(self._num_ranks - 1):
            for rank in self.ranks:
                tile = ring_all_gather(self._num_ranks, rank)[t].send
                assert tile is not None
                if self.rows[tile]:
                    ends = rank, (rank + 1) % self._num_ranks
                    num_values, held_format = self.rows[tile] * row_values, formats[rank, tile]
                    index = self._transfer(
                        ends, phase, tile, num_values, arrived[rank, tile], wire_seconds, held_format
                    )
                    arrived[ends[1], tile] = (index,)
                    formats[ends[1], tile] = self._format(ends, held_format)
        if not self.body.overlap:
            all_arrivals = tuple(index for after in arrived.values() for index in after)
            arrived = dict.fromkeys(arrived, all_arrivals)
        return arrived, wire_seconds

    def _ring_reduce_scatter(
        self, phase: Phase, computed: dict[tuple[int, int], int], start: Sequence[TaskIndices]
    ) -> None:
        """Append the transfers; `computed[r, k]` is the task of rank r's partial sum of tile k.

        The CPU work of the transfers may begin after `start`.
        """
        partial: dict[tuple[int, int], TaskIndices] = {}
        wire_seconds = [0.0] * self._num_ranks
        for t in range(self._num_ranks):
            for rank in self.ranks:
                step = ring_reduce_scatter(self._num_ranks, rank)[t]
                tile = step.compute
                if not self.rows[tile]:
                    continue
                after = (computed[rank, tile], *partial.get((rank, tile), ()))
                if step.send is not None:
                    ends = rank, (rank + 1) % self._num_ranks
                    num_values = self.rows[tile] * self.spec.hidden_size
                    partial[ends[1], tile] = (self._transfer(ends, phase, tile, num_values, after, wire_seconds),)
                else:
                    self.last_tasks[rank] = (*self.last_tasks[rank], *after)
        for rank in self.ranks:
            wire = self.add_task(Work.WIRE, rank, wire_seconds[rank], start[rank])
            self.last_tasks[rank] = (*self.last_tasks[rank], wire)

    def exchange(
        self,
        phase: Phase,
        seconds: Sequence[Sequence[float]],
        num_values: Sequence[Sequence[float]],
        tiled: bool = False,
    ) -> list[dict[int, TaskIndices]]:
        """All-to-all: rank r computes what rank k needs (`seconds[r][k]`) and sends it; it computes its own part last.

        `tiled`: rank r computes on the rows of rank k; otherwise on its own rows, for rank k. Returns, for each rank, the
        tasks after which the parts of each source have arrived; `last_tasks` only has the rank's own compute (see `wait_for`).
        """
        kind = phase.work or phase
        arrived: list[dict[int, TaskIndices]] = [{} for _ in self.ranks]
        wire_seconds = [0.0] * self._num_ranks
        start = list(self.last_tasks)
        for rank in self.ranks:
            before = start[rank]
            for offset in (*range(1, self._num_ranks), 0):
                target = (rank + offset) % self._num_ranks
                if seconds[rank][target] > 0:
                    tile, peer = (target, None) if tiled else (rank, target)
                    before = (self.add_task(kind, rank, seconds[rank][target], before, tile, peer),)
                values = num_values[rank][target]
                if offset and values > 0:
                    arrived[target][rank] = (
                        self._transfer((rank, target), phase, target, values, before, wire_seconds),
                    )
            self.last_tasks[rank] = before
        for rank in self.ranks:
            wire = self.add_task(Work.WIRE, rank, wire_seconds[rank], start[rank])
            self.last_tasks[rank] = (*self.last_tasks[rank], wire)
            arrived[rank][rank] = self.last_tasks[rank]
        return arrived

    def wait_for(self, arrived: Sequence[Mapping[int, TaskIndices]]) -> None:
        """Make each rank's next computation wait for everything that arrives there."""
        for rank in self.ranks:
            tasks = (task for after in arrived[rank].values() for task in after)
            self.last_tasks[rank] = tuple(dict.fromkeys((*self.last_tasks[rank], *tasks)))

    # ---- tasks ----------------------------------------------------------------------------------------------------

    def add_task(
        self,
        kind: TaskKind,
        rank: int,
        seconds: float,
        after: tuple[int, ...],
        tile: int | None = None,
        peer: int | None = None,
    ) -> int:
        after = tuple(dict.fromkeys(after))
        resources = compute_resources(rank) if kind is not Work.WIRE else self._layout.wire_resources(rank)
        self.tasks.append(Task(kind, self.layer, tile, peer, resources, seconds, after))
        return len(self.tasks) - 1

    def _transfer(
        self,
        ends: RankPair,
        phase: Phase,
        tile: int,
        values: float,
        after: TaskIndices,
        busy: list[float],
        held_format: ValueFormatName = "exact",
    ) -> int:
        """Append a transfer from sender to receiver (`ends`), and add the CPU seconds of both to `busy`.

        `held_format` is the format in which the sender holds the values: converted values are forwarded as they are.
        """
        source, target = ends
        link, format_ = self._layout.links[ends], self._format(ends, held_format)
        num_bytes = values * BYTES_PER_VALUE[format_]
        seconds, latency = num_bytes / link.bytes_per_second, link.round_trip_seconds / 2
        sides = self._sides_of[ends]
        self.tasks.append(Task(phase, self.layer, tile, target, sides, seconds, after, latency, int(num_bytes)))
        busy[source] += self._layout.wire_seconds(source, values, format_, 0.5 if held_format == "exact" else 0.0)
        busy[target] += self._layout.wire_seconds(target, values, format_)
        return len(self.tasks) - 1

    def _format(self, ends: tuple[int, int], held_format: ValueFormatName) -> ValueFormatName:
        return self._layout.formats[ends] if held_format == "exact" else held_format
