"""Partition points of published networks equal the tables of `docs/results`, and are those of the paper's rule.

The Keras graphs are those of `HEARTH_GRAPHS`; the ONNX files are exported here with random weights. Nothing is timed.
"""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path

import pytest
from support.graphs import chain
from support.published_points import published_points

from coordinator.models.onnx.json_reader import read_graph_json
from coordinator.models.onnx.reader import read_onnx
from coordinator.plan.graph.throughput.points import Chain, candidate_chain, fine_chain
from hearth.plan.graph_spec import GraphSpec
from hearth.platform.units import format_bytes
from tools.bench.results import RESULTS, load_result

Row = dict[str, str]  # cell by column


def recorded(result: str) -> dict[str, Row]:
    """The rows of a result's table by graph."""
    table = load_result(RESULTS / f"{result}.json").tables[0]
    return {cells[0]: dict(zip(table.columns, cells, strict=True)) for cells in table.rows}


KERAS, ONNX = recorded("partition-points-keras"), recorded("partition-points-onnx")


def computed(spec: GraphSpec) -> Row:
    """The row of a graph. The points exclude the source and include the sink."""
    found = candidate_chain(spec)
    largest_block = max(map(len, found.blocks))
    # Tensors that cross each cut but are not the output of its point: side inputs, for instance a mask.
    carried = [
        [spec.tensors[index].num_bytes for index in crossing if spec.tensors[index].source != point]
        for point, crossing in zip(found.points, found.crossing, strict=False)
    ]
    return {
        "graph": spec.name,
        "operators": f"{spec.num_operators}",
        "points": f"{len(found.points) - 1}",
        "by LP and AP": f"{len(published_points(spec)) - 1}" if has_one_source(spec) else "-",
        "largest block": f"{largest_block}",
        "its weights": format_bytes(max(map(spec.parameter_bytes, found.blocks))),
        "carried along": f"{max(map(len, carried), default=0)}",
        "their bytes": format_bytes(max(map(sum, carried), default=0)),
        "usable": "yes" if 2 * largest_block <= spec.num_operators else "no",
        "larger part at points": f"{larger_part(spec, found):.0%}",
        "at any cut": f"{larger_part(spec, fine_chain(spec)):.0%}",
    }


def has_one_source(spec: GraphSpec) -> bool:
    return sum(not before for before in spec.predecessors) == 1


def larger_part(spec: GraphSpec, cut_points: Chain) -> float:
    """Fraction of the FLOPs in the larger part when the chain is cut in two as evenly as possible."""
    flops = [sum(spec.operators[operator].flops for operator in block) for block in cut_points.blocks]
    before = [0.0, *accumulate(flops)]
    return min(max(each, before[-1] - each) for each in before) / before[-1]


def check(spec: GraphSpec, row: Row) -> None:
    """Compare the recorded columns: neither table has all of them."""
    found = computed(spec)
    assert {column: found[column] for column in row} == row
    if has_one_source(spec):
        assert candidate_chain(spec).points == published_points(spec)


@pytest.mark.parametrize("name", KERAS)
def test_points_of_keras_graphs_equal_the_recorded_table(name: str) -> None:
    folder = os.environ.get("HEARTH_GRAPHS")
    if not folder or not (Path(folder) / "keras").is_dir():
        pytest.skip("HEARTH_GRAPHS does not name a folder with keras/ in it")
    check(read_graph_json(Path(folder) / "keras" / f"{name}.json"), KERAS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ONNX)
def test_points_of_onnx_exports_equal_the_recorded_table(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="exports come from transformers")
    from tools.graph_models import build, export

    path = export(build(name), tmp_path / f"{name}.onnx")
    spec = read_onnx(path).spec
    path.unlink()  # up to 440 MB, and pytest keeps the folder
    check(spec, ONNX[name])


def test_row_of_a_chain() -> None:
    assert list(computed(chain(1, [10, 20, 30], [1000] * 3)).values()) == [
        "chain", "3", "2", "2", "1", "0.98 KiB", "0", "0 B", "yes", "67%", "67%"
    ]  # fmt: skip
