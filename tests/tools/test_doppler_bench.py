"""The experiment `doppler`: its cells, what each measures, and its tables beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("ortools")

from typer.testing import CliRunner

from coordinator.plan.graph.latency.list_scheduling import critical_path
from tools.bench import __main__ as commands
from tools.bench.doppler import cells as cells_module
from tools.bench.doppler import evaluation as doppler_module
from tools.bench.doppler.cells import measure_cell, measure_in_child
from tools.bench.doppler.evaluation import Doppler
from tools.bench.doppler.figures import TRANSFER_MS, paper_ms
from tools.bench.doppler.rows import HEADINGS, Cell, CellRow
from tools.bench.doppler.tables import summarise
from tools.bench.experiment import make_experiment, read_settings
from tools.bench.results import Table, load_result
from tools.bench.tensor.graphs import GRAPHS
from tools.bench.tensor.homes import HOMES


def experiment(*changes: str) -> Doppler:
    found = make_experiment(read_settings("doppler", changes))
    assert isinstance(found, Doppler)
    return found


def chain(method: str, **changes: Any) -> Cell:
    return Cell.model_validate({"method": method, "graph": "chain-mm", "home": "gigabit", **changes})


def of_graph(cells: Sequence[Cell], **fields: object) -> list[Cell]:
    return [cell for cell in cells if all(getattr(cell, name) == value for name, value in fields.items())]


# ---- cells ----------------------------------------------------------------------------------------------------------


def test_every_method_runs_on_every_graph_with_and_without_tight_memory() -> None:
    cells = experiment("timing=false").cells()
    assert len(cells) == len(set(cells)) == 2 * 4 * 10
    for graph in GRAPHS:
        for memory in (1.0, 0.3):
            found = of_graph(cells, graph=graph, memory=memory)
            assert {cell.method for cell in found} == {*HEADINGS} - {"doppler-sys"}


def test_options_add_the_cells_of_their_tables_once() -> None:
    def added(*changes: str) -> list[Cell]:
        without = experiment("timing=false", "episodes=100").cells()
        return [cell for cell in experiment("timing=false", "episodes=100", *changes).cells() if cell not in without]

    assert [(cell.method, cell.seed) for cell in added("seeds=2")] == [
        ("doppler-sim", 1), ("sel-only", 1), ("plc-only", 1), ("placeto", 1)
    ]  # fmt: skip
    assert [(cell.imitation, cell.episodes) for cell in added("stages=true")] == [(400, 0), (0, 100)]
    assert [(c.method, c.imitation, c.episodes) for c in added("ablation=true", "per_step_episodes=7")] == [
        ("doppler-sim", 0, 7), ("per-step", 0, 7)
    ]  # fmt: skip
    transferred = added("transfer=true")
    assert {(cell.source, cell.graph) for cell in transferred} == set(TRANSFER_MS)
    assert [cell.episodes for cell in transferred[:3]] == [0, 50, 100]


@pytest.mark.parametrize("devices", [4, 8])
def test_eight_devices_are_two_homes_with_a_quarter_of_the_rate_between_them(devices: int) -> None:
    problem = chain("local", devices=devices).problem()
    assert problem.num_devices == devices
    within, between = problem.flows[0].seconds[0][1], problem.flows[0].seconds[0][-1]
    assert between == pytest.approx(within if devices == 4 else 4 * within)


def test_rows_of_planners_are_their_makespans(tmp_path: Path) -> None:
    cell = chain("critical-path")
    problem = cell.problem()
    rows = {
        name: measure_cell(chain(name), tmp_path) for name in ("local", "critical-path", "best-list", "enumerative")
    }
    assert rows["critical-path"].makespan == critical_path(problem, Random(0)).makespan
    assert rows["local"].makespan == pytest.approx(sum(seconds[0] for seconds in problem.seconds))
    makespans = [row.makespan for row in rows.values()]
    assert rows["best-list"].makespan == min(each for each in makespans if each is not None)
    search = measure_cell(chain("doppler", seconds=0.1), tmp_path)
    assert search.bound <= (search.makespan or 0) <= (rows["best-list"].makespan or 0)
    placeto = measure_cell(chain("placeto", seconds=5.0, episodes=1), tmp_path)
    assert (placeto.num_episodes, placeto.makespan) == (1, rows["best-list"].makespan)
    assert placeto.greedy is not None


def test_a_graph_that_fits_no_single_device_has_plans_of_several(tmp_path: Path) -> None:
    row = measure_cell(chain("local", memory=0.3), tmp_path)
    assert (row.makespan, row.failure) == (None, "no plan fits")
    tight = measure_cell(chain("enumerative", memory=0.3), tmp_path)
    assert (tight.makespan or 0) >= (measure_cell(chain("enumerative"), tmp_path).makespan or 1)


def test_a_child_is_ended_at_its_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "_TRAINING", "json")  # imported before the first child; torch takes seconds
    row = measure_in_child(chain("local"), tmp_path)
    assert row == measure_cell(row.cell, tmp_path).model_copy(update={"processor_seconds": row.processor_seconds})
    row = measure_in_child(chain("doppler", graph="llama-layer", home="wifi", seconds=20.0), tmp_path, limit=1)
    assert (row.makespan, row.failure) == (None, "ended after 1 processor seconds")


# ---- trained policies -----------------------------------------------------------------------------------------------


def test_training_reports_the_best_and_the_greedy_plan(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    cell = chain("doppler-sim", imitation=4, episodes=8, batch=4, seconds=100)
    row = measure_cell(cell, tmp_path)
    assert row.num_episodes == 12
    assert row.found_at in (8, 12)
    assert row.greedy is not None
    bound = measure_cell(chain("doppler", seconds=0.01), tmp_path).bound
    assert bound <= min(row.makespan or 0, row.greedy)


def test_training_ends_at_its_processor_time(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    row = measure_cell(chain("plc-only", episodes=1600, batch=4, seconds=0.001), tmp_path)
    assert row.num_episodes == 4
    assert row.greedy is not None


def test_a_transferred_policy_is_trained_on_its_source_once(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    cell = chain("doppler-sim", source="chain-mm", source_episodes=4, imitation=4, batch=4)
    zero_shot = measure_cell(cell, tmp_path)
    assert (zero_shot.makespan, zero_shot.num_episodes) == (None, 0)
    (path,) = tmp_path.glob("*.pt")
    before = path.stat().st_mtime_ns
    assert measure_cell(cell, tmp_path).greedy == zero_shot.greedy
    assert path.stat().st_mtime_ns == before
    weights = torch.load(path, weights_only=True)
    torch.save({name: torch.zeros_like(each) for name, each in weights.items()}, path)
    assert measure_cell(cell, tmp_path).greedy != zero_shot.greedy


def test_rollouts_are_timed_without_training(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    row = measure_cell(chain("rollout", episodes=5, batch=2), tmp_path)
    assert (row.num_episodes, row.makespan, row.greedy) == (6, None, None)
    assert row.processor_seconds > 0


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_command_keeps_rows_of_other_settings_and_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Cell] = []

    def measure(cell: Cell, folder: Path) -> CellRow:
        measured.append(cell)
        return CellRow(cell=cell, makespan=1.0)

    monkeypatch.setattr(doppler_module, "measure_in_child", measure)
    path = tmp_path / "rows.json"
    for home, methods in (("gigabit", '["local"]'), ("wifi", '["local", "doppler"]'), ("wifi", '["doppler"]')):
        options = ["--graphs", "ffnn,chain-mm", "--home", home, "--seconds", "2", "--out", str(path)]
        options += ["--set", f"methods={methods}", "--set", "timing=false", "--set", "memory=[1.0]"]
        done = CliRunner().invoke(commands.app, ["doppler", *options])
        assert done.exit_code == 0, done.output
    assert [(cell.home, cell.graph, cell.method, cell.seconds) for cell in measured] == [
        ("gigabit", "ffnn", "local", 0), ("gigabit", "chain-mm", "local", 0),
        ("wifi", "ffnn", "local", 0), ("wifi", "ffnn", "doppler", 2),
        ("wifi", "chain-mm", "local", 0), ("wifi", "chain-mm", "doppler", 2),
    ]  # fmt: skip
    assert len(load_result(path).raw) == 6


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--graphs", "resnet"], "graphs"), (["--home", "moon"], "homes"), (["--devices", "5"], "devices")],
)
def test_wrong_options_are_named(options: list[str], named: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(commands.app, ["doppler", *options, "--out", str(tmp_path / "rows.json")])
    assert done.exit_code == 1
    assert named in done.output


# ---- tables ---------------------------------------------------------------------------------------------------------


def row(method: str, makespan: float | None, greedy: float | None = None, **changes: Any) -> CellRow:
    of_row = {name: changes.pop(name) for name in [*changes] if name in CellRow.model_fields}
    return CellRow(cell=chain(method, **changes), makespan=makespan, greedy=greedy, **of_row)


def line(table: Table, name: str) -> dict[str, str]:
    (found,) = (dict(zip(table.columns, cells, strict=True)) for cells in table.rows if cells[0] == name)
    return found


ROWS = [
    row("local", 3.2), row("critical-path", 1.2), row("doppler", 0.8, bound=0.8, proven=True),
    row("doppler-sim", 1.0, 1.1, imitation=400, episodes=4000, num_episodes=4400, found_at=35, processor_seconds=44.0),
]  # fmt: skip


def test_main_table_has_ratios_beside_the_papers() -> None:
    table = summarise(ROWS).tables[0]
    ours = line(table, "chain-mm, s")
    assert (ours["Critical Path"], ours["Doppler-sim"], ours["bound"]) == ("1.2000", "1.0000 / 1.1000", "0.8000 proven")
    assert ours["Placeto"] == ours["Doppler-sys"] == "-"
    ratios = line(table, "over doppler")
    assert (ratios["1 device"], ratios["Critical Path"], ratios["Doppler-sim"]) == ("4.00", "1.50", "1.25")
    paper = line(table, "over Doppler-sys")
    assert (paper["1 device"], paper["Critical Path"], paper["doppler"]) == ("3.56", "1.87", "")


def test_further_trainings_of_a_graph_are_in_their_own_tables() -> None:
    more = [
        row("doppler-sim", 0.9, imitation=400, episodes=4000, seed=1),
        row("doppler-sim", 0.5, episodes=5000, found_at=6, num_episodes=7, processor_seconds=0.5),
        row("per-step", 0.6, episodes=5000, found_at=6, num_episodes=7, processor_seconds=7.0),
        row("rollout", None, episodes=32, batch=1, num_episodes=32, processor_seconds=3.2),
        row("doppler-sim", 0.4, graph="llama-layer", source="ffnn", imitation=400, episodes=2000),
        row("doppler-sim", None, 0.7, graph="llama-layer", imitation=400, seconds=9),
    ]
    tables = {table.title.partition(":")[0]: table for table in summarise([*ROWS, *more]).tables}
    assert line(tables["Makespans"], "chain-mm, s")["Doppler-sim"] == "1.0000 / 1.1000"
    assert line(tables["Seeds, chain-mm"], "Doppler-sim")["spread"] == "11.1%"
    messages = tables["Message passing"]
    assert line(messages, "per batch of 16")["passes until then"] == "1"
    assert line(messages, "per step")["passes until then"] == str(6 * 76)
    times = line(tables["Seconds per episode"], "chain-mm")
    assert times["rollout"] == "0.1000"
    assert times["in batches of 16"] == "0.0100"
    transferred = line(tables["Transfer"], "ffnn to llama-layer")
    assert transferred["2000 episodes, s"] == "0.4000 / -"
    assert line(tables["Stages, llama-layer"], "I")["best / greedy, s"] == "- / 0.7000"
    assert len(tables["All rows"].rows) == len(ROWS) + len(more)


def test_a_planner_that_loses_to_a_list_schedule_fails_the_run() -> None:
    assert not summarise(ROWS).failure
    found = summarise([*ROWS, row("enumerative", 0.79)])
    assert "chain-mm" in found.failure
    assert "Critical Path 1.50 to 1.50" in found.conclusions[0]


@pytest.mark.parametrize(("devices", "memory", "best"), [(4, 1.0, 123.4), (4, 0.3, 122.6), (8, 1.0, 32.1)])
def test_papers_figures_stand_for_the_same_devices_and_memory(devices: int, memory: float, best: float) -> None:
    assert paper_ms("chain-mm", devices, memory)["doppler-sys"] == best
    assert set(paper_ms("ffnn", devices, memory)) <= set(HEADINGS)


def test_homes_of_cells_are_known() -> None:
    assert [chain("local", home=home).home for home in HOMES] == list(HOMES)
    with pytest.raises(ValueError, match="moon"):
        chain("local", home="moon")
