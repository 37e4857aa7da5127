"""Defaults of a goal that follow from its other settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import write_model

from coordinator.serve.goal import open_transformer
from coordinator.serve.state import TransformerGoal


@pytest.mark.parametrize(
    ("weights", "deterministic", "given", "kv_cache"),
    [
        ("float32", False, None, "float32"),
        ("int8", False, None, "bfloat16"),
        ("int8", True, None, "float32"),
        ("int8", True, "int8", "int8"),
    ],
)
def test_format_of_the_kv_cache(
    weights: str, deterministic: bool, given: str | None, kv_cache: str, tmp_path: Path
) -> None:
    fields = {"weights": weights, "deterministic": deterministic, "kv_cache": given}
    goal = TransformerGoal.model_validate({"model_dir": str(write_model(tmp_path, "llama")), **fields})
    assert open_transformer(goal).spec.kv_cache == kv_cache
