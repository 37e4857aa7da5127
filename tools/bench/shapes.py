"""The models to measure: the shapes of Galaxy's Table II, or any config.json, with random weights.

Decoders run a prefill (one pass over a prompt with causal attention), as in the paper.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.models.checkpoint.families import FAMILIES, read_json_object
from hearth.errors import BadSetting, UnsupportedArchitecture

_VOCABULARY, _POSITIONS = 30522, 512  # BERT's


@dataclass(frozen=True)
class Shape:
    """A model's configuration. `config`: as read by transformers; `num_layers`: depth of the whole model."""

    name: str
    num_layers: int
    config: dict[str, Any]

    def shortened(self, num_layers: int | None, num_positions: int) -> dict[str, Any]:
        """The configuration with fewer layers. Raises BadSetting if the model does not support sequences this long."""
        fields = FAMILIES[self.config["model_type"]].config
        longest = int(self.config[fields["max_positions"]])
        if num_positions > longest:
            raise BadSetting(setting="seq_lens", reason=f"{self.name} takes at most {longest} tokens")
        return {**self.config, fields["num_layers"]: self.depth(num_layers)}

    @property
    def hidden_size(self) -> int:
        return int(self.config[FAMILIES[self.config["model_type"]].config["hidden_size"]])

    def depth(self, num_layers: int | None) -> int:
        return min(num_layers or self.num_layers, self.num_layers)


def _bert(name: str, layers: int, heads: int, hidden: int) -> Shape:
    config = {
        "model_type": "bert", "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "vocab_size": _VOCABULARY, "max_position_embeddings": _POSITIONS,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    }  # fmt: skip
    return Shape(name, layers, config)


def _gpt2(name: str, layers: int, heads: int, hidden: int) -> Shape:
    config = {
        "model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": hidden, "n_positions": 1024,
        "vocab_size": 50257, "activation_function": "gelu_new",
    }  # fmt: skip
    return Shape(name, layers, config)


def _opt(name: str, layers: int, heads: int, hidden: int) -> Shape:
    config = {
        "model_type": "opt", "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden,
        "ffn_dim": 4 * hidden, "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": hidden,
        "activation_function": "relu",
    }  # fmt: skip
    return Shape(name, layers, config)


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _bert("distilbert", 6, 12, 768),
        _bert("bert-base", 12, 12, 768),
        _bert("bert-large", 24, 16, 1024),
        _gpt2("gpt2-large", 36, 20, 1280),
        _opt("opt-large", 24, 16, 2048),
        _opt("opt-xl", 32, 32, 2560),
    )
}


def find_shape(name_or_path: str) -> Shape:
    """The shape of this name, or of a config.json. Raises BadCheckpoint, BadSetting or UnsupportedArchitecture."""
    if name_or_path.endswith(".json"):
        return shape_of_file(Path(name_or_path))
    if name_or_path not in SHAPES:
        reason = f"'{name_or_path}' is neither a config.json nor one of {', '.join(SHAPES)}"
        raise BadSetting(setting="models", reason=reason)
    return SHAPES[name_or_path]


def shape_of_file(path: Path) -> Shape:
    """Read a Hugging Face config.json. Raises BadCheckpoint, BadSetting or UnsupportedArchitecture."""
    config = read_json_object(path)
    kind = str(config.get("model_type", "missing"))
    if kind not in FAMILIES:
        raise UnsupportedArchitecture(architecture=kind, supported=", ".join(FAMILIES))
    family = FAMILIES[kind]
    needed = [theirs for theirs in family.config.values() if theirs not in family.defaults]
    for field in needed:
        if not isinstance(config.get(field), (int, str)):
            raise BadSetting(setting=f"models: {path}", reason=f"the field {field} is missing")
    published = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    name = published or (path.stem if path.stem != "config" else path.resolve().parent.name)
    return Shape(name, int(config[family.config["num_layers"]]), config)


def save_random_model(directory: Path, config: dict[str, Any], seed: int = 0, dtype: str = "float32") -> Path:
    """Save a checkpoint of random weights, biases and norm gains. `dtype`: torch's name of the stored type.

    transformers initialises biases to 0 and gains to 1, which would hide errors such as a bias added on every device.
    """
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    values = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype", "dtype")}
    try:
        causal = FAMILIES[config["model_type"]].facts.get("causal", False)
        model = (AutoModelForCausalLM if causal else AutoModel).from_config(
            AutoConfig.for_model(config["model_type"], **values)
        )
    except (ValueError, TypeError) as error:
        raise BadSetting(setting="the model's configuration", reason=str(error)) from None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name.lower() or ".ln_" in name:
                parameter.normal_(1, 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(directory, safe_serialization=True, max_shard_size="100GB")
    del model
    gc.collect()
    return directory


def config_key(config: dict[str, Any]) -> str:
    """Cache key: equal for configurations with equal checkpoints."""
    return json.dumps(config, sort_keys=True)
