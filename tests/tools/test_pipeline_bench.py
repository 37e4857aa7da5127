"""The benchmark of throughput pipelines: the paper's set-up is what is drawn, and results are taken up where they ended."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from support.graphs import chain, save_graph
from typer.testing import CliRunner

from tools.bench import partition as bench
from tools.bench.__main__ import app
from tools.bench.partition_setup import ACCOUNTINGS, positions, problem_of, rates

MIB = 1 << 20


def test_rates_are_the_papers() -> None:
    places = np.array([[80.0, 0.0], [0.0, 3.0], [80.0, 4.0]])
    to_router = rates(places, between_nodes=False) * 8 / 1e6
    assert to_router[0, 1] == to_router[1, 0] == pytest.approx(5.5, abs=0.02)  # of the slower end
    assert to_router[0, 2] == pytest.approx(math.log2(1 + 283230 / 6416))
    between = rates(places, between_nodes=True) * 8 / 1e6
    assert between[0, 2] == pytest.approx(math.log2(1 + 283230 / 16))
    assert np.isinf(np.diagonal(between)).all()
    drawn = np.abs(positions(500, Random(1)))
    assert ((drawn > 1) & (drawn < 150)).all()


def test_accountings_differ_as_they_say() -> None:
    spec = chain(1, [400, 800, 1200], [4000, 8000, 12000])
    paper, weights, notebooks = (problem_of(spec, ACCOUNTINGS[name], MIB, 2) for name in ACCOUNTINGS)
    assert paper.stage_bytes[0].tolist() == [4400, 13200, 26400]
    assert weights.stage_bytes[0].tolist() == [4000, 12000, 24000]
    # A quarter of each weight, without the first block; an output's floats count twice where they travel.
    assert notebooks.stage_bytes[0].tolist() == [0, 2800, 7000]
    assert paper.boundary_bytes == weights.boundary_bytes == pytest.approx((400 / 3.024, 800 / 3.024))
    assert notebooks.boundary_bytes == pytest.approx((800 / 1.44, 1600 / 1.44))


def command(folder: Path, *more: str) -> str:
    result = CliRunner().invoke(app, ["partition", "--graphs", str(folder), *more])
    assert result.exit_code == 0, result.output
    return str(result.output)


def test_results_are_taken_up_where_they_ended(tmp_path: Path) -> None:
    graphs, saved, tables = tmp_path / "graphs", tmp_path / "rows.json", tmp_path / "tables.md"
    graphs.mkdir()
    sizes = [400_000, 100_000, 300_000, 50_000, 200_000, 10]
    save_graph(graphs / "ResNet50.json", replace(chain(1, sizes, [30 * MIB] * 6), name="ResNet50"))
    options = ("--nodes", "5,7", "--kappa", "64", "--classes", "2,4", "--json", str(saved), "--markdown", str(tables))
    command(graphs, "--runs", "2", "--ratio-runs", "0", *options)
    first = json.loads(saved.read_text())
    assert [len(row["seconds"]["pipeline"]) for row in first] == [2, 2]
    command(graphs, "--runs", "3", "--ratio-runs", "2", *options)
    second = json.loads(saved.read_text())
    assert [len(row["seconds"]["pipeline"]) for row in second] == [3, 3, 2]
    for before, after in zip(first, second, strict=False):
        assert after["seconds"]["pipeline"][:2] == before["seconds"]["pipeline"]
    for row in second:
        columns = [row["seconds"][name] for name in (bench.BOUND, bench.EXACT, bench.PIPELINE)]
        assert all(bound <= exact <= published for bound, exact, published in zip(*columns, strict=True))
    text = tables.read_text()
    assert "pipeline-exact is worse than pipeline in 0 of 8 runs" in text
    assert "| ResNet50 | 64 MiB | 5 |" in text


def test_points_are_told(tmp_path: Path) -> None:
    save_graph(tmp_path / "small.json", chain(1, [10, 20, 30], [1000] * 3))
    text = command(tmp_path, "--points")
    assert "1 of 1 graphs have usable points" in text
    assert "| chain | 3 | 2 | 2 | 1 | 0.98 KiB | 0 | 0 B | yes | 67% | 67% |" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--accounting", "magic"), "--accounting"),
        (("--nodes", "5,x"), "--nodes"),
        (("--nodes", "0"), "--nodes"),
        (("--model", "Absent"), "--model"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    save_graph(tmp_path / "small.json", chain(1, [10, 20]))
    result = CliRunner().invoke(app, ["partition", "--graphs", str(tmp_path), *options])
    assert result.exit_code == 1
    assert told in result.output


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    save_graph(tmp_path / "small.json", chain(1, [10, 20]))
    other = tmp_path / "other.txt"
    other.write_text('{"mine": 1}')
    result = CliRunner().invoke(app, ["partition", "--graphs", str(tmp_path), "--json", str(other)])
    assert result.exit_code == 1
    assert "--json" in result.output
    assert other.read_text() == '{"mine": 1}'
