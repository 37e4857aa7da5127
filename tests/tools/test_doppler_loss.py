"""The experiment `doppler-loss`: a row for each lost device, and limits that hold or not."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ortools")

from tools.bench.doppler import loss as loss_module
from tools.bench.doppler.loss import LossRow
from tools.bench.experiment import Context, Experiment, make_experiment, read_settings
from tools.bench.results import Result

ROW = LossRow(
    graph="chain-mm", home="wifi", lost="device0", num_operators=76, planner="doppler", latency_seconds=1.1,
    makespan_seconds=1.04, reference_seconds=1.0, start_seconds=0.4, planning_seconds=0.5,
)  # fmt: skip


def experiment(*changes: str) -> Experiment:
    return make_experiment(read_settings("doppler-loss", ["home_limit=0.01", "reference_limit=0.01", *changes]))


def test_each_device_is_lost_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_seconds() -> float:
        return 0.4

    monkeypatch.setattr(loss_module, "_start_seconds", start_seconds)
    monkeypatch.setattr("coordinator.plan.graph.auto._RECOVERY_SECONDS", 0.01)
    small = experiment('graphs=["chain-mm"]', 'homes=["wifi"]')
    known = [ROW.model_copy(update={"lost": f"device{k}"}) for k in (0, 1, 2)]
    *kept, row = small.measure(Context(tmp_path, lambda step: None, known))
    assert kept == known
    assert (row.lost, row.num_operators) == ("device3", 76)
    assert 0 < row.makespan_seconds <= row.latency_seconds * (1 + 1e-9)
    assert row.reference_seconds > 0
    all_rows = [*known, row]
    assert list(small.measure(Context(tmp_path, lambda step: None, all_rows))) == all_rows

    earlier = Result(
        experiment="loss", title="earlier", command="", commit="", date="", machine="",
        raw=tuple(each.model_dump() | {"reference_seconds": 7.5} for each in all_rows),
    )  # fmt: skip
    earlier.save(tmp_path / "earlier.json")
    again = experiment('graphs=["chain-mm"]', 'homes=["wifi"]', f'references=["{tmp_path / "earlier.json"}"]')
    *_, row = again.measure(Context(tmp_path, lambda step: None, known))
    assert row.reference_seconds == 7.5


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"makespan_seconds": 1.2}, False),
        ({"planning_seconds": 0.7}, False),
    ],
)
def test_limits_are_checked(change: dict[str, float], holds: bool) -> None:
    rows = [ROW, ROW, ROW.model_copy(update=change)]
    found = experiment().summary(rows)
    assert (found.failure == "") == holds
    assert "3 losses of 1 problems" in found.conclusions[0]
    assert len(found.tables[0].rows) == 3
