"""The table of speculative decoding by the share of guesses that are right, and the oracle that guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agent.worker.transformer.generation.sequence import SequenceState
from hearth.wire.messages import GenerateTokens
from tools.bench.experiment import make_experiment, read_settings
from tools.bench.speculation import SpeculationRow
from tools.bench.stats import paired_ratio

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from tools.bench.runner import DraftOracle, Oracle


def row(right: float, seconds: tuple[float, ...], **changes: Any) -> SpeculationRow:
    fields = {
        "strategy": "local",
        "devices": "one",
        "weights": "float32",
        "num_tokens": 80,
        "num_drafted": 9,
        **changes,
    }
    speed_up = paired_ratio((2.0, 2.0, 4.0), seconds)
    return SpeculationRow(
        right=right, seconds=seconds, speed_up=speed_up, num_accepted=5, **{"same_tokens": True, **fields}
    )


def test_speed_is_compared_within_rounds() -> None:
    experiment = make_experiment(read_settings("speculation"))
    rows = [row(-1.0, (2.0, 2.0, 4.0), num_drafted=0), row(0.9, (1.0, 0.5, 2.0))]
    summary = experiment.summary(rows)
    assert [line[2:5] for line in summary.tables[0].rows] == [
        ("none", "40.0", "1.00 [1.00, 1.00]"),
        ("90%", "80.0", "2.00 [2.00, 4.00]"),
    ]
    assert not summary.failure
    assert experiment.summary([*rows, row(0.3, (1.0, 1.0, 1.0), same_tokens=False)]).failure


def test_draft_model_takes_its_time_and_guesses_what_the_oracle_knows() -> None:
    class Model:
        def seconds(self, num_sequences: int) -> float:
            return 0.25

        def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
            return [[9] * (count - 1) for _, count in wanted]

    draft = DraftOracle(Model())  # type: ignore[arg-type]
    draft.oracle = Oracle([5, 6, 7, 8], 1.0)
    sequence = SequenceState(1, GenerateTokens(holder="test", epoch=1, max_tokens=9), [5, 6], 2)
    assert draft.seconds(1) == 0.25
    assert draft.propose([(sequence, 3), (sequence, 1)]) == [[7, 8], []]
    assert make_experiment(read_settings("speculation-draft")).draft


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_oracle_is_right_with_its_probability(right: float) -> None:
    text = list(range(4000))
    guess = Oracle(text, right).propose(text[:1000], 2000)
    assert len(guess) == 2000
    assert sum(a == b for a, b in zip(guess, text[1000:], strict=False)) / 2000 == pytest.approx(right, abs=0.05)
