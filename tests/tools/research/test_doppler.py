"""The experiment `doppler`: every method on one graph, its tables next to the paper's, and a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ortools")
pytest.importorskip("torch")

from hearth.errors import BadSetting
from tools.bench.experiment import Context, Experiment, make_experiment, read_settings
from tools.research.doppler import HEADINGS, DopplerRow

SMALL = {
    "graphs": ["chain-mm"], "homes": ["gigabit"], "memory": [1.0], "seconds": 1.0, "training_seconds": 0.5, "imitation": 16,
    "episodes": 16,
}  # fmt: skip


def doppler(**changes: Any) -> Experiment:
    return make_experiment({**read_settings("doppler"), **SMALL, **changes})


def row(method: str, makespan: float, **fields: Any) -> DopplerRow:
    fields = {"graph": "chain-mm", "home": "gigabit", "memory": 1.0, **fields}
    return DopplerRow.model_validate({"method": method, "makespan": makespan, **fields})


@pytest.mark.thorough
def test_every_method_finds_a_plan_and_no_list_is_better_than_the_planners(tmp_path: Path) -> None:
    experiment = doppler()
    rows = list(experiment.measure(Context(tmp_path, lambda step: None)))
    best = {row.method: row.best for row in rows}
    assert all(best.values())
    assert best["doppler"] == best["moirai"] == pytest.approx(0.8110, abs=1e-4)  # proven, the bound of total work
    assert best["best-list"] == min(best[name] for name in ("local", "critical-path", "enumerative", "best-list"))
    assert best["placeto"] <= best["best-list"]
    found = experiment.summary(rows)
    assert not found.failure
    (table,) = found.tables
    assert [line[0] for line in table.rows] == ["chain-mm, s", "over doppler", "paper, ms", "over Doppler-sys"]
    paper = dict(zip(["", *HEADINGS, "bound"], table.rows[2], strict=True))
    assert (paper["local"], paper["doppler-sys"], paper["doppler"]) == ("439.9", "123.4", "")


def test_known_rows_are_kept(tmp_path: Path) -> None:
    known = [row("local", 123.0), row("critical-path", 45.0, graph="ffnn")]
    experiment = doppler(methods=["local", "enumerative"])
    rows = list(experiment.measure(Context(tmp_path, lambda step: None, known)))
    assert [(each.method, each.makespan) for each in rows] == [("local", 123.0), ("enumerative", rows[1].makespan)]


def test_planner_that_is_worse_than_a_list_fails_the_experiment() -> None:
    found = doppler().summary([row("doppler", 2.0), row("enumerative", 1.0), row("placeto", 3.0)])
    assert found.failure == "doppler is worse than a list schedule: chain-mm, gigabit, 4 devices"
    ratios = dict(zip(["", *HEADINGS, "bound"], found.tables[0].rows[1], strict=True))
    assert (ratios["placeto"], ratios["enumerative"]) == ("1.50", "0.50")


@pytest.mark.parametrize(("changes", "named"), [({"graphs": ["x"]}, "graphs.0"), ({"seconds": 0}, "seconds")])
def test_invalid_settings_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadSetting, match=named):
        doppler(**changes)
