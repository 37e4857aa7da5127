"""The models to measure: the shapes of Galaxy's Table II, or any config.json, with random weights.

Decoders run a prefill (one pass over a prompt with causal attention), as in the paper.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.models.checkpoint.families import FAMILIES, model_name, read_json_object
from hearth.errors import BadSetting, UnsupportedArchitecture


@dataclass(frozen=True)
class Shape:
    """A model's configuration, as read by transformers."""

    name: str
    config: dict[str, Any]

    @property
    def num_layers(self) -> int:
        """Depth of the whole model."""
        return int(self.config[self._fields["num_layers"]])

    def shortened(self, num_layers: int, num_positions: int) -> dict[str, Any]:
        """The configuration with at most `num_layers`. Raises BadSetting if the model does not support sequences this long."""
        longest = int(self.config[self._fields["max_positions"]])
        if num_positions > longest:
            raise BadSetting(setting="seq_lens", reason=f"{self.name} takes at most {longest} tokens")
        return {**self.config, self._fields["num_layers"]: min(num_layers, self.num_layers)}

    @property
    def _fields(self) -> Mapping[str, str]:
        """The names of the configuration's fields, by ours."""
        return FAMILIES[self.config["model_type"]].config


# The configuration that all sizes of a family share; what is missing has the value that transformers takes by default.
_SHARED: Mapping[str, Mapping[str, Any]] = {
    "bert": {"vocab_size": 30522, "max_position_embeddings": 512},
    "gpt2": {"vocab_size": 50257, "n_positions": 1024},
    "opt": {"vocab_size": 50272, "max_position_embeddings": 2048},
}


def _shape(name: str, family: str, layers: int, heads: int, hidden: int) -> Shape:
    sizes = {"num_layers": layers, "num_heads": heads, "hidden_size": hidden, "ffn_size": 4 * hidden}
    fields = FAMILIES[family].config  # GPT-2 has none for the MLP, which is always four times as wide
    config = {fields[ours]: size for ours, size in sizes.items() if ours in fields}
    return Shape(name, {"model_type": family, **config, **_SHARED[family]})


_PAPER = (
    ("distilbert", "bert", 6, 12, 768), ("bert-base", "bert", 12, 12, 768), ("bert-large", "bert", 24, 16, 1024),
    ("gpt2-large", "gpt2", 36, 20, 1280), ("opt-large", "opt", 24, 16, 2048), ("opt-xl", "opt", 32, 32, 2560),
)  # fmt: skip
SHAPES = {each[0]: _shape(*each) for each in _PAPER}


def llama(
    hidden: int, ffn: int, heads: int, kv_heads: int, layers: int, vocabulary: int, positions: int
) -> dict[str, Any]:
    """The configuration of a Llama of these sizes."""
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "num_hidden_layers": layers, "vocab_size": vocabulary,
        "max_position_embeddings": positions,
    }  # fmt: skip


# Of 330 million weights.
LLAMA = llama(hidden=2048, ffn=5632, heads=32, kv_heads=4, layers=6, vocabulary=32000, positions=4096)
# Of 8 million: a step takes milliseconds on several devices that share two cores.
SMALL_LLAMA = llama(hidden=256, ffn=688, heads=8, kv_heads=4, layers=6, vocabulary=4000, positions=1024)


def find_shape(name_or_path: str) -> Shape:
    """The shape of this name, or of a config.json. Raises BadCheckpoint, BadSetting or UnsupportedArchitecture."""
    if name_or_path.endswith(".json"):
        path = Path(name_or_path)
        config = read_json_object(path)
        kind = str(config.get("model_type", "missing"))
        if kind not in FAMILIES:
            raise UnsupportedArchitecture(architecture=kind, supported=", ".join(FAMILIES))
        family = FAMILIES[kind]
        for field in family.config.values():
            if field not in family.defaults and not isinstance(config.get(field), (int, str)):
                raise BadSetting(setting=f"models: {path}", reason=f"the field {field} is missing")
        return Shape(model_name(path.parent if path.stem == "config" else path.with_suffix(""), config), config)
    if name_or_path not in SHAPES:
        reason = f"'{name_or_path}' is neither a config.json nor one of {', '.join(SHAPES)}"
        raise BadSetting(setting="models", reason=reason)
    return SHAPES[name_or_path]


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
