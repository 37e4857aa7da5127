"""The experiment with all scenarios of the testbed: its settings and findings, and profiles with media."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.plans import BERT_LARGE, make_plan

from tools.bench.experiment import Context, make_experiment, read_settings
from tools.bench.scenarios import (
    ScenarioRow,
    Scenarios,
    distinct_plans,
    ratio_to_local,
    rescaled_error,
    summarise_scenarios,
    timed_scenarios,
)

TINY = {
    "model_type": "bert", "hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 300,
    "vocab_size": 3000, "max_position_embeddings": 64,
}  # fmt: skip
TINY_LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 2100, "max_position_embeddings": 128, "eos_token_id": None,
}  # fmt: skip


def row(strategy: str, seconds: float, predicted: float | None = None, **more: Any) -> ScenarioRow:
    values = {"scenario": "wifi-5", "workload": "decoder", "plan": f"{strategy} on m0", **more}
    return ScenarioRow(strategy=strategy, predicted_seconds=predicted or seconds, seconds=(seconds,) * 15, **values)


def missed(*rows: ScenarioRow) -> list[str]:
    summary = summarise_scenarios(rows)
    assert bool(summary.failure) == (len(summary.conclusions) > 1)
    return [line.removeprefix("missed: ").rpartition("; target")[0] for line in summary.conclusions[1:]]


def test_auto_that_is_slower_than_one_device_fails() -> None:
    assert missed(row("local", 1.0), row("auto", 1.04)) == []
    (said,) = missed(row("local", 1.0), row("auto", 1.06))
    assert said.startswith("wifi-5, decoder: time of auto, over that of the best single device: 1.06 ([1.06, 1.06]")


def test_ratio_is_of_paired_rounds_of_the_same_workload() -> None:
    # The host is half as fast in every other round, for both: the ratio of the medians would not be 0.5.
    local = row("local", 1.0).model_copy(update={"seconds": (1.0, 2.0, 1.0)})
    auto = row("auto", 1.0).model_copy(update={"seconds": (0.5, 1.0, 0.5)})
    other = row("local", 9.0, workload="prefill")
    found = ratio_to_local(auto, [other, local, auto])
    assert found is not None
    assert found == (0.5, 0.5, 0.5)
    assert ratio_to_local(local, [local, auto]) is None
    assert ratio_to_local(auto, [other, auto]) is None


def test_error_is_rescaled_by_the_best_single_device() -> None:
    # All devices are half as fast as when they were profiled; `hmp` gains 25 % less than predicted.
    rows = [row("local", 2.0, 1.0), row("auto", 1.0, 0.5), row("hmp", 1.0, 0.4)]
    assert [rescaled_error(each, rows) for each in rows] == [None, pytest.approx(0), pytest.approx(-0.2)]
    findings, table = summarise_scenarios(rows).tables
    assert ("wifi-5: the same, rescaled by the best single device", "-", "10.0% (2 other plans)", "-") in findings.rows
    assert [cells[-2] for cells in table.rows] == ["-", "+0%", "-20%"]
    (alone,) = summarise_scenarios([row("local", 2.0, 1.0)]).tables[1].rows
    assert alone[-2] == "-"


def test_same_plan_is_said_and_not_compared() -> None:
    same = row("auto", 1.0, same_plan_as="local")
    summary = summarise_scenarios([row("local", 1.0), same])
    assert not summary.failure
    findings, table = summary.tables
    assert ("wifi-5, decoder: time of auto, over that of the best single device", "-",
            "1.00 (the same plan, measured once)", "-") in findings.rows  # fmt: skip
    assert [cells[-1] for cells in table.rows] == ["-", "same plan"]


def test_median_error_of_a_scenario_must_hold_and_equal_plans_count_once() -> None:
    good = [row("local", 1.0, 1.1), row("auto", 1.0, 0.85)]
    assert missed(*good, row("hmp", 1.0, 9.0)) == []
    # Of the errors 10 %, 800 %: those of the plan measured once for two rows do not outvote the other one.
    (said,) = missed(row("local", 1.0, 1.1), row("auto", 1.0, 1.1, same_plan_as="local"), row("hmp", 1.0, 9.0))
    assert said.startswith("wifi-5: error of predictions, median: 405.0%")


def test_times_of_a_disturbed_machine_are_marked() -> None:
    _, table = summarise_scenarios([row("local", 1.0, distrust="other programs took 40 % of the cores")]).tables
    assert table.rows[0][0] == "wifi-5, decoder (untrusted)"
    assert table.notes == ("wifi-5, decoder: untrusted, other programs took 40 % of the cores",)


def test_media_that_were_missed_or_invented_fail_the_run() -> None:
    found, both = ("wifi0, wifi1",), ("plc", "wifi0, wifi1")
    assert not missed(row("local", 1.0, media=both, actual_media=both))
    (said,) = missed(row("local", 1.0, media=found, actual_media=both))
    assert said.startswith("wifi-5: media missed or invented: 1 (decoder: plc)")
    (said,) = missed(row("local", 1.0, media=both, actual_media=()))
    assert said.startswith("wifi-5: media missed or invented: 2")


def test_equal_plans_are_measured_once() -> None:
    one, other = make_plan(BERT_LARGE, "hmp", (1, 1)), make_plan(BERT_LARGE, "local", (1,))
    assert distinct_plans({"local": other, "auto": one, "hmp": one}) == {
        "local": "local",
        "auto": "auto",
        "hmp": "auto",
    }
    moved = one.model_copy(update={"devices": one.devices[::-1]})  # the same shares on other devices
    assert distinct_plans({"auto": one, "hmp": moved}) == {"auto": "auto", "hmp": "hmp"}


def test_one_or_several_scenarios_can_be_chosen() -> None:
    def chosen(*changes: str) -> Scenarios:
        experiment = make_experiment(read_settings("scenarios", changes))
        assert isinstance(experiment, Scenarios)
        return experiment

    assert chosen("scenario=mixed", "workload=graph").scenario == ("mixed",)
    assert chosen('scenario=["mixed", "wifi-5"]').scenario == ("mixed", "wifi-5")
    assert {"mixed", "wifi-5", "wifi-busy", "galaxy-a", "hub"} <= set(timed_scenarios())
    assert "wifi-lossy" not in timed_scenarios()


@pytest.mark.slow
@pytest.mark.namespaces
def test_home_is_measured(tmp_path: Path) -> None:
    (tmp_path / "encoder.json").write_text(json.dumps(TINY))
    (tmp_path / "decoder.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "test-pair.toml").write_text(
        'media = [{ name = "air", mbit = 50, delay_ms = 5 }]\n'
        'every_device = { cpu_share = 0.5, mbit = 100, medium = "air" }\n'
        'devices = [{ name = "one", core = 0 }, { name = "two", core = 1 }]\n'
    )
    changes = {
        "scenario": str(tmp_path / "test-pair.toml"), "encoder": str(tmp_path / "encoder.json"), "seq_len": 16,
        "decoder": str(tmp_path / "decoder.json"), "prompt_tokens": 8, "new_tokens": 4, "branch_width": 8,
        "rounds": 3, "time_limit": 1,
    }  # fmt: skip
    experiment = make_experiment(
        read_settings("scenarios", [f"{name}={json.dumps(each)}" for name, each in changes.items()])
    )
    rows = list(experiment.measure(Context(tmp_path, print)))
    assert [(row.workload, row.strategy) for row in rows] == [
        *((workload, strategy) for workload in ("prefill", "decoder") for strategy in ("local", "auto", "hmp")),
        ("graph", "local"), ("graph", "auto"),
    ]  # fmt: skip
    assert all(len(row.seconds) == 3 for row in rows)
    assert all(row.media == ("one, two",) for row in rows if row.workload != "graph")
    # One device is much faster than two over delays of 10 ms from station to station, and the plan is the same.
    assert {row.same_plan_as for row in rows if row.strategy == "auto"} == {"local"}
    shared = next(row for row in rows if (row.workload, row.strategy) == ("decoder", "hmp"))
    # Two exchanges for each of two layers and one for the token, each of which waits for a delay: over 3 tokens and a prompt.
    assert min(shared.seconds) > 4 * 5 * 0.005
    assert shared.predicted_seconds > 4 * 5 * 0.005
    known = list(experiment.measure(Context(tmp_path, print, rows)))
    assert known == rows  # nothing is measured again
