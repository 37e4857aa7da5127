"""Shortcuts of generation: tables of guesses and of the prefix cache, and the oracle that guesses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent.worker.transformer.generation.sequence import SequenceState
from hearth.wire.messages import GenerateTokens
from tools.bench.experiment import make_experiment, read_settings
from tools.bench.generation import PrefixRow, SpeculationRow, speed_up_bound
from tools.bench.stats import paired_ratio

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from agent.worker.transformer.generation.local_draft import LocalDraft
from tools.bench.runner import DraftOracle, Oracle


def row(right: float, seconds: tuple[float, ...], **changes: Any) -> SpeculationRow:
    fields: dict[str, Any] = {
        "strategy": "local", "devices": "one", "weights": "float32", "num_tokens": 80, "num_drafted": 9, "num_accepted": 5,
        "same_tokens": True, "bound": 1.0, **changes,
    }  # fmt: skip
    return SpeculationRow(right=right, seconds=seconds, speed_up=paired_ratio((2.0, 2.0, 4.0), seconds), **fields)


def test_speed_is_compared_within_rounds() -> None:
    experiment = make_experiment(read_settings("speculation"))
    rows = [row(-1.0, (2.0, 2.0, 4.0), num_drafted=0), row(0.9, (1.0, 0.5, 2.0), bound=1.5)]
    summary = experiment.summary(rows)
    assert [line[5] for line in summary.tables[0].rows] == ["1.00", "1.50"]
    assert [line[2:5] for line in summary.tables[0].rows] == [
        ("none", "40.0", "1.00 [1.00, 1.00]"),
        ("90%", "80.0", "2.00 [2.00, 4.00]"),
    ]
    assert not summary.failure
    assert experiment.summary([*rows, row(0.3, (1.0, 1.0, 1.0), same_tokens=False)]).failure


def test_draft_model_takes_its_time_and_guesses_what_the_oracle_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    monkeypatch.setattr(LocalDraft, "next_token", lambda self, sequence, tokens, logits_V: computed.append(tokens) or 9)
    draft = DraftOracle.__new__(DraftOracle)
    draft.oracle = Oracle([5, 6, 7, 8], 1.0)
    sequence = SequenceState(1, GenerateTokens(holder="test", epoch=1, max_tokens=9), [5, 6], 2)
    assert [draft.next_token(sequence, [5, 6, 7][:count], np.zeros(16)) for count in (2, 3)] == [7, 8]
    assert computed == [[5, 6], [5, 6, 7]]
    assert make_experiment(read_settings("speculation-draft")).draft


def test_bound_is_of_the_best_number_of_guesses() -> None:
    assert speed_up_bound(0.0, [1.0, 1.1], 0.2) == 1.0
    assert speed_up_bound(-1.0, [1.0, 0.9], 0.2) == 1.0
    assert speed_up_bound(0.5, [1.0, 1.0, 2.0], 0.25) == pytest.approx(1.5 / 1.25)
    assert speed_up_bound(1.0, [1.0, 1.0, 1.0, 9.0], 0.0) == pytest.approx(3.0)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_oracle_is_right_with_its_probability(right: float) -> None:
    text = list(range(4000))
    guess = Oracle(text, right).propose(text[:1000], 2000)
    assert len(guess) == 2000
    assert sum(a == b for a, b in zip(guess, text[1000:], strict=False)) / 2000 == pytest.approx(right, abs=0.05)


def prefix_row(cached: tuple[float, ...], whole: tuple[float, ...], **changes: Any) -> PrefixRow:
    fields: dict[str, Any] = {
        "strategy": "local", "devices": "one", "instruction_set": "native", "weights": "int4", "layers": 6,
        "prefix_tokens": 2048, "other_tokens": 20, "num_cached": (2048,) * len(cached), "same_tokens": 2, **changes,
    }  # fmt: skip
    return PrefixRow(cached=cached, whole=whole, share=paired_ratio(cached, whole), **fields)


def test_share_of_the_time_is_that_within_rounds() -> None:
    experiment = make_experiment(read_settings("prefix-cache"))
    calm = prefix_row((0.1, 0.2, 0.3), (2.0, 8.0, 10.0))
    summary = experiment.summary([calm])
    assert summary.tables[0].rows[0][2:] == (
        "2048 + 20", "8.000 s", "0.200 s", "3.0% [2.5%, 5.0%]", "2 of 3",
    )  # fmt: skip
    assert not summary.failure
    assert experiment.summary([calm, prefix_row((0.1,), (2.0,), num_cached=(0,))]).failure
