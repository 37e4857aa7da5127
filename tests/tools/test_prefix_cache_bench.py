"""The table of times to the first token with the prefix cache and without."""

from __future__ import annotations

from typing import Any

from tools.bench.experiment import make_experiment, read_settings
from tools.bench.prefix_cache import PrefixRow
from tools.bench.stats import paired_ratio


def row(cached: tuple[float, ...], whole: tuple[float, ...], **changes: Any) -> PrefixRow:
    fields: dict[str, Any] = {
        "strategy": "local", "devices": "one", "instruction_set": "native", "weights": "int4", "layers": 6,
        "prefix_tokens": 2048, "other_tokens": 20, "num_cached": (2048,) * len(cached), "same_tokens": 2, **changes,
    }  # fmt: skip
    return PrefixRow(cached=cached, whole=whole, share=paired_ratio(cached, whole), **fields)


def test_share_of_the_time_is_that_within_rounds() -> None:
    experiment = make_experiment(read_settings("prefix-cache"))
    calm = row((0.1, 0.2, 0.3), (2.0, 8.0, 10.0))
    summary = experiment.summary([calm])
    assert summary.tables[0].rows[0][2:] == (
        "2048 + 20", "8.000 s", "0.200 s", "3.0% [2.5%, 5.0%]", "2 of 3",
    )  # fmt: skip
    assert not summary.failure
    assert experiment.summary([calm, row((0.1,), (2.0,), num_cached=(0,))]).failure
