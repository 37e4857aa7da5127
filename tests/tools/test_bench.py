"""The benchmark: statistics, rows and pages, complete runs, and cleanup."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import wait_for
from typer.testing import CliRunner

from coordinator.models.checkpoint.families import FAMILIES
from hearth.errors import BadSetting
from tools import interrupts
from tools.bench import __main__ as commands
from tools.bench import load
from tools.bench import results as measured
from tools.bench.experiment import Context, make_experiment, names, read_settings
from tools.bench.generation import Generation, GenerationRow
from tools.bench.load import BackgroundLoad, Process, calmest, calmest_of, foreign_seconds
from tools.bench.measure import Setting, relative_error
from tools.bench.plans import GLOO, Entry, Name, Row, baseline_of, by_setting, entries, table_of
from tools.bench.results import Result, Summary, Table, load_result
from tools.bench.shapes import SHAPES, find_shape
from tools.bench.stats import Ratio, bootstrap_interval, paired_ratio, percentile, rotated
from tools.bench.strategies import Strategies, layer_flops, say_auto, say_prediction, scaling_of
from tools.testbed import Scenario, load_scenario
from tools.testbed.cluster import Running, running_testbeds, what_is_missing

REPOSITORY = Path(__file__).parents[2]

# ---- statistics -------------------------------------------------------------------------------------------------------


def test_paired_ratios_cancel_slow_rounds() -> None:
    ratio = paired_ratio([2.0, 20.0, 2.2, 2.0, 2.0], [1.0, 10.0, 1.1, 1.0, 1.0])
    assert ratio == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ValueError, match="longer"):
        paired_ratio([1.0], [1.0, 2.0])


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30))
def test_interval_is_within_the_values_and_deterministic(values: list[float]) -> None:
    low, high = bootstrap_interval(values)
    assert min(values) <= low <= percentile(values, 0.5) + 1e-9
    assert percentile(values, 0.5) - 1e-9 <= high <= max(values)
    assert (low, high) == bootstrap_interval(values)


def test_interval_width_follows_noise() -> None:
    low, high = bootstrap_interval([1.0, 2.0, 1.0, 2.0, 1.5])
    assert (low, high) == (1.0, 2.0)
    low, high = bootstrap_interval([1.5] * 14 + [9.0])
    assert (low, high) == (1.5, 1.5)


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_percentiles(fraction: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], fraction) == pytest.approx(expected)


def test_every_strategy_is_first_equally_often() -> None:
    orders = [rotated("abc", index) for index in range(3)]
    assert [order[0] for order in orders] == ["a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


# ---- foreign load -----------------------------------------------------------------------------------------------------


def test_foreign_load_excludes_own_descendants() -> None:
    before = {
        1: Process(0, 10, 0), 2: Process(0, 0, 0), 3: Process(2, 50, 0), 10: Process(1, 100, 0),
        11: Process(10, 5, 0), 20: Process(1, 7, 0),
    }  # fmt: skip
    after = {
        1: Process(0, 11, 0), 2: Process(0, 0, 0), 3: Process(2, 90, 0), 10: Process(1, 130, 0),
        11: Process(10, 95, 0), 20: Process(1, 9, 0), 21: Process(20, 4, 0),
    }  # fmt: skip
    assert foreign_seconds(before, after, 10) == 1 + 2 + 4  # init, a shell, and a process that it has started


def test_short_lived_processes_are_counted_once() -> None:
    before = {1: Process(0, 0, 0), 20: Process(1, 0, 0), 21: Process(20, 300, 0)}
    after = {1: Process(0, 0, 0), 20: Process(1, 0, 340)}  # 21 has ended at 310, another process used 30
    assert foreign_seconds(before, after, 999) == 40


@pytest.mark.parametrize("is_zombie", [False, True])
def test_processes_of_ours_whose_parent_ends_are_not_foreign(is_zombie: bool) -> None:
    before = {
        1: Process(0, 0, 0), 10: Process(1, 0, 0), 11: Process(10, 5, 0), 12: Process(11, 60, 0), 13: Process(11, 90, 0),
    }  # fmt: skip
    after = {1: Process(0, 0, 92), 10: Process(1, 0, 5), 12: Process(1, 70, 0), 14: Process(12, 3, 0)}  # 13 ended at 92
    zombie = {11: Process(10, 5, 0)} if is_zombie else {}
    assert foreign_seconds(before, {**after, **zombie}, 10) == 2


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (BackgroundLoad(0.01, 0.04), ""),
        (BackgroundLoad(0.07, 0.0), "7% of the cores away"),
        (BackgroundLoad(0.0, 0.2), "processes took 20%"),
    ],
)
def test_disturbed_measurement_is_explained(load: BackgroundLoad, said: str) -> None:
    assert said in load.distrust
    assert bool(load.distrust) == bool(said)


def test_least_disturbed_rounds_are_kept_in_order() -> None:
    loads = [BackgroundLoad(0.3, 0.0), BackgroundLoad(0.0, 0.02), BackgroundLoad(0.0, 0.2), BackgroundLoad(0.01, 0.0)]
    assert calmest(loads, 2) == [1, 3]
    assert calmest(loads, 3) == [1, 2, 3]
    assert calmest(loads[:1], 3) == [0]


@pytest.mark.parametrize(("loud", "measured"), [([0.0], 1), ([0.3, 0.0], 2), ([0.3, 0.1, 0.2], 2)])
def test_least_disturbed_measurement_counts(loud: list[float], measured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter(loud)
    monkeypatch.setattr(load, "load_between", lambda *_: BackgroundLoad(next(loads), 0.0))
    assert calmest_of(itertools.count(1).__next__, 3) == measured
    assert next(loads, None) is None


# ---- what is measured -------------------------------------------------------------------------------------------------


def test_strategies_have_their_wire_formats() -> None:
    found = entries(["local", "gloo-tp", "hmp"], ["exact", "fp16", "int8"], plain=True)
    keys = [(entry.strategy, entry.wire, entry.encrypt) for entry in found]
    assert keys == [
        ("local", "exact", False), ("gloo-tp", "exact", False), ("gloo-tp", "fp16", False),
        ("hmp", "exact", True), ("hmp", "exact", False), ("hmp", "fp16", True), ("hmp", "fp16", False),
        ("hmp", "int8", True), ("hmp", "int8", False),
    ]  # fmt: skip
    assert len({entry.key for entry in found}) == len(found)


def test_baseline_has_the_same_wire_format_if_possible() -> None:
    found = entries(["gloo-tp", "hmp"], ["exact", "fp16", "int8"])
    gloo, half = Entry("gloo-tp", encrypt=False), Entry("gloo-tp", "fp16", encrypt=False)
    assert baseline_of(Entry("hmp", "fp16"), found, "gloo-tp") == half
    assert baseline_of(Entry("hmp", "int8"), found, "gloo-tp") == gloo
    assert baseline_of(Entry("hmp"), found, "sp") is None


def test_lz4_is_compared_with_the_same_format_without_it() -> None:
    found = entries(["hmp"], ["exact", "bf16"], ["off", "auto", "on"])
    assert baseline_of(Entry("hmp", "bf16", "on"), found, "lz4 off") == Entry("hmp", "bf16", "off")
    assert baseline_of(Entry("sp", "exact", "on"), found, "lz4 off") is None


def test_paper_models_have_their_shapes() -> None:
    shapes = {}
    for name, shape in SHAPES.items():
        fields = FAMILIES[shape.config["model_type"]].config
        shapes[name] = tuple(shape.config[fields[field]] for field in ("num_layers", "num_heads", "hidden_size"))
    assert shapes == {
        "distilbert": (6, 12, 768), "bert-base": (12, 12, 768), "bert-large": (24, 16, 1024),
        "gpt2-large": (36, 20, 1280), "opt-large": (24, 16, 2048), "opt-xl": (32, 32, 2560),
    }  # fmt: skip
    with pytest.raises(BadSetting, match="at most 512 tokens"):
        SHAPES["bert-large"].shortened(4, 600)


def test_config_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    shape = find_shape(str(path))
    assert [shape.shortened(layers, 64)["num_hidden_layers"] for layers in (1, 9)] == [1, 2]
    path.write_text(json.dumps({"model_type": "bert", "num_hidden_layers": 2}))
    with pytest.raises(BadSetting, match="num_attention_heads is missing"):
        find_shape(str(path))


def test_outputs_are_compared_completely() -> None:
    assert relative_error([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert relative_error([3.0, 4.4], [3.0, 4.0]) == pytest.approx(0.08)
    assert relative_error([1.0], [1.0, 2.0]) == float("inf")
    assert relative_error([1.0, 2.0, 3.0], [1.0, 2.0]) == float("inf")
    assert not relative_error([float("nan")], [1.0]) <= 1.0


# ---- rows -------------------------------------------------------------------------------------------------------------

SETTING = {
    "scenario": "galaxy-a", "devices": 2, "model": "bert-large", "layers": 4, "hidden_size": 1024, "seq_len": 284,
    "mbit": 190.0,
}  # fmt: skip


def row(seconds: float = 0.5, **changes: Any) -> Row:
    values: dict[str, Any] = {
        **SETTING, "strategy": "hmp", "wire": "exact", "seconds": (0.8 * seconds, seconds, 1.4 * seconds),
        "bound_seconds": 0.4, "bound_share": Ratio(0.8, 0.75, 0.82), "predicted_seconds": 0.9 * seconds,
        "rescaled_seconds": 0.95 * seconds, "baseline": "gloo-tp exact",
        "speedup": Ratio(1.4, 1.3, 1.5), "sent_bytes": 5 << 20,
    }  # fmt: skip
    return Row.model_validate({**values, **changes})


def strategies(**settings: Any) -> Strategies:
    return Strategies.model_validate({"name": "galaxy-c", "title": "a title", "strategies": ["hmp"], **settings})


def test_table_numbers_notes_once_and_marks_wrong_rows() -> None:
    rows = [
        row(notes=("4 of its 24 layers",)),
        row(strategy="sp", wrong=True, trusted=False, notes=("4 of its 24 layers",)),
    ]
    summary = strategies().summary(rows)
    (table,) = summary.tables
    assert table.notes == ("4 of its 24 layers",)
    assert table.rows[1][-1] == "WRONG untrusted 1"
    text = table.markdown()
    assert text.count("24 layers") == 1
    assert "1.40 [1.30, 1.50]" in text
    assert "450 ms (-10%)" in text
    assert "475 ms (-5%)" in text
    assert "400 ms (80% [75%, 82%])" in text
    assert "differs from that of a single device" in summary.failure


def test_row_of_a_failed_run_has_a_reason_and_no_times() -> None:
    empty = Row.model_validate({**SETTING, "strategy": "sp", "wire": "exact", "notes": ("out of memory",)})
    assert table_of([empty]).rows == (("sp exact", *["-"] * 7, "1"),)


def test_conclusions() -> None:
    rows = [row(1.0, strategy="local"), row(0.6, strategy="sp", predicted_seconds=0.78), row(0.5, strategy="auto")]
    assert len(by_setting(rows)) == 1
    fresh, rescaled = say_prediction(rows)
    assert "3 runs: median 10.0%, 90th percentile 26.0%" in fresh
    assert "3 runs, rescaled by steps of one device: median 5.0%" in rescaled
    gain, regret = say_auto(rows)
    assert "median 2.00 times as fast" in gain
    assert "median 0.83 of its time" in regret


def test_weak_scaling_is_in_work_per_second() -> None:
    flops = {count: layer_flops(96 * count, 1024) for count in (1, 2)}
    one = row(1.0, devices=1, seq_len=96)
    two = row(flops[2] / flops[1] / 1.6, devices=2, seq_len=192)  # 1.6 times the work per second
    points = scaling_of([one, two])["bert-large"]
    assert points[0] == (1, 1.0, 1.0)
    assert points[1] == pytest.approx((2, 1.6, 0.8))


def test_single_device_is_measured_at_one_rate_only() -> None:
    experiment = strategies(devices=[1, 2, 3], mbit=[20, 500], strategies_of_one=["local"])
    settings = list(experiment._settings(load_scenario("galaxy-c"), SHAPES["distilbert"]))
    assert [(each.num_devices, each.mbit) for each in settings] == [
        (1, 20.0), (2, 20.0), (2, 500.0), (3, 20.0), (3, 500.0)
    ]  # fmt: skip
    assert [entry.strategy for entry in settings[0].entries] == ["local"]


@pytest.mark.parametrize("num_known", range(5))
def test_resumed_run_measures_the_settings_that_are_missing(
    num_known: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_up = []

    class Home:
        def __init__(self, stack: object, scenario: Scenario, *_: object, **__: object) -> None:
            put_up.append(scenario.name)

        def measure(self, *settings: Setting) -> list[Row]:
            return [row(scenario=each.scenario.name, paper_mbit=each.paper_mbit) for each in settings]

    monkeypatch.setattr("tools.bench.strategies.Bench", Home)
    experiment = strategies(scenarios=["galaxy-a", "galaxy-c"], paper_mbit=[25, 50])
    whole = list(experiment.measure(Context(tmp_path, print)))
    assert [(each.scenario, each.paper_mbit) for each in whole] == [
        ("galaxy-a", 25.0), ("galaxy-a", 50.0), ("galaxy-c", 25.0), ("galaxy-c", 50.0)
    ]  # fmt: skip
    put_up.clear()
    assert list(experiment.measure(Context(tmp_path, print, whole[:num_known]))) == whole
    assert put_up == ["galaxy-a", "galaxy-c"][num_known // 2 :]


# ---- experiments and results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_builtin_experiments_are_valid(name: str) -> None:
    assert make_experiment(read_settings(name)).title


def test_settings_can_be_changed() -> None:
    settings = read_settings("galaxy-c", ['models=["bert-base"]', "rounds = 7", 'scenarios=["galaxy-a"]'])
    experiment = make_experiment(settings)
    assert isinstance(experiment, Strategies)
    assert (experiment.models, experiment.rounds, experiment.scenarios) == (("bert-base",), 7, ("galaxy-a",))


def result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "experiment": "galaxy-c", "title": "A title", "command": "python -m tools.bench run galaxy-c", "commit": "abc1234",
        "date": "2026-11-22", "machine": "a machine",
    }  # fmt: skip
    return Result.model_validate({**values, **changes})


def test_page_of_a_result() -> None:
    summary = Summary(conclusions=("hmp wins",), tables=(Table.of("a | b", ("x", "y"), [(1, "a|b")], ["a note"]),))
    assert result().markdown(summary) == (
        "## A title\n\n`python -m tools.bench run galaxy-c`, commit abc1234, 2026-11-22. a machine.\n\n- hmp wins\n\n"
        "**a | b**\n\n| x | y |\n| --- | --- |\n| 1 | a/b |\n\n1. a note\n"
    )


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(commands, "RESULTS", tmp_path)
    return tmp_path


def report() -> Any:
    return CliRunner().invoke(commands.app, ["report"], env={"COLUMNS": "500"})


SETTINGS = strategies().model_dump(mode="json")
RAW = row().model_dump(mode="json")
HEAD = measured.commit().removesuffix(" with changes")


def test_report_makes_a_page_of_raw_rows_and_tells_their_age(results: Path) -> None:
    result(experiment="galaxy-c", commit=HEAD, settings=SETTINGS, raw=[RAW]).save(results / "galaxy-c.json")
    saved = load_result(results / "galaxy-c.json")
    assert saved.raw == (RAW,)
    done = report()
    assert done.exit_code == 0, done.stderr
    assert f"0 commits ago ({HEAD})" in done.stdout or "shallow" in done.stdout
    assert "| hmp exact | 500 ms |" in (results / "strategies.md").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"raw": []}, "it has no raw rows"),
        ({"commit": f"{HEAD}, 0badbad0"}, "the repository has no commit 0badbad0"),
        ({"raw": [{name: value for name, value in RAW.items() if name != "devices"}]}, "devices: Field required"),
        ({"settings": {**SETTINGS, "colour": "red"}}, "colour: Extra inputs"),
        ({"settings": {**SETTINGS, "name": "fig7"}}, "'fig7' is none of"),
    ],
)
def test_report_names_a_page_that_has_to_be_measured_again(changes: dict[str, Any], said: str, results: Path) -> None:
    if "commit" in changes and "shallow" in measured.measured_ago(HEAD).text:
        pytest.skip("a shallow clone does not know its commits")
    fields = {"commit": HEAD, "settings": SETTINGS, "raw": [RAW]}
    result(**fields).save(results / "fig8.json")
    result(**{**fields, **changes}).save(results / "galaxy-c.json")
    done = report()
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: galaxy-c.json")
    assert said in line


def test_newer_fields_are_not_added_to_raw_rows(results: Path) -> None:
    older = {name: value for name, value in RAW.items() if name != "encrypt"}
    result(commit=HEAD, settings=SETTINGS, raw=[older]).save(results / "galaxy-c.json")
    assert report().exit_code == 0
    assert load_result(results / "galaxy-c.json").raw == (older,)


def test_age_is_that_of_the_oldest_commit_and_unknown_in_a_shallow_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "false", "aaa..HEAD": "3", "bbb..HEAD": "12"}
    monkeypatch.setattr(measured, "_git", lambda *words: answers.get(words[0], answers.get(words[-1], "")))
    assert measured.measured_ago("aaa, bbb with changes") == ("12 commits ago (aaa, bbb with changes)", "")
    answers["rev-parse"] = "true"
    assert measured.measured_ago("ccc") == ("this clone is shallow: its history is not known", "")


# ---- the command ------------------------------------------------------------------------------------------------------

TINY = {
    "model_type": "bert", "hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 300,
    "vocab_size": 3000, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (['scenarios=["nowhere"]'], "neither a file nor a built-in scenario"),
        (['models=["gpt-5"]'], "neither a config.json nor one of"),
        (['models=["/nowhere.json"]'], "cannot be read (No such file"),
        (["rounds=2"], "rounds: Input should be greater than or equal to 5"),
        (['wires=["fp8"]'], "wires.0: Input should be 'exact'"),
        (["devices=[9]"], "has only 2"),
        (["baseline=fastest"], "baseline"),
        (["mbit=[0]"], "mbit.0: Input should be greater than or equal to 0.01"),
        (["seq_lens=[4000]"], "at most 512 tokens"),
        (["seq_lens"], "not of the form key=value"),
        (["colour=red"], "colour: Extra inputs are not permitted"),
        (["name=magic"], "'magic' is none of"),
    ],
)
def test_invalid_input_is_reported_in_one_line(changes: list[str], named: str, tmp_path: Path) -> None:
    options = [part for change in changes for part in ("--set", change)]
    done = CliRunner().invoke(commands.app, ["run", "galaxy-a", *options, "--out", str(tmp_path / "a")])
    assert done.exit_code == 1
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("run", "galaxy-z"), "'galaxy-z' is none of"),
        (("run", "galaxy-a", "--out", "/nowhere/rows.json"), "/nowhere/rows.json cannot be written"),
    ],
)
def test_missing_file_is_reported_in_one_line(arguments: tuple[str, ...], named: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 1
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


def test_scenarios_are_listed() -> None:
    done = bench("scenarios")
    assert done.returncode == 0, done.stderr
    assert "galaxy-f" in done.stdout


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.bench", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False,
        timeout=60, env={**os.environ, "COLUMNS": "500"},
    )  # fmt: skip


@pytest.fixture
def interruptible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(interrupts, "_state", interrupts._State())
    interrupts.install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("with_children", [True, False])
def test_shielded_block_finishes_despite_a_second_interrupt(with_children: bool) -> None:
    finished = []

    def interrupted() -> None:
        with interrupts.shielded(with_children):
            signal.raise_signal(signal.SIGINT)
            finished.append("the block")
            raise OSError("of what it has run")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with interrupts.shielded(with_children):  # removes the children
        signal.raise_signal(signal.SIGINT)
        finished.append("clearing up")
    assert finished == ["the block", "clearing up"]


@pytest.mark.usefixtures("interruptible")
def test_lost_interrupt_is_noticed_at_the_next_check() -> None:
    interrupts.check()
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        pass  # as a callback of the interpreter does
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """A scenario of two devices and a tiny model; `tmp` has a path that is short enough for sockets."""
    if reason := what_is_missing():
        pytest.skip(reason)
    cores = sorted(os.sched_getaffinity(0))
    share = 0.9 if len(cores) > 1 else 0.4
    devices = "".join(
        f'[[devices]]\nname = "{name}"\ncpu_share = {share}\ncore = {core}\nmbit = 200\nmemory = "2GiB"\n'
        for name, core in (("one", cores[0]), ("two", cores[-1]))
    )
    (tmp_path / "test-bench.toml").write_text("scale_links = false\n" + devices)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    with tempfile.TemporaryDirectory() as short:
        (tmp_path / "tmp").symlink_to(short)
        yield tmp_path


def changed(**changes: Any) -> list[str]:
    return [part for name, value in changes.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def start(files: Path, **changes: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tools.bench", "run", "galaxy-a", "--out", str(files / "rows.json"), *changed(
            scenarios=[str(files / "test-bench.toml")], models=[str(files / "tiny.json")], seq_lens=[48],
            repeat_disturbed=False, **changes)],
        cwd=REPOSITORY, env={**os.environ, "TMPDIR": os.readlink(files / "tmp"), "COLUMNS": "160"}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.namespaces
@pytest.mark.thorough
def test_all_strategies_run_with_equal_outputs(files: Path) -> None:
    running = start(
        files, strategies=list(get_args(Name)), rounds=5, wires=["exact", "fp16", "bf16", "int8"], mbit=[100]
    )
    said, complained = running.communicate(timeout=400)
    assert running.returncode == 0, said + complained
    saved = load_result(files / "rows.json")
    rows = [Row.model_validate(each) for each in saved.raw]
    assert {each.strategy for each in rows} == set(get_args(Name))
    assert not any(each.wrong for each in rows)
    for each in rows:
        assert len(each.seconds) == 5
        assert each.speedup is not None
        assert each.mbit == pytest.approx(100)
        distributed = each.strategy not in GLOO and each.plan is not None and not each.plan.startswith("local")
        assert (each.bound_seconds is not None) == (each.bound_share is not None) == distributed
    sent = {each.wire: each.sent_bytes for each in rows if each.strategy == "hmp" and each.encrypt}
    assert sent["int8"] < sent["fp16"] < sent["exact"]
    assert "test-bench, 2 devices, tiny 2 layers, 48 tokens, 100 Mbit/s" in said
    assert list((files / "tmp").glob("hearth-*")) == []


def slot_of(process: subprocess.Popen[str]) -> Running | None:
    return next((running for running in running_testbeds() if running.owner_pid == process.pid), None)


def namespaces(slot: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"ht{slot}-")]


def connected(process: subprocess.Popen[str]) -> bool:
    """Whether the devices communicate, as they do from the measurement of links on."""
    if (running := slot_of(process)) is None:
        return False
    shown = subprocess.run(["ip", "netns", "exec", f"ht{running.slot}-one", "ss", "-Htn", "state", "established"],
                           capture_output=True, text=True, check=False)  # fmt: skip
    return f"10.213.{running.slot}." in shown.stdout


def alive_in_group(group: int) -> list[str]:
    """Processes of the group, without those that have ended and have not been reaped."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def runners_started(process: subprocess.Popen[str]) -> bool:
    return any("tools.bench.runner" in line for line in alive_in_group(process.pid))


LAST_MOMENT = "while devices talk"
MOMENTS: dict[str, Callable[[subprocess.Popen[str]], bool]] = {
    "while the testbed is put up": lambda process: slot_of(process) is not None,
    "while the runners start": runners_started,
    LAST_MOMENT: connected,
}


TINY_LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 2100, "max_position_embeddings": 128, "eos_token_id": None,
}  # fmt: skip


def generate(files: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.bench", "run", "generation", "--out", str(files / "rows.json"), *changed(
            scenario=str(files / "test-bench.toml"), model=str(files / "llama.json"), repeat_disturbed=False,
            **changes)],
        cwd=REPOSITORY, env={**os.environ, "TMPDIR": os.readlink(files / "tmp"), "COLUMNS": "160"},
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip


def test_prefill_of_several_devices_is_compared_with_one() -> None:
    def row(strategy: str, seconds: float, predicted: float | None, **more: Any) -> GenerationRow:
        return GenerationRow(
            scenario="four", mbit=500, strategy=strategy, weights="int8", devices="m0", prompt_tokens=2048, new_tokens=2,
            prefill=(seconds,) * 5, decode=(seconds / 60,) * 5, prefill_ratio=Ratio(1.0, 1.0, 1.0),
            decode_ratio=Ratio(1.0, 1.0, 1.0), wire="bf16", predicted_prompt_seconds=predicted,
            **more,
        )  # fmt: skip

    experiment = Generation(name="generation", title="prefill")
    summary = experiment.summary([row("transformers", 9.0, None), row("local", 6.0, 6.2), row("hmp", 2.0, 2.1)])
    (said,) = summary.conclusions
    assert said.startswith(
        "four, 500 Mbit/s, bf16 on the wire, 2048 + 2 tokens: the prompt takes hmp 2.00 s (predicted 2.10 s)"
    )
    assert "3.00" in said
    # 100 ms a token on one device, 80 of them products; 30 + 20 + 10 messages of 1 ms on several: 100/60. Measured: 100/33.
    shared = row("hmp", 2.0, 2.1, ping_seconds=0.001, alone_kernel_seconds=0.08, kernel_seconds=0.03, num_exchanges=10)
    _, bound = experiment.summary([row("local", 6.0, 6.2), shared]).conclusions
    assert "decodes 3.00 [3.00, 3.00] times as fast as one device, 180% of the 1.67 times" in bound


@pytest.mark.namespaces
@pytest.mark.thorough
def test_decoder_is_compared_with_transformers(files: Path) -> None:
    (files / "llama.json").write_text(json.dumps(TINY_LLAMA))
    done = generate(files, mbit=[100], rounds=5, prompt_tokens=20, step_rows=10, wire="bf16", new_tokens=6)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [GenerationRow.model_validate(each) for each in load_result(files / "rows.json").raw]
    assert [row.strategy for row in rows] == ["transformers", "local", "hmp", "auto"]
    assert all(len(row.prefill) == len(row.decode) == 5 for row in rows)
    assert all(row.wire == "bf16" for row in rows)
    assert all(row.predicted_prompt_seconds for row in rows[1:])
    (shared,) = (row for row in rows if row.strategy == "hmp")
    assert shared.ping_seconds


def test_model_other_than_a_decoder_is_rejected(files: Path) -> None:
    (files / "llama.json").write_text(json.dumps(TINY))
    done = generate(files)
    assert done.returncode == 1
    assert "not a decoder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.namespaces
@pytest.mark.parametrize(
    ("moment", "to_all"),
    [
        pytest.param(each, each != LAST_MOMENT, marks=pytest.mark.thorough if each == LAST_MOMENT else [], id=each)
        for each in MOMENTS
    ],
)
def test_ctrl_c_cleans_up(files: Path, moment: str, to_all: bool) -> None:
    process = start(files, rounds=10000, strategies=["local", "hmp", *(["gloo-tp"] if to_all else [])])
    try:
        wait_for(moment, lambda: MOMENTS[moment](process) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        running = slot_of(process)
        assert running is not None
        inside = list(namespaces(running.slot))
        interrupt = os.killpg if to_all else os.kill
        interrupt(process.pid, signal.SIGINT)
        interrupt(process.pid, signal.SIGINT)  # a second Ctrl-C changes nothing
        said, complained = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 130, (inside, said, complained)
    assert slot_of(process) is None
    left = [*namespaces(running.slot), *Path("/sys/fs/cgroup").glob(f"hearth-ht{running.slot}"),
            *Path("/sys/fs/cgroup").glob(f"*/hearth-ht{running.slot}")]  # fmt: skip
    # The testbed of another test may have taken the free slot meanwhile.
    assert left == [] or running.slot in {other.slot for other in running_testbeds()}
    assert alive_in_group(process.pid) == []
    assert list((files / "tmp").glob("hearth-*")) == []
