"""Settings and tables of the comparison of programs on one core."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from hearth.errors import BadSetting
from tools.bench.experiment import Context, make_experiment, read_settings
from tools.bench.one_core import LLAMA_CPP, NEW, OneCore


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("llama_python", "none/python", "pip install"),
        ("old", "none", "checkout"),
        ("instructions", "mmx", "should be"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_before_anything_runs(
    setting: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.bench.one_core.check_possible", lambda scenario: None)  # needs root
    with pytest.raises(BadSetting, match=reason):
        next(make_experiment({**read_settings("one-core"), setting: value}).measure(Context(Path(), lambda step: None)))


def test_gains_are_speeds_of_hearth_over_each_program() -> None:
    experiment = make_experiment({**read_settings("one-core"), "prompt_tokens": 10, "new_tokens": 3})
    assert isinstance(experiment, OneCore)
    found = {NEW: [{"prefill": 1.0, "decode": 2.0}] * 2, LLAMA_CPP: [{"prefill": 0.5, "decode": 3.0}] * 2}
    rows = list(experiment._rows(found, {NEW: "torch: torch", LLAMA_CPP: "0.3.36"}, "int4"))
    assert [(row.program, row.weights) for row in rows] == [(NEW, "int4"), (LLAMA_CPP, "Q4_0")]
    assert (rows[1].prefill_gain.median, rows[1].decode_gain.median) == (0.5, 1.5)
    (table,) = experiment.summary(rows).tables
    assert [line[3:5] for line in table.rows] == [("10.0", "1.0"), ("20.0", "0.7")]
