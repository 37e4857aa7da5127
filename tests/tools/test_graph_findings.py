"""Findings of the graph benchmark: intervals, gains over paired rounds, and missed targets."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tools.bench.graphs import Served, of_answers, of_pipelines, of_placements, served_table
from tools.bench.results import Finding


def served(
    label: str,
    seconds: tuple[float, ...],
    predicted: float,
    devices: int = 1,
    wire: str = "exact",
    difference: float = 0.0,
) -> Served:
    return Served.model_validate(
        {
            "label": label, "strategy": "moirai" if devices > 1 else "local", "wire": wire, "mbit": 60.0,
            "devices": tuple(f"d{index}" for index in range(devices)), "segments": devices,
            "predicted_seconds": predicted, "stage_seconds": (predicted,) * devices,
            "rounds": [{"seconds": each, "answers": 10, "difference": difference} for each in seconds],
        }
    )  # fmt: skip


def test_gain_is_paired_and_required_of_the_best_pipeline_only() -> None:
    one = served("one device", (0.2, 0.4, 0.22), 0.21)
    slow, fast = served("exact", (0.11, 0.21, 0.12), 0.12, 3), served("int8", (0.08, 0.16, 0.088), 0.085, 3)
    found = {finding.figure: finding for finding in of_pipelines(one, [slow, fast])}
    gain = found["int8: inferences a second, over one device's"]
    assert (gain.measured[:6], gain.holds, gain.target) == ("2.50 x", True, "at least 2.20 x")
    assert "exact: inferences a second, over one device's" not in found
    table = served_table("a title", [one, slow, fast])
    gains = [row[table.columns.index("times one device's")] for row in table.rows]
    assert gains == ["1.00 [1.00, 1.00]", "1.83 [1.82, 1.90]", "2.50 [2.50, 2.50]"]
    assert all_hold(found.values())
    assert not all_hold(of_pipelines(one, [slow]))


@pytest.mark.parametrize(("predicted", "holds"), [(0.86, True), (1.14, True), (0.84, False), (1.16, False)])
def test_bottleneck_prediction_must_be_within_15_percent(predicted: float, holds: bool) -> None:
    found = of_pipelines(served("one device", (1.0,), predicted), [served("two", (1.0,), 1.0, 2)])
    (off,) = (each for each in found if each.figure.startswith("bottleneck, predicted against measured"))
    assert off.figure.endswith("one device")
    assert off.holds is holds
    assert f"({predicted - 1:+.1%})" in off.measured


def all_hold(findings: Iterable[Finding]) -> bool:
    return all(each.holds is not False for each in findings)


ONE = served("one device", (1.0, 1.1), 1.0)
SLOW = [ONE, served("moirai", (1.0, 1.0), 1.0), served("auto", (1.0, 1.0), 1.0)]
FAST = [ONE, served("moirai", (0.7, 0.8), 0.7, 2), served("auto", (0.7, 0.75), 0.7, 2)]


def test_predicted_distribution_must_be_faster() -> None:
    found = of_placements([FAST, SLOW])
    assert found[0].target == "at least 1.00 x"
    assert "predicted 1.43" in found[0].measured
    assert all_hold(found)
    assert not all_hold(of_placements([[FAST[0], served("moirai", (1.2, 1.3), 0.7, 2), FAST[2]], SLOW]))
    assert not all_hold(of_placements([[*FAST[:2], served("auto", (1.2, 1.3), 0.7, 2)], SLOW]))


def test_predicted_single_device_must_be_chosen_and_faster() -> None:
    forced = served("forced", (1.3, 1.5), 1.25, 2)
    found = of_placements([[*SLOW, forced], FAST])
    assert all_hold(found)
    assert found[1].measured.startswith(f"{(1.3 + 1.5 / 1.1) / 2:.2f} x")
    assert not all_hold(of_placements([[*SLOW[:2], served("auto", (1.0, 1.0), 1.0, 2), forced], FAST]))
    assert not all_hold(of_placements([[*SLOW, served("forced", (0.9, 0.9), 1.25, 2)], FAST]))


def test_both_outcomes_must_be_predicted_at_some_rate() -> None:
    assert of_placements([FAST])[-1].measured == "none for one device"
    assert of_placements([SLOW])[-1].holds is False


def test_wrong_answers_are_reported() -> None:
    assert all_hold(of_answers([served("one device", (1.0,), 1.0, difference=1e-6)]))
    assert not all_hold(of_answers([served("one device", (1.0,), 1.0, difference=1e-2)]))
    assert all_hold(of_answers([served("one device", (1.0,), 1.0, difference=1e-2, wire="int8")]))


def test_table_has_a_row_for_each_plan() -> None:
    table = served_table("a title", [served("one device", (1.0,), 0.9), served("two", (0.5,), 0.5, 2)])
    assert [row[0] for row in table.rows] == ["one device", "two"]
    assert "-10.0%" in table.rows[0]
    assert {len(row) for row in table.rows} == {len(table.columns)}
