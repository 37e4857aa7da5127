"""Experiment `doppler-real`: variations of a plan, what its rows show, and the files of requests with right answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.bench.doppler.correlation import rank_correlation
from tools.bench.doppler.real import VARIED, findings_of, varied_assignments
from tools.bench.graph_clients import _read_example, save_example
from tools.bench.graph_findings import served_table
from tools.bench.graph_home import Round, Served
from tools.bench.tensor.graphs import GRAPHS, ChainSizes, FfnnSizes, GraphName, GraphSizes, LlamaSizes, tensor_graph
from tools.bench.tensor.values import expected_result, result_blocks, whole_result

SMALL = GraphSizes(ChainSizes(16), FfnnSizes(64, 8, 16), LlamaSizes(16, 32, 4, 64, 64))


@pytest.mark.parametrize("name", GRAPHS)
def test_blocks_of_a_result_are_put_together_to_it(name: GraphName) -> None:
    graph = tensor_graph(name, SMALL)
    whole = expected_result(graph, SMALL, seed=0)
    blocks = result_blocks(graph, whole)
    assert np.array_equal(whole_result(graph, blocks), whole)


def test_example_keeps_names_and_values(tmp_path: Path) -> None:
    inputs, outputs = {"x[0,1]": np.arange(3)}, {"y/0": np.ones((2, 2), np.float32)}
    read = _read_example(save_example(tmp_path / "example.npz", inputs, outputs))
    assert [{name: array.tolist() for name, array in each.items()} for each in read] == [
        {"x[0,1]": [0, 1, 2]},
        {"y/0": [[1.0, 1.0], [1.0, 1.0]]},
    ]


def test_variations_are_distinct_and_near_or_far() -> None:
    base = (0, 1, 2, 3) * 8

    def seconds(devices: object) -> float:
        return 1.0 + sum(a != b for a, b in zip(devices, base, strict=True)) / 16  # type: ignore[call-overload]

    found = varied_assignments(base, 4, seconds, near=20, far=6)
    assert len(set(found)) == 26
    assert base not in found
    assert [seconds(each) <= 1.5 for each in found] == [True] * 20 + [False] * 6


def served(label: str, strategy: str, predicted: float, measured: float, difference: float = 0.0) -> Served:
    rounds = [Round(seconds=measured, answers=5, difference=difference)]
    return Served(
        label=label, strategy=strategy, wire="exact", mbit=940, devices=("a",), segments=1,
        predicted_seconds=predicted, rounds=rounds,
    )  # fmt: skip


def test_findings_hold_for_a_good_plan_and_fail_for_a_bad_one() -> None:
    one = served("one device", "local", 3.0, 3.1)
    varied = [served(f"variation {n}", VARIED, 1 + n / 20, 1.05 + n / 21) for n in range(1, 12)]
    good = findings_of([one, served("doppler", "doppler", 0.95, 1.0), *varied], 3.0)
    assert all(each.holds for each in good)
    bad = findings_of([one, served("doppler", "doppler", 0.95, 1.5, 1e-3), *reversed(varied)], 3.0)
    assert [each.figure.partition(":")[0] for each in bad if not each.holds][:2] == ["doppler", "doppler"]
    assert any("largest difference" in each.figure for each in bad if not each.holds)
    wrong = [served(f"variation {n}", VARIED, 1 + n / 20, 2 - n / 20) for n in range(1, 12)]
    failed = [each.figure for each in findings_of([one, *wrong], 1.0) if each.holds is False]
    assert failed == ["Pearson, predicted and measured", "Spearman, predicted and measured"]


def test_variations_are_measured_in_rounds_of_their_own() -> None:
    one, varied = served("one device", "local", 3.0, 3.0), served("variation 1", VARIED, 1.0, 1.5)
    table = served_table("plans", [one.model_copy(update={"rounds": [*one.rounds, *one.rounds]}), varied])
    assert [row[table.columns.index("times one device's")] for row in table.rows] == ["1.00 [1.00, 1.00]", "2.00"]


def test_rank_correlation_ignores_the_scale_and_shares_ranks() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)
