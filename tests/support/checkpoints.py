"""Small checkpoints written without torch, so that slicing is tested on every Python."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from hearth.model.families import FAMILIES

H, HEADS, FFN, VOCAB, POSITIONS, LAYERS = 24, 3, 130, 2500, 16, 2

CONFIGS = {
    "bert": {
        "model_type": "bert", "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": H,
        "intermediate_size": FFN, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    },
    "distilbert": {
        "model_type": "distilbert", "n_layers": LAYERS, "n_heads": HEADS, "dim": H, "hidden_dim": FFN,
        "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "activation": "gelu",
    },
}  # fmt: skip


def tensors_of(family: str, prefix: str = "", dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Every tensor of a small model, random, under the family's own names."""
    rng = np.random.default_rng(0)
    table = FAMILIES[family]
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        base = prefix + table.layer_prefix.format(layer)
        for part, (rows, columns) in {
            "q": (H, H),
            "k": (H, H),
            "v": (H, H),
            "o": (H, H),
            "up": (FFN, H),
            "down": (H, FFN),
        }.items():
            shapes[f"{base}{table.layer[part]}.weight"] = (rows, columns)
            shapes[f"{base}{table.layer[part]}.bias"] = (rows,)
        for part in ("norm1", "norm2"):
            for kind in ("weight", "bias"):
                shapes[f"{base}{table.layer[part]}.{kind}"] = (H,)
    for part, rows in {"word": VOCAB, "position": POSITIONS, "type": 2}.items():
        if part in table.embedding:
            shapes[f"{prefix}{table.embedding[part]}.weight"] = (rows, H)
    for kind in ("weight", "bias"):
        shapes[f"{prefix}{table.embedding['norm']}.{kind}"] = (H,)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write_model(
    directory: Path, family: str = "bert", prefix: str = "", dtype: type = np.float32, num_files: int = 1
) -> Path:
    """A model directory: one safetensors file, or several with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[family]))
    tensors = tensors_of(family, prefix, dtype)
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = sorted(tensors)
    weight_map = {}
    for index in range(num_files):
        file = f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
        part = names[index::num_files]
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
