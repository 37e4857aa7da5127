"""The table of losses under streams with a long context."""

from __future__ import annotations

from typing import Any

from tools.bench.experiment import make_experiment, read_settings
from tools.bench.kv_loss import KvLossRow


def row(number: int, kv_copies: bool, pause_seconds: float, **changes: Any) -> KvLossRow:
    fields = {"target": "m1", "sent_bytes": 4 << 20, "num_rows": 4096, "pause_bytes": 1 << 20, "answers": 4, **changes}
    return KvLossRow(kv_copies=kv_copies, number=number, pause_seconds=pause_seconds, **fields)


def test_losses_with_copies_and_with_replay_are_told_apart() -> None:
    experiment = make_experiment(read_settings("kv-loss"))
    rows = [row(number, copies, 1.0 + number if copies else 5.0) for number in range(3) for copies in (True, False)]
    summary = experiment.summary(rows)
    (table,) = summary.tables
    assert [line[:6] for line in table.rows] == [
        ("copies", "3", "12", "2.00 s", "1.00 s", "3.00 s"),
        ("replay", "3", "12", "5.00 s", "5.00 s", "5.00 s"),
    ]
    assert not summary.failure
    assert experiment.summary([*rows, row(3, True, 1.0, harm=("wrong: 1 of 300 tokens differ",))]).failure
