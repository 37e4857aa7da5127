"""Kind `partition-points`: where graphs can be cut, by Hearth's rule and by the throughput paper's (III-A)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from coordinator.plan.graph.throughput.points import Chain, candidate_chain, fine_chain
from hearth.plan.graph_spec import GraphSpec
from hearth.platform.units import format_bytes
from tools.bench.experiment import Context, Experiment
from tools.bench.graph_files import read_graphs
from tools.bench.results import Summary, Table

_MANY_POINTS = 25  # the paper: "almost all" graphs have at least as many


class PointsRow(BaseModel):
    """Candidate partition points of one graph."""

    model_config = ConfigDict(frozen=True)

    model: str
    num_operators: int
    num_points: int  # without the source, with the sink
    published_points: int | None  # by the paper's rule; None for a graph with several sources
    agrees: bool  # whether both rules find the same points
    largest_block: int  # operators
    largest_block_bytes: int  # of weights
    most_carried: int  # most tensors that cross one cut, not counting the output of its point
    most_carried_bytes: int
    half_at_points: float  # fraction of the FLOPs in the larger half of the most even cut in two
    half_at_cuts: float  # the same, if several tensors may cross the cut

    @property
    def usable(self) -> bool:
        """Whether no block has more than half of the operators, so that cuts can distribute the graph."""
        return 2 * self.largest_block <= self.num_operators


class PartitionPoints(Experiment):
    """Candidate partition points of every graph in a folder. Nothing is timed."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(PointsRow)

    graphs: Path  # folder of graphs, JSON or ONNX

    def measure(self, context: Context) -> Iterator[PointsRow]:
        for spec in read_graphs(self.graphs):
            context.report(spec.name)
            yield points_row(spec)

    def summary(self, rows: Sequence[PointsRow]) -> Summary:
        unusable = [row.model for row in rows if not row.usable]
        many = sum(row.num_points >= _MANY_POINTS for row in rows)
        single = [row for row in rows if row.published_points is not None]
        said = (
            f"{len(rows) - len(unusable)} of {len(rows)} graphs have usable points (no block is more than half of the "
            f"operators); without: {', '.join(unusable) or 'none'}",
            f"{many} have at least {_MANY_POINTS} points",
            f"the paper's rule (LP and AP) finds the same points in {sum(row.agrees for row in single)} of the "
            f"{len(single)} graphs with one source",
        )
        return Summary(conclusions=said, tables=(Table.of("Partition points", _COLUMNS, map(_cells, rows)),))


_COLUMNS = (
    "graph", "operators", "points", "by LP and AP", "largest block", "its weights", "carried along", "their bytes", "usable",
    "larger half at points", "at any cut",
)  # fmt: skip


def _cells(row: PointsRow) -> tuple[object, ...]:
    published = "-" if row.published_points is None else f"{row.published_points}{'' if row.agrees else ' (others)'}"
    return (
        row.model, row.num_operators, row.num_points, published, row.largest_block, format_bytes(row.largest_block_bytes),
        row.most_carried, format_bytes(row.most_carried_bytes), "yes" if row.usable else "no", f"{row.half_at_points:.0%}",
        f"{row.half_at_cuts:.0%}",
    )  # fmt: skip


def points_row(spec: GraphSpec) -> PointsRow:
    chain = candidate_chain(spec)
    several_sources = sum(not before for before in spec.predecessors) > 1
    published = None if several_sources else published_points(spec)
    # Bytes of the tensors that cross each cut but are not the output of its point: side inputs, for instance a mask.
    carried = [
        [spec.tensors[index].num_bytes for index in crossing if spec.tensors[index].source != point]
        for point, crossing in zip(chain.points, chain.crossing, strict=False)
    ]
    return PointsRow(
        model=spec.name, num_operators=spec.num_operators, num_points=len(chain.points) - 1,
        published_points=None if published is None else len(published) - 1, agrees=published == chain.points,
        largest_block=max(map(len, chain.blocks)), largest_block_bytes=max(map(spec.parameter_bytes, chain.blocks)),
        most_carried=max(map(len, carried), default=0), most_carried_bytes=max(map(sum, carried), default=0),
        half_at_points=_larger_half(spec, chain), half_at_cuts=_larger_half(spec, fine_chain(spec)),
    )  # fmt: skip


def _larger_half(spec: GraphSpec, chain: Chain) -> float:
    """Fraction of the FLOPs in the larger half when the chain is cut in two as evenly as possible."""
    flops = [sum(spec.operators[operator].flops for operator in block) for block in chain.blocks]
    before = [0.0, *accumulate(flops)]
    return min(max(each, before[-1] - each) for each in before) / before[-1] if before[-1] else 1.0


def published_points(spec: GraphSpec) -> tuple[int, ...]:
    """Partition points by the paper's rule, for a graph with one source. Several sinks get a virtual one.

    u is the next point if no other operator has the same longest path length from the source (LP) and every path from the
    previous point goes through u (AP). Raises ValueError for several sources.
    """
    sources = [index for index, before in enumerate(spec.predecessors) if not before]
    if len(sources) != 1:
        raise ValueError(f"the rule is for one source; {spec.name} has {len(sources)}")
    virtual = spec.num_operators
    successors = [after or (virtual,) for after in spec.successors] + [()]
    longest = [0] * (virtual + 1)
    for operator, after in enumerate(successors):
        for each in after:
            longest[each] = max(longest[each], longest[operator] + 1)
    alone = {each for each in range(virtual) if longest.count(longest[each]) == 1}
    points = sources
    for operator in sorted(range(virtual), key=lambda each: (longest[each], each)):
        if operator in alone and operator not in points and _all_pass(successors, longest, points[-1], operator):
            points = [*points, operator]
    return tuple(points)


def _all_pass(successors: Sequence[Sequence[int]], longest: Sequence[int], start: int, goal: int) -> bool:
    """The paper's AP: depth first from `start`, no operator deeper than `goal` is reached before `goal`."""
    todo, seen = [start], {start}
    while todo:
        for each in successors[todo.pop()]:
            if each != goal and longest[each] > longest[goal]:
                return False
            if each != goal and each not in seen:
                seen.add(each)
                todo.append(each)
    return True
