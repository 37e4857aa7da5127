"""Partition points of published networks equal the recorded table, and are those of the paper's rule.

The Keras graphs are those of `HEARTH_GRAPHS`; the ONNX files are exported here with random weights. Nothing is timed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.graphs import chain

from coordinator.models.graph_file import read_graph_file
from tools.bench.results import RESULTS, load_result
from tools.graph_models import NETWORKS
from tools.research.partition import COLUMNS, PointsRow

RECORDED = {row.graph: row for row in map(PointsRow.model_validate, load_result(RESULTS / "partition-points.json").raw)}


def cells(row: PointsRow) -> list[str]:
    return [str(cell(row)) for cell in COLUMNS.values()]


def check(path: Path) -> None:
    found = PointsRow.of(read_graph_file(path, {}).spec)
    assert cells(found) == cells(RECORDED[found.graph])
    assert found.equals_rule is not False


@pytest.mark.parametrize("name", sorted(RECORDED.keys() - {*NETWORKS}))
def test_points_of_keras_graphs_equal_the_recorded_table(name: str) -> None:
    folder = os.environ.get("HEARTH_GRAPHS")
    if not folder or not (Path(folder) / "keras").is_dir():
        pytest.skip("HEARTH_GRAPHS does not name a folder with keras/ in it")
    check(Path(folder) / "keras" / f"{name}.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECORDED.keys() & {*NETWORKS}))
def test_points_of_onnx_exports_equal_the_recorded_table(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="exports come from transformers")
    from tools.graph_models import build, export

    path = export(build(name), tmp_path / f"{name}.onnx")
    check(path)
    path.unlink()  # up to 440 MB, and pytest keeps the folder


def test_row_of_a_chain() -> None:
    assert cells(PointsRow.of(chain(1, [10, 20, 30], [1000] * 3))) == [
        "chain", "3", "2", "yes", "1", "0.98 KiB", "yes"
    ]  # fmt: skip
