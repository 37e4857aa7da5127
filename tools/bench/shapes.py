"""The models that are measured: the shapes of Galaxy's Table II as BERT configurations, or any config.json; random weights."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hearth.errors import BadSetting, UnsupportedArchitecture
from hearth.model.families import FAMILIES, read_json

_VOCABULARY, _POSITIONS = 30522, 512  # BERT's


@dataclass(frozen=True)
class Shape:
    """`config` is what transformers reads. `num_layers` is the whole model's depth, of which some are run."""

    name: str
    num_layers: int
    config: dict[str, Any]
    note: str = ""

    def shortened(self, num_layers: int | None, num_positions: int) -> dict[str, Any]:
        """The configuration that is run. Raises BadSetting: the model takes no sequence this long."""
        layers = "n_layers" if self.config["model_type"] == "distilbert" else "num_hidden_layers"
        if num_positions > int(self.config["max_position_embeddings"]):
            raise BadSetting(
                setting="--seq-len",
                reason=f"{self.name} takes at most {self.config['max_position_embeddings']} tokens",
            )
        return {**self.config, layers: self.depth(num_layers)}

    def depth(self, num_layers: int | None) -> int:
        return min(num_layers or self.num_layers, self.num_layers)


def _bert(name: str, layers: int, heads: int, hidden: int, note: str = "") -> Shape:
    config = {
        "model_type": "bert", "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "vocab_size": _VOCABULARY, "max_position_embeddings": _POSITIONS,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    }  # fmt: skip
    return Shape(name, layers, config, note)


_DECODER = "a decoder, run as an encoder stack of its shape"
SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _bert("distilbert", 6, 12, 768),
        _bert("bert-base", 12, 12, 768),
        _bert("bert-large", 24, 16, 1024),
        _bert("gpt2-large-shape", 36, 20, 1280, _DECODER),
        _bert("opt-large-shape", 24, 16, 2048, _DECODER),
        _bert("opt-xl-shape", 32, 32, 2560, _DECODER),
    )
}


def shape_named(name: str) -> Shape:
    """Raises BadSetting."""
    if name not in SHAPES:
        raise BadSetting(setting="--model", reason=f"'{name}' is none of {', '.join(SHAPES)}")
    return SHAPES[name]


def shape_of_file(path: Path) -> Shape:
    """An encoder's Hugging Face config.json. Raises BadCheckpoint, BadSetting or UnsupportedArchitecture."""
    config = read_json(path)
    kind = str(config.get("model_type", "missing"))
    encoders = {name: family for name, family in FAMILIES.items() if not family.facts.get("causal")}
    if kind not in encoders:
        raise UnsupportedArchitecture(architecture=kind, supported=", ".join(encoders))
    family = encoders[kind]
    needed = [theirs for theirs in family.config.values() if theirs not in family.defaults]
    for field in needed:
        if not isinstance(config.get(field), (int, str)):
            raise BadSetting(setting=f"--config {path}", reason=f"the field {field} is missing")
    published = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    name = published or (path.stem if path.stem != "config" else path.resolve().parent.name)
    return Shape(name, int(config[family.config["num_layers"]]), config)


def save_random_model(directory: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A checkpoint with every bias and norm gain randomised.

    As transformers makes them, biases are 0 and gains 1: a bias added on every device would pass unseen.
    """
    import torch
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    values = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype", "dtype")}
    try:
        model = AutoModel.from_config(AutoConfig.for_model(config["model_type"], **values))
    except (ValueError, TypeError) as error:
        raise BadSetting(setting="the model's configuration", reason=str(error)) from None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name.lower():
                parameter.normal_(1, 0.2)
    model.float().save_pretrained(directory, safe_serialization=True, max_shard_size="100GB")
    del model
    gc.collect()
    return directory


def config_key(config: dict[str, Any]) -> str:
    """Equal for configurations whose checkpoints are equal."""
    return json.dumps(config, sort_keys=True)
