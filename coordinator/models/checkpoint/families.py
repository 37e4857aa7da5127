"""One table per model family: config fields to `ModelSpec`, and the checkpoint's tensor names. No branches elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.file_kinds import read_json_file
from hearth.errors import BadCheckpoint, UnsupportedArchitecture
from hearth.plan.model_spec import ModelSpec, read_rotary
from hearth.validation import first_error

# (config, our fields read so far) -> more of our fields. Raises ValueError or UnsupportedArchitecture.
ConfigRule = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class TensorSource:
    """Where a checkpoint stores one of our tensors, whose first axis is always the output.

    `part` is (index, of): one of `of` equal parts of a fused tensor along its output axis. `transposed`: stored as
    [in, out]. `prefixed`: the name is preceded by the task head's prefix.
    """

    name: str
    part: tuple[int, int] = (0, 1)
    transposed: bool = False
    prefixed: bool = True

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored tensor, if ours has `shape`."""
        whole = (shape[0] * self.part[1], *shape[1:])
        return whole[::-1] if self.transposed else whole

    def region(self, shape: tuple[int, ...], place: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where the part `place` of our tensor of `shape` is in the stored one. `place`: a slice for each of the first axes."""
        whole = [slice(None)] * (len(shape) - len(place))
        start, stop, _ = place[0].indices(shape[0])
        first = self.part[0] * shape[0]
        region = (slice(first + start, first + stop), *place[1:], *whole)
        return region[::-1] if self.transposed else region


@dataclass(frozen=True)
class Family:
    """The config fields and tensor names of one architecture.

    `config` maps our field to theirs. `facts` are fields that the architecture fixes; `rules` compute fields that do not
    follow from a single one of theirs. `required` are settings of which only one value is supported. `layer` maps our
    tensor to theirs under `layer_prefix` (with `{}` for the layer); `embedding` does so outside the layers. `prefixes` are
    those that task heads put before every name.
    """

    config: Mapping[str, str]
    defaults: Mapping[str, Any]
    prefixes: tuple[str, ...]
    layer_prefix: str
    layer: Mapping[str, str | TensorSource]
    embedding: Mapping[str, str | TensorSource]
    facts: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[ConfigRule, ...] = ()


# ---- rules -----------------------------------------------------------------------------------------------------------


def _gpt2_ffn(config: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("n_inner")
    return {"ffn_size": 4 * values["hidden_size"] if found is None else _require_int("n_inner", found)}


def _opt_equal_widths(config: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse models such as OPT-350m, whose word embedding is narrower than the layers, with projections in between."""
    found, hidden = config.get("word_embed_proj_dim"), values["hidden_size"]
    if found not in (None, hidden):
        raise _unsupported(config, "word_embed_proj_dim", found, hidden)
    return {}


def _rotary(config: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary embedding of whole heads: the transformers library has no partial rotary embedding for these families."""
    rotary = read_rotary(config, values["head_dim"], values["max_positions"])
    if rotary.rotated != 1:
        raise _unsupported(config, "partial_rotary_factor", rotary.rotated, 1.0)
    return {"rotary": rotary}


def _qwen_windows(config: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last layers have a sliding window: from `max_window_layers` on, unless `layer_types` lists the kinds by layer."""
    layers, kinds = values["num_layers"], config.get("layer_types")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if kinds is None:
        first = layers if window is None else _require_int("max_window_layers", config.get("max_window_layers", 28))
        full = min(first, layers)
    elif not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types: {_shortened(kinds)} is not one name for each of the {layers} layers")
    else:
        full = len(list(takewhile(lambda kind: kind in ("full_attention", "attention"), kinds)))
        if any(kind != "sliding_attention" for kind in kinds[full:]):
            raise _unsupported(config, "layer_types", kinds, "full_attention, then sliding_attention to the last layer")
        if full < layers and window is None:
            raise ValueError("layer_types names sliding_attention, but no sliding_window is in use")
    return {"sliding_window": window, "full_attention_layers": full} if full < layers else {}


# The field names in the configs of most architectures.
_USUAL_CONFIG = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "hidden_size": "hidden_size",
    "ffn_size": "intermediate_size", "vocab_size": "vocab_size", "max_positions": "max_position_embeddings",
}  # fmt: skip

# ---- encoders --------------------------------------------------------------------------------------------------------

BERT = Family(
    config={
        **_USUAL_CONFIG,
        "type_vocab_size": "type_vocab_size", "norm_eps": "layer_norm_eps", "activation": "hidden_act",
    },
    defaults={"type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"},
    required={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    prefixes=("", "bert."),
    layer_prefix="encoder.layer.{}.",
    layer={
        "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
        "o": "attention.output.dense", "norm1": "attention.output.LayerNorm",
        "up": "intermediate.dense", "down": "output.dense", "norm2": "output.LayerNorm",
    },
    embedding={
        "word": "embeddings.word_embeddings", "position": "embeddings.position_embeddings",
        "type": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm",
    },
)  # fmt: skip

DISTILBERT = Family(
    config={
        "num_layers": "n_layers", "num_heads": "n_heads", "hidden_size": "dim", "ffn_size": "hidden_dim",
        "vocab_size": "vocab_size", "max_positions": "max_position_embeddings", "activation": "activation",
    },
    defaults={"activation": "gelu"},
    facts={"type_vocab_size": 0, "norm_eps": 1e-12},
    prefixes=("", "distilbert."),
    layer_prefix="transformer.layer.{}.",
    layer={
        "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin",
        "o": "attention.out_lin", "norm1": "sa_layer_norm",
        "up": "ffn.lin1", "down": "ffn.lin2", "norm2": "output_layer_norm",
    },
    embedding={
        "word": "embeddings.word_embeddings", "position": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm",
    },
)  # fmt: skip

# ---- decoders --------------------------------------------------------------------------------------------------------

_DECODER = {"causal": True, "norm_place": "pre", "type_vocab_size": 0}
_HEAD = TensorSource("lm_head", prefixed=False)

GPT2 = Family(
    config={
        "num_layers": "n_layer", "num_heads": "n_head", "hidden_size": "n_embd", "vocab_size": "vocab_size",
        "max_positions": "n_positions", "norm_eps": "layer_norm_epsilon", "activation": "activation_function",
        "tied_head": "tie_word_embeddings",
    },
    defaults={"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
    facts=_DECODER,
    required={
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False, "add_cross_attention": False,
    },
    rules=(_gpt2_ffn,),
    prefixes=("", "transformer."),
    layer_prefix="h.{}.",
    layer={
        "q": TensorSource("attn.c_attn", part=(0, 3), transposed=True),
        "k": TensorSource("attn.c_attn", part=(1, 3), transposed=True),
        "v": TensorSource("attn.c_attn", part=(2, 3), transposed=True),
        "o": TensorSource("attn.c_proj", transposed=True),
        "norm1": "ln_1",
        "up": TensorSource("mlp.c_fc", transposed=True), "down": TensorSource("mlp.c_proj", transposed=True), "norm2": "ln_2",
    },
    embedding={"word": "wte", "position": "wpe", "final": "ln_f", "head": _HEAD},
)  # fmt: skip

OPT = Family(
    config={
        **_USUAL_CONFIG,
        "ffn_size": "ffn_dim", "activation": "activation_function", "tied_head": "tie_word_embeddings",
        "qkv_bias": "enable_bias", "out_bias": "enable_bias", "mlp_bias": "enable_bias",
    },
    defaults={"activation_function": "relu", "enable_bias": True, "tie_word_embeddings": True},
    facts={**_DECODER, "norm_eps": 1e-5, "position_offset": 2},
    required={"do_layer_norm_before": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
    rules=(_opt_equal_widths,),
    prefixes=("", "model."),
    layer_prefix="decoder.layers.{}.",
    layer={
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.out_proj", "norm1": "self_attn_layer_norm",
        "up": "fc1", "down": "fc2", "norm2": "final_layer_norm",
    },
    embedding={
        "word": "decoder.embed_tokens", "position": "decoder.embed_positions", "final": "decoder.final_layer_norm",
        "head": _HEAD,
    },
)  # fmt: skip

_LLAMA_CONFIG = {
    **_USUAL_CONFIG,
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "norm_eps": "rms_norm_eps",
    "activation": "hidden_act", "tied_head": "tie_word_embeddings",
}  # fmt: skip
_LLAMA_DEFAULTS = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_LLAMA_FACTS = {**_DECODER, "norm": "rms", "gated": True}

LLAMA = Family(
    config={**_LLAMA_CONFIG, "qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    defaults=_LLAMA_DEFAULTS,
    facts=_LLAMA_FACTS,
    required={"pretraining_tp": 1},
    rules=(_rotary,),
    prefixes=("", "model."),
    layer_prefix="layers.{}.",
    layer={
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "norm1": "input_layernorm",
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "norm2": "post_attention_layernorm",
    },
    embedding={"word": "embed_tokens", "final": "norm", "head": _HEAD},
)  # fmt: skip

MISTRAL = replace(
    LLAMA,
    config={**_LLAMA_CONFIG, "sliding_window": "sliding_window"},
    defaults={**_LLAMA_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
    facts={**_LLAMA_FACTS, "qkv_bias": False, "out_bias": False, "mlp_bias": False},
    required={"layer_types": None},  # set by later models that were published under this model type
)

QWEN2 = replace(
    LLAMA,
    config=_LLAMA_CONFIG,
    defaults={**_LLAMA_DEFAULTS, "num_key_value_heads": 32},
    facts={**_LLAMA_FACTS, "qkv_bias": True, "out_bias": False, "mlp_bias": False},
    required={},
    rules=(_rotary, _qwen_windows),
)

QWEN3 = replace(
    QWEN2,
    config={**_LLAMA_CONFIG, "qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    defaults={**_LLAMA_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
    facts={**_LLAMA_FACTS, "mlp_bias": False, "qk_norm": True},
    layer={**LLAMA.layer, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},
)

FAMILIES: Mapping[str, Family] = {
    "bert": BERT, "distilbert": DISTILBERT, "gpt2": GPT2, "opt": OPT,
    "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3,
}  # fmt: skip
_REQUIRED = {"quantization_config": None}  # for every family
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new",
    "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_spec(model_dir: Path) -> ModelSpec:
    """The spec of a model directory. Raises BadCheckpoint or UnsupportedArchitecture."""
    path = model_dir / "config.json"
    config = read_json_object(path)
    name = str(config.get("model_type", "missing"))
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedArchitecture(architecture=name, supported=", ".join(FAMILIES))
    for setting, only in {**_REQUIRED, **family.required}.items():
        if config.get(setting) not in (None, only):
            raise _unsupported(config, setting, config[setting], only)
    try:
        values = _spec_fields(family, config)
        checkpoint = Checkpoint(model_dir)
        dtype = checkpoint.dtype(TensorNames(family, checkpoint).layer(0, "q.weight").name)
        return ModelSpec(name=model_name(model_dir, config), family=name, dtype=dtype, **values)
    except ValidationError as error:
        raise BadCheckpoint(path=str(path), reason=first_error(error, "the config", family.config)) from None
    except ValueError as error:
        raise BadCheckpoint(path=str(path), reason=str(error)) from None


def _spec_fields(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelSpec` from a config. Raises ValueError or UnsupportedArchitecture."""
    values = dict(family.facts)
    for ours, theirs in family.config.items():
        if theirs not in config and theirs not in family.defaults:
            raise ValueError(f"the field {theirs} is missing")
        value = config.get(theirs, family.defaults.get(theirs))
        by_rule = value is None and ours in ("num_kv_heads", "head_dim")
        is_whole = ModelSpec.model_fields[ours].annotation is int and not by_rule
        values[ours] = _require_int(theirs, value) if is_whole else value
    activation = values["activation"]
    if activation not in _ACTIVATIONS:
        raise UnsupportedArchitecture(
            architecture=f"{config['model_type']} with the activation {activation}", supported=", ".join(_ACTIVATIONS)
        )
    values["activation"] = _ACTIVATIONS[activation]
    heads, hidden = values["num_heads"], values["hidden_size"]
    if values.get("num_kv_heads") is None:
        values["num_kv_heads"] = heads
    if values.get("head_dim") is None:
        if heads < 1 or hidden % heads:
            raise ValueError(f"hidden size {hidden} cannot be split among {heads} heads")
        values["head_dim"] = hidden // heads
    for rule in family.rules:
        values.update(rule(config, values))
    return values


def _require_int(name: str, value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{name}: {_shortened(value)} is not a whole number")
    return value


def _unsupported(config: Mapping[str, Any], setting: str, found: Any, only: Any) -> UnsupportedArchitecture:
    name = config["model_type"]
    return UnsupportedArchitecture(
        architecture=f"{name} with {setting}={_shortened(found)}", supported=f"{name} with {setting}={only}"
    )


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


class TensorNames:
    """The names of a family's tensors in one checkpoint, including the prefix of its task head."""

    def __init__(self, family: Family, checkpoint: Checkpoint) -> None:
        self._family = family
        probe = f"{_source(family.embedding['word']).name}.weight"
        present = [prefix for prefix in family.prefixes if prefix + probe in checkpoint]
        if not present:
            raise BadCheckpoint(path=str(checkpoint.path), reason=f"the tensor {probe} is missing")
        self._prefix = present[0]

    def layer(self, index: int, tensor: str) -> TensorSource:
        """The source of a layer's tensor. `tensor` is our name, such as `q.weight`; the source has the full name."""
        return self._full(self._family.layer, self._family.layer_prefix.format(index), tensor)

    def embedding(self, tensor: str) -> TensorSource:
        return self._full(self._family.embedding, "", tensor)

    def _full(self, table: Mapping[str, str | TensorSource], before: str, tensor: str) -> TensorSource:
        part, _, kind = tensor.partition(".")
        source = _source(table[part])
        prefix = self._prefix if source.prefixed else ""
        return replace(source, name=f"{prefix}{before}{source.name}.{kind}")


def _source(entry: str | TensorSource) -> TensorSource:
    return TensorSource(entry) if isinstance(entry, str) else entry


def read_json_object(path: Path, model_dir: Path | None = None) -> dict[str, Any]:
    """Read a JSON object from a file of a model, in `model_dir` or a folder below it. Raises BadCheckpoint."""
    folder = model_dir or path.parent
    value = read_json_file(path, lambda reason: BadCheckpoint(path=str(path), reason=f"it {reason}"), folder)
    if not isinstance(value, dict):
        raise BadCheckpoint(path=str(path), reason="it does not hold a JSON object")
    return value


def model_name(model_dir: Path, config: Mapping[str, Any]) -> str:
    """The name shown to users: the last part of the name under which it was published, or else its directory's name."""
    published = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    return (published or model_dir.resolve().name)[:256]


def read_pooling(model_dir: Path) -> Literal["mean"]:
    """`mean`, if the model asks for it or has no pooling configuration. Raises UnsupportedArchitecture otherwise."""
    path = model_dir / "1_Pooling" / "config.json"
    if path.exists():
        config = read_json_object(path, model_dir)
        other = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
        if other != ["pooling_mode_mean_tokens"]:
            raise UnsupportedArchitecture(
                architecture=f"pooling by {', '.join(other) or 'nothing'}", supported="pooling_mode_mean_tokens"
            )
    return "mean"
