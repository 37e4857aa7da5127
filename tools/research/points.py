"""Experiment `partition-points`: where graphs can be cut into a pipeline (Parthasarathy and Krishnamachari, III-A).

The points of Hearth (`candidate_chain`) next to those of the paper's rule. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from coordinator.models.graph_file import read_graph_file
from coordinator.plan.graph.throughput.points import candidate_chain
from hearth.errors import BadSetting
from hearth.plan.graph_spec import GraphSpec
from hearth.platform.units import format_bytes
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.results import Record, Summary, Table
from tools.research.moirai import find_files


class PointsRow(Record):
    """One graph. The points exclude the source and include the sink."""

    graph: str
    num_operators: int
    num_points: int
    equals_rule: bool | None  # whether the points are those of the paper's rule; None: it is for one source
    largest_block: int  # operators between two points
    largest_block_bytes: int  # the most weights of a block

    @classmethod
    def of(cls, spec: GraphSpec) -> PointsRow:
        """The row of a graph."""
        found = candidate_chain(spec)
        has_one_source = sum(not before for before in spec.predecessors) == 1
        return cls(
            graph=spec.name,
            num_operators=spec.num_operators,
            num_points=len(found.points) - 1,
            equals_rule=found.points == published_points(spec) if has_one_source else None,
            largest_block=max(map(len, found.blocks)),
            largest_block_bytes=max(map(spec.parameter_bytes, found.blocks)),
        )

    @property
    def is_usable(self) -> bool:
        """Whether no block has more than half of the operators."""
        return 2 * self.largest_block <= self.num_operators


class PartitionPoints(Experiment):
    """The points of every graph of a folder."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(PointsRow)
    # `graphs`: a folder of Keras models as JSON (see partition.py), ONNX files (`python -m tools.graph_models`) or both.
    PAGE = "partition"
    NAMED: ClassVar[Named] = {
        "partition-points": {
            "title": "Where graphs can be cut into a pipeline",
            "source": "Parthasarathy and Krishnamachari, III-A", "graphs": "keras",
        }
    }  # fmt: skip

    graphs: Path  # folder of graphs, JSON or ONNX

    def measure(self, context: Context) -> Iterator[PointsRow]:
        yield from map(PointsRow.of, read_graphs(self.graphs))

    def summary(self, rows: Sequence[PointsRow]) -> Summary:
        usable = sum(row.is_usable for row in rows)
        said = f"{usable} of {len(rows)} graphs have usable points: no block has more than half of the operators"
        return Summary(
            conclusions=(f"{said} (paper: 64 of 66)",), tables=(Table.of_columns("Partition points", COLUMNS, rows),)
        )


COLUMNS: Mapping[str, Callable[[PointsRow], object]] = {
    "graph": lambda row: row.graph,
    "operators": lambda row: row.num_operators,
    "points": lambda row: row.num_points,
    "as the rule": lambda row: {True: "yes", False: "no", None: "-"}[row.equals_rule],
    "largest block": lambda row: row.largest_block,
    "its weights": lambda row: format_bytes(row.largest_block_bytes),
    "usable": lambda row: "yes" if row.is_usable else "no",
}


def read_graphs(folder: Path, models: Sequence[str] = ()) -> list[GraphSpec]:
    """Read the graphs of a folder (JSON or ONNX) with these names, or all. Raises BadSetting, BadModelFile."""
    files = find_files("graphs", folder, (".json", ".onnx"))
    if unknown := [name for name in models if name not in files]:
        raise BadSetting(setting="models", reason=f"'{unknown[0]}' is none of {', '.join(files)}")
    return [read_graph_file(files[name], {}).spec for name in models or files]


# ---- the paper's rule -------------------------------------------------------------------------------------------------


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
    todo, seen = [start], {start, goal}
    while todo:
        for each in successors[todo.pop()]:
            if each not in seen:
                if longest[each] > longest[goal]:
                    return False
                seen.add(each)
                todo.append(each)
    return True
