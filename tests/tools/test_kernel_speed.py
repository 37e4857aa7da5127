"""Times of the products of a small model's layers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from agent.worker.transformer.kernels.base import multiplies_bfloat16
from tools.bench import kernel_speed
from tools.bench.experiment import Context, make_experiment, read_settings
from tools.bench.stats import paired_ratio

SIZES = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "hidden_size": 64, "ffn_size": 128}


def test_each_kernel_is_compared_with_the_default_and_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_speed, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(kernel_speed, "_HOPELESS", math.inf)  # of such small matrices, any kernel may be slow
    settings = read_settings("kernels")
    settings = {**settings, "rows": [1, 300], "rounds": 2, "model": {**settings["model"], **SIZES}}
    experiment = make_experiment(settings)
    rows = list(experiment.measure(Context(Path(), lambda step: None)))
    for weights in ("int4", "int8"):
        for count in (1, 300):
            found = {row.variant: row for row in rows if (row.weights, row.rows) == (weights, count)}
            assert {kernel_speed.DEFAULT, kernel_speed.CHOSEN, "torch torch"} <= found.keys()
            fastest = min(found.values(), key=lambda row: median(row.seconds))
            assert fastest.over_fastest == (1.0, 1.0, 1.0)
            for row in found.values():
                assert row.over_fastest == paired_ratio(fastest.seconds, row.seconds)
                assert row.over_default == paired_ratio(found[kernel_speed.DEFAULT].seconds, row.seconds)
    # With many rows, bfloat16 is left out on processors that have no such products.
    plain = Counter((row.variant, row.rows) for row in rows if row.weights not in ("int4", "int8"))
    with_bfloat16 = (1, 300) if multiplies_bfloat16() else (1,)
    assert plain == Counter(
        {("float32", 1): 2, ("float32", 300): 2, **{("bfloat16", count): 2 for count in with_bfloat16}}
    )
    for row in rows:
        assert len(row.seconds) == 2
    (table,) = experiment.summary(rows).tables
    assert [line[2] for line in table.rows] == [row.variant for row in rows]
