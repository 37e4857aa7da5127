"""The experiment `partition`: the paper's set-up, tables of its figures, and interrupted runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.graphs import chain, save_graph

from hearth.errors import BadSetting
from tools.bench.experiment import Context, Experiment, make_experiment, read_settings
from tools.research.partition import BOUND, EXACT, PIPELINE, PartitionRow, positions, problem_of, rates

MIB = 1 << 20


def test_rates_equal_the_papers() -> None:
    places = np.array([[80.0, 0.0], [0.0, 3.0], [80.0, 4.0]])
    to_router = rates(places) * 8 / 1e6
    assert to_router[0, 1] == to_router[1, 0] == pytest.approx(5.5, abs=0.02)  # of the slower end
    assert to_router[0, 2] == pytest.approx(math.log2(1 + 283230 / 6416))
    assert np.isinf(np.diagonal(to_router)).all()
    drawn = np.abs(positions(500, Random(1)))
    assert ((drawn > 1) & (drawn < 150)).all()


def test_partition_holds_weights_and_outputs_and_sends_compressed_values() -> None:
    problem = problem_of(chain(1, [400, 800, 1200], [4000, 8000, 12000]), MIB, 2)
    assert problem.stage_bytes[0].tolist() == [4400, 13200, 26400]
    assert problem.boundary_bytes == pytest.approx((400 / 3.024, 800 / 3.024))


def experiment(name: str, folder: Path, **changes: Any) -> Experiment:
    return make_experiment({**read_settings(name), "graphs": str(folder), **changes})


def measured(chosen: Experiment, folder: Path, known: Sequence[PartitionRow] = ()) -> Iterator[Any]:
    return chosen.measure(Context(folder, lambda step: None, known))


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    """A folder with one graph, named like one of the paper's, whose pipeline in 64 MiB has several stages."""
    sizes = [400_000, 100_000, 300_000, 50_000, 200_000, 10]
    save_graph(tmp_path / "ResNet50.json", replace(chain(1, sizes, [30 * MIB] * 6), name="ResNet50"))
    return tmp_path


SMALL: dict[str, Any] = {
    "models": ["ResNet50"], "nodes": [5, 7], "memory_mib": [64, 256], "runs": 3, "ratio_runs": 2,
}  # fmt: skip


def test_planners_are_compared_in_the_same_clusters(graphs: Path) -> None:
    partition = experiment("partition", graphs, **SMALL)
    rows = list(measured(partition, graphs))
    assert [(row.num_nodes, row.memory_mib, row.outcome, row.num_runs) for row in rows] == [
        (5, 64, "measured", 3), (7, 64, "measured", 3), (5, 256, "fits on one node", 0), (7, 256, "fits on one node", 0),
        (50, 64, "measured", 2),
    ]  # fmt: skip
    for row in rows:
        columns = [row.seconds.get(name, ()) for name in (BOUND, EXACT, PIPELINE)]
        assert all(bound <= exact <= published for bound, exact, published in zip(*columns, strict=True))
    found = partition.summary(rows)
    assert "pipeline-exact in 8 runs: 0 worse than pipeline" in "\n".join(found.conclusions)
    bottlenecks, by_classes, over_bound = found.tables
    assert [row[:3] for row in bottlenecks.rows] == [("ResNet50", "64 MiB", "5"), ("ResNet50", "64 MiB", "7")]
    assert bottlenecks.notes == ("fits on one node: ResNet50 (5 x 256 MiB), ResNet50 (7 x 256 MiB)",)
    assert by_classes.columns[-7:] == ("2", "5", "8", "11", "14", "17", "20")
    assert [row[:3] for row in over_bound.rows] == [("ResNet50", "64 MiB", "50")]


def test_interrupted_run_resumes_with_its_rows(graphs: Path) -> None:
    partition = experiment("partition", graphs, **SMALL)
    rows = list(measured(partition, graphs))
    known = [row.model_copy(update={"num_stages": 99}) for row in rows[:2]]
    resumed = list(measured(partition, graphs, known))
    assert resumed[:2] == known
    assert [row.seconds for row in resumed[2:]] == [row.seconds for row in rows[2:]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"accounting": "magic"}, "accounting: Extra"),
        ({"nodes": [5, "x"]}, "nodes.1"),
        ({"nodes": [0]}, "nodes.0"),
        ({"models": ["Absent"]}, "models.*'Absent' is none of ResNet50"),
        ({"graphs": "nowhere"}, "graphs.*nowhere holds no .json or .onnx files"),
    ],
)
def test_invalid_settings_are_named(graphs: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadSetting, match=named):
        next(measured(experiment("partition", graphs, **changes), graphs))
