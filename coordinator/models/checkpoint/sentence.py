"""The pooling of a model's rows to one vector per text (sentence-transformers' pooling configuration)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from coordinator.models.checkpoint.families import read_json_object
from hearth.errors import UnsupportedArchitecture


def read_pooling(model_dir: Path) -> Literal["mean"]:
    """`mean`, if the model asks for it or has no pooling configuration. Raises UnsupportedArchitecture otherwise."""
    path = model_dir / "1_Pooling" / "config.json"
    if path.exists():
        config = read_json_object(path)
        other = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
        if other != ["pooling_mode_mean_tokens"]:
            raise UnsupportedArchitecture(
                architecture=f"pooling by {', '.join(other) or 'nothing'}", supported="pooling_mode_mean_tokens"
            )
    return "mean"
