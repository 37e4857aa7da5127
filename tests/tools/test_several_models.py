"""The findings of the experiment with several models."""

from __future__ import annotations

from typing import Any

import pytest

from tools.bench.experiment import make_experiment, read_settings
from tools.bench.several_rows import Asked, DeviceRow, LoadRow, PlanRow

NAMES = ("chat", "sentences", "images")


def load(step: str, *names: str, per_second: float = 4.0, **fields: Any) -> LoadRow:
    asked = {name: Asked(answers=12, per_second=per_second, longest_seconds=0.5, **fields) for name in names}
    return LoadRow.model_validate({"step": step, "asked": asked, "seconds": 3.0, "target": "m0"})


def rows(together_per_second: float = 2.0) -> list[Any]:
    rounds = [load("alone", name) for name in NAMES] + [load("together", *NAMES, per_second=together_per_second)]
    plans = [
        PlanRow(model=name, planned_bytes=400 << 20, held_bytes=200 << 20, devices=("m0", "m1"), devices_after=("m1",))
        for name in NAMES
    ]
    devices = [
        DeviceRow(device=f"m{rank}", limit_bytes=1000 << 20, peak_bytes=900 << 20, killed=0) for rank in range(3)
    ]
    return [*rounds, load("stopped", *NAMES[:2]), load("killed", *NAMES), *plans, *devices]


def missed(measured: list[Any]) -> list[str]:
    summary = make_experiment(read_settings("several-models")).summary(measured)
    assert bool(summary.failure) == (len(summary.conclusions) > 1)
    return [line.removeprefix("missed: ").partition(":")[0] for line in summary.conclusions[1:]]


def test_home_that_meets_all_targets() -> None:
    assert missed(rows()) == []
    experiment = make_experiment(read_settings("several-models"))
    assert [experiment.ROW.validate_python(row.model_dump(mode="json")) for row in rows()] == rows()
    findings, plans = experiment.summary(rows()).tables
    measured = {line[0]: line[2] for line in findings.rows}
    assert measured["chat: throughput under load of all, over that alone"].startswith("50.0% (")
    assert measured["m0: the most that it held, of its limit"] == "90.0% (900 MiB of 0.98 GiB)"
    assert plans.rows[0] == ("chat", "400 MiB", "200 MiB", "m0, m1", "m1")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (load("killed", "chat", failed=["DeviceLost"]), "m0 is killed"),
        (load("stopped", "chat", failed=["DeviceLost"]), "m0 is stopped and served again"),
        (load("together", "chat", failed=["DeviceLost"]), "failed requests in the rounds"),
        (load("together", "chat", wrong=["2 of 16 tokens differ"]), "chat"),
        (DeviceRow(device="m3", limit_bytes=1000 << 20, peak_bytes=900 << 20, killed=1), "processes killed for memory"),
        (DeviceRow(device="m3", limit_bytes=1000 << 20, peak_bytes=1001 << 20, killed=0), "m3"),
    ],
)
def test_harm_of_any_kind_fails_the_run(change: Any, expected: str) -> None:
    assert missed([*rows(), change]) == [expected]


def test_less_than_a_share_and_devices_that_could_hold_all_fail_the_run() -> None:
    assert missed(rows(together_per_second=1.0)) == list(NAMES)
    small = [row.model_copy(update={"planned_bytes": 300 << 20}) if isinstance(row, PlanRow) else row for row in rows()]
    assert missed(small) == ["memory of all models on one device by their plans, over its limit"]
