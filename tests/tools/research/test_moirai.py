"""The experiment `moirai`: the planner against the baselines on the problems of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("ortools")

from hearth.errors import BadSetting
from tools.bench.experiment import Context, Experiment, make_experiment, read_settings


def moirai(folder: Path, *changes: str) -> Experiment:
    return make_experiment(read_settings("moirai", [f'graphs="{folder}"', "time_limit=5", *changes]))


def save_problem(path: Path, memory: int) -> None:
    """Two independent operators of 4 seconds on two devices, each with memory for one of them or for both."""
    problem = {
        "name": path.stem,
        "devices": [{"id": device, "name": f"d{device}", "mem": memory} for device in range(2)],
        "nodes": [{"id": node, "name": f"n{node}", "time": [4.0, 4.0], "memory": 1} for node in range(2)],
        "edges": [],
    }
    path.write_text(json.dumps(problem))


def test_every_problem_is_compared_with_the_baselines(tmp_path: Path) -> None:
    save_problem(tmp_path / "roomy.json", memory=2)
    save_problem(tmp_path / "tight.json", memory=1)
    experiment = moirai(tmp_path)
    rows = list(experiment.measure(Context(tmp_path, lambda step: None)))
    assert [(row.instance, row.makespans["moirai"], row.proven) for row in rows] == [
        ("roomy", 4.0, True), ("tight", 4.0, True)
    ]  # fmt: skip
    found = experiment.summary(rows)
    local = found.tables[0].columns.index("local")
    assert [row[local] for row in found.tables[0].rows] == ["8", "-"]
    assert found.conclusions == ("proven optimal: roomy, tight", "a baseline is better than moirai on: none")


def test_summary_names_problems_with_a_better_baseline(tmp_path: Path) -> None:
    save_problem(tmp_path / "roomy.json", memory=2)
    experiment = moirai(tmp_path)
    (row,) = experiment.measure(Context(tmp_path, lambda step: None))
    worse = row.model_copy(update={"makespans": {**row.makespans, "moirai": 9.0}, "bound": 6.0, "proven": False})
    found = experiment.summary([worse])
    assert found.conclusions[1] == "a baseline is better than moirai on: roomy"
    assert "50.0%" in found.tables[0].rows[0]


@pytest.mark.parametrize(("changes", "named"), [(["time_limit=0"], "time_limit"), (["graphs=nowhere"], "graphs")])
def test_invalid_settings_are_named(tmp_path: Path, changes: list[str], named: str) -> None:
    save_problem(tmp_path / "roomy.json", memory=2)
    with pytest.raises(BadSetting, match=named):
        next(moirai(tmp_path, *changes).measure(Context(tmp_path, lambda step: None)))
