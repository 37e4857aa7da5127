"""One table per model family: config fields to `ModelSpec`, and the checkpoint's tensor names. No branches elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hearth.errors import BadCheckpoint, UnsupportedArchitecture
from hearth.model.checkpoint import Checkpoint
from hearth.model.spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """How one architecture writes its config and names its tensors.

    `config` maps our field to theirs; `layer` our tensor to theirs under `layer_prefix` (with `{}` for the layer);
    `embedding` likewise. `prefixes` are what task heads put before every name. `required` are settings that only have
    one value we can compute.
    """

    config: Mapping[str, str]
    defaults: Mapping[str, Any]
    required: Mapping[str, Any]
    prefixes: tuple[str, ...]
    layer_prefix: str
    layer: Mapping[str, str]
    embedding: Mapping[str, str]


BERT = Family(
    config={
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "hidden_size": "hidden_size",
        "ffn_size": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_positions": "max_position_embeddings",
        "type_vocab_size": "type_vocab_size",
        "norm_eps": "layer_norm_eps",
        "activation": "hidden_act",
    },
    defaults={"type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"},
    required={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    prefixes=("", "bert."),
    layer_prefix="encoder.layer.{}.",
    layer={
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "o": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm2": "output.LayerNorm",
    },
    embedding={
        "word": "embeddings.word_embeddings",
        "position": "embeddings.position_embeddings",
        "type": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
    },
)

DISTILBERT = Family(
    config={
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "hidden_size": "dim",
        "ffn_size": "hidden_dim",
        "vocab_size": "vocab_size",
        "max_positions": "max_position_embeddings",
        "activation": "activation",
    },
    defaults={"activation": "gelu"},
    required={},
    prefixes=("", "distilbert."),
    layer_prefix="transformer.layer.{}.",
    layer={
        "q": "attention.q_lin",
        "k": "attention.k_lin",
        "v": "attention.v_lin",
        "o": "attention.out_lin",
        "norm1": "sa_layer_norm",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
        "norm2": "output_layer_norm",
    },
    embedding={
        "word": "embeddings.word_embeddings",
        "position": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm",
    },
)

FAMILIES: Mapping[str, Family] = {"bert": BERT, "distilbert": DISTILBERT}
# What a config need not name because the architecture fixes it.
_FIXED: Mapping[str, Mapping[str, Any]] = {"distilbert": {"type_vocab_size": 0, "norm_eps": 1e-12}}
_ACTIVATIONS = ("gelu", "gelu_new", "relu")


def read_spec(model_dir: Path) -> ModelSpec:
    """The spec of a model directory. Raises BadCheckpoint or UnsupportedArchitecture."""
    path = model_dir / "config.json"
    config = read_json(path)
    family_name = str(config.get("model_type", "missing"))
    family = FAMILIES.get(family_name)
    if family is None:
        raise UnsupportedArchitecture(architecture=family_name, supported=", ".join(FAMILIES))
    for field, only in family.required.items():
        if config.get(field, only) != only:
            raise UnsupportedArchitecture(
                architecture=f"{family_name} with {field}={config[field]}",
                supported=f"{family_name} with {field}={only}",
            )
    values: dict[str, Any] = dict(_FIXED.get(family_name, {}))
    for ours, theirs in family.config.items():
        if theirs in config:
            values[ours] = config[theirs]
        elif theirs in family.defaults:
            values[ours] = family.defaults[theirs]
        else:
            raise BadCheckpoint(path=str(path), reason=f"the field {theirs} is missing")
    if values["activation"] not in _ACTIVATIONS:
        raise UnsupportedArchitecture(
            architecture=f"{family_name} with the activation {values['activation']}",
            supported=", ".join(_ACTIVATIONS),
        )
    heads, hidden = values["num_heads"], values["hidden_size"]
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1 or hidden % heads:
        raise BadCheckpoint(path=str(path), reason=f"hidden size {hidden} cannot be split among {heads} heads")
    with Checkpoint(model_dir) as checkpoint:
        names = TensorNames(family, checkpoint)
        dtype = checkpoint.dtype(names.layer(0, "q.weight"))
    try:
        return ModelSpec(
            name=model_name(model_dir, config),
            family=family_name,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            dtype=dtype,
            **values,
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = family.config.get(str(first["loc"][0]), str(first["loc"][0]))
        raise BadCheckpoint(path=str(path), reason=f"{field}: {first['msg']}") from None


class TensorNames:
    """The names of a family's tensors in one checkpoint, with the prefix that its task head gave them."""

    def __init__(self, family: Family, checkpoint: Checkpoint) -> None:
        self._family = family
        probe = family.embedding["word"] + ".weight"
        present = [prefix for prefix in family.prefixes if prefix + probe in checkpoint]
        if not present:
            raise BadCheckpoint(path=str(checkpoint.path), reason=f"the tensor {probe} is missing")
        self._prefix = present[0]

    def layer(self, index: int, tensor: str) -> str:
        """`tensor` is ours, such as `q.weight`."""
        part, _, kind = tensor.partition(".")
        return f"{self._prefix}{self._family.layer_prefix.format(index)}{self._family.layer[part]}.{kind}"

    def embedding(self, tensor: str) -> str:
        part, _, kind = tensor.partition(".")
        return f"{self._prefix}{self._family.embedding[part]}.{kind}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises BadCheckpoint."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadCheckpoint(path=str(path), reason="there is no such file") from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(path=str(path), reason=f"it is no valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadCheckpoint(path=str(path), reason="it does not hold a JSON object")
    return value


def model_name(model_dir: Path, config: Mapping[str, Any]) -> str:
    """What people call it: the end of the name it was published under, else its directory."""
    published = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    return (published or model_dir.resolve().name)[:256]
