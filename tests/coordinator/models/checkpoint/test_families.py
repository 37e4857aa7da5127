"""Every family against transformers: config, tensor names, fused and transposed tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import CONFIGS, HEADS, as_stored, reassembled, write_model

from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.families import FAMILIES, TensorSource, read_spec
from coordinator.models.checkpoint.sharding import build_manifest
from hearth.errors import BadCheckpoint, UnsupportedArchitecture
from hearth.plan.model_spec import RotarySpec

DECODERS = [family for family in FAMILIES if FAMILIES[family].facts.get("causal")]

# ---- against transformers --------------------------------------------------------------------------------------------

_SIZES = {
    "hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 100, "vocab_size": 1500,
    "max_position_embeddings": 40,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_GPT2 = {"n_embd": 48, "n_head": 6, "n_layer": 2, "vocab_size": 1500, "n_positions": 40}
_OPT = {**_SIZES, "ffn_dim": 100, "word_embed_proj_dim": 48}
_DISTILBERT = {"dim": 48, "n_heads": 6, "n_layers": 2, "hidden_dim": 100, "vocab_size": 1500}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("bert", _SIZES),
    ("distilbert", _DISTILBERT),
    ("gpt2", _GPT2),
    ("gpt2", {**_GPT2, "n_inner": 100, "tie_word_embeddings": False, "activation_function": "gelu"}),
    ("opt", _OPT),
    ("opt", {**_OPT, "enable_bias": False, "tie_word_embeddings": False}),
    ("llama", _GROUPED),
    ("llama", {**_SIZES, "tie_word_embeddings": True}),
    ("llama", {**_GROUPED, "attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    ("mistral", _GROUPED),
    ("mistral", {**_GROUPED, "head_dim": 12, "sliding_window": None, "tie_word_embeddings": True}),
    ("qwen2", _GROUPED),
    ("qwen2", {**_GROUPED, "tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {**_GROUPED, "head_dim": 16}),
    ("qwen3", {**_GROUPED, "head_dim": 10, "attention_bias": True, "tie_word_embeddings": True}),
]
_PREFIXES = {"bert": "", "distilbert": "", "gpt2": "transformer."}  # of a causal model; "model." for other families


def random_model(family: str, settings: dict[str, Any]) -> Any:
    """A model of transformers with all weights random, biases and norm gains included."""
    torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings)
    if family == "bert":
        model = AutoModel.from_config(config, add_pooling_layer=False)
    else:
        model = (AutoModelForCausalLM if family in DECODERS else AutoModel).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def weights_of(model: Any) -> dict[str, np.ndarray]:
    """The state dict without a tied head, which is no separate weight."""
    tied = model.config.tie_word_embeddings
    return {
        name: tensor.numpy() for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")
    }


@pytest.mark.parametrize("num_files", ["one", "several"])
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_all_chunks_together_equal_the_models_weights(
    family: str, settings: dict[str, Any], num_files: str, tmp_path: Path
) -> None:
    model = random_model(family, settings)
    model.save_pretrained(tmp_path, max_shard_size="100KB" if num_files == "several" else "5GB")
    assert (tmp_path / "model.safetensors").exists() == (num_files == "one")
    spec = read_spec(tmp_path)
    assert spec.has_separate_head == (family in DECODERS and not model.config.tie_word_embeddings)
    expected = weights_of(model)
    checkpoint = Checkpoint(tmp_path)
    found = as_stored(family, reassembled(checkpoint, spec), _PREFIXES.get(family, "model."))
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


@pytest.mark.parametrize("family", DECODERS)
def test_base_model_without_head_has_the_same_chunks(family: str, tmp_path: Path) -> None:
    settings = {**next(settings for name, settings in CASES if name == family), "tie_word_embeddings": True}
    model = random_model(family, settings)
    model.save_pretrained(tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "base")
    refs = []
    for directory in (tmp_path / "whole", tmp_path / "base"):
        checkpoint = Checkpoint(directory)
        names = checkpoint.names()
        refs.append(build_manifest(checkpoint, read_spec(directory)))
    assert not any(name.startswith(_PREFIXES.get(family, "model.")) for name in names)
    assert refs[0] == refs[1]


def test_missing_head_is_named(tmp_path: Path) -> None:
    random_model("llama", _GROUPED).base_model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight is missing"):
        build_manifest(checkpoint, read_spec(tmp_path))


def test_half_precision_is_kept(tmp_path: Path) -> None:
    model = random_model("gpt2", _GPT2).half()
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert spec.dtype == "float16"
    checkpoint = Checkpoint(tmp_path)
    found = as_stored("gpt2", reassembled(checkpoint, spec), "transformer.")
    for name, array in weights_of(model).items():
        assert found[name].dtype == np.float16
        assert np.array_equal(found[name], array), name


# ---- configs ---------------------------------------------------------------------------------------------------------

_BASE = {
    "causal": True, "norm": "layer", "norm_place": "pre", "gated": False, "qkv_bias": True, "out_bias": True,
    "mlp_bias": True, "qk_norm": False, "position_offset": 0, "rotary": None, "sliding_window": None,
    "full_attention_layers": 0, "tied_head": True, "type_vocab_size": 0, "norm_eps": 1e-5, "activation": "gelu_new",
    "ffn_size": 130, "max_positions": 16, "vocab_size": 2500, "num_layers": 2,
}  # fmt: skip
_LLAMA = {
    **_BASE, "norm": "rms", "gated": True, "qkv_bias": False, "out_bias": False, "mlp_bias": False,
    "rotary": RotarySpec(), "norm_eps": 1e-6, "activation": "silu",
}  # fmt: skip
FACTS = {
    "gpt2": _BASE,
    "opt": {**_BASE, "position_offset": 2, "activation": "relu"},
    "llama": {**_LLAMA, "tied_head": False},
    "mistral": {**_LLAMA, "tied_head": False},
    "qwen2": {**_LLAMA, "qkv_bias": True},
    "qwen3": {**_LLAMA, "qk_norm": True},
}


@pytest.mark.parametrize("family", DECODERS)
def test_architecture_of_each_family(family: str, tmp_path: Path) -> None:
    spec = read_spec(write_model(tmp_path, family))
    assert {name: getattr(spec, name) for name in FACTS[family]} == FACTS[family]
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == HEADS[family]


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("gpt2", {"n_inner": None}, {"ffn_size": 96}),
        ("gpt2", {"n_inner": ...}, {"ffn_size": 96}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, {"activation": "gelu_new"}),
        ("opt", {"word_embed_proj_dim": ...}, {"hidden_size": 24}),
        ("opt", {"enable_bias": False}, {"qkv_bias": False, "out_bias": False, "mlp_bias": False}),
        ("llama", {"num_key_value_heads": ...}, {"num_kv_heads": 4}),
        ("llama", {"num_key_value_heads": None, "head_dim": None}, {"num_kv_heads": 4, "head_dim": 6}),
        ("llama", {"head_dim": 16}, {"head_dim": 16}),
        ("llama", {"attention_bias": True}, {"qkv_bias": True, "out_bias": True, "mlp_bias": False}),
        ("llama", {"mlp_bias": True}, {"qkv_bias": False, "out_bias": False, "mlp_bias": True}),
        ("llama", {"hidden_act": "swish", "rms_norm_eps": 1e-5}, {"activation": "silu", "norm_eps": 1e-5}),
        ("llama", {"rope_theta": 5e5}, {"rotary": RotarySpec(theta=5e5)}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
            {"rotary": RotarySpec(kind="linear", theta=5e5, factor=2.0)},
        ),
        ("qwen3", {"head_dim": ...}, {"head_dim": 128}),
        ("qwen3", {"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ("mistral", {"sliding_window": ...}, {"sliding_window": 4096}),
        ("mistral", {"sliding_window": 8}, {"sliding_window": 8, "full_attention_layers": 0}),
        ("mistral", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, {"sliding_window": None}),  # from layer 28
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            {"sliding_window": 8, "full_attention_layers": 1},
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            {"sliding_window": 8, "full_attention_layers": 1},
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
            {"sliding_window": 8, "full_attention_layers": 0},
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2},
            {"sliding_window": None, "full_attention_layers": 0},
        ),
    ],
)  # fmt: skip
def test_config_fields_are_read(family: str, changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    spec = read_spec(write_model(tmp_path, family, **changes))
    assert {name: getattr(spec, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("gpt2", {"scale_attn_weights": False}, "gpt2 with scale_attn_weights=False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"activation_function": "tanh"}, "gpt2 with the activation tanh.*Supported: gelu, .*silu"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("opt", {"word_embed_proj_dim": 12}, "opt with word_embed_proj_dim=12.*Supported: opt with .*=24"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.*gptq"),
        ("llama", {"rope_scaling": {"type": "mrope"}}, "llama with rope_type=mrope"),
        ("llama", {"partial_rotary_factor": 0.5, "head_dim": 8}, "partial_rotary_factor=0.5"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "mistral with layer_types"),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            "qwen3 with layer_types=.*full_attention, then sliding_attention",
        ),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)  # fmt: skip
def test_unsupported_configs_are_rejected(family: str, changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=match):
        read_spec(write_model(tmp_path, family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("gpt2", {"n_embd": ...}, "the field n_embd is missing"),
        ("gpt2", {"n_head": 5}, "hidden size 24 cannot be split among 5 heads"),
        ("gpt2", {"n_head": None}, "n_head: None is not a whole number"),
        ("gpt2", {"n_inner": "wide"}, "n_inner: wide is not a whole number"),
        ("gpt2", {"layer_norm_epsilon": 0}, "layer_norm_epsilon"),
        ("opt", {"ffn_dim": ...}, "the field ffn_dim is missing"),
        ("llama", {"num_key_value_heads": 3}, "4 heads cannot be shared among 3"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads"),
        ("llama", {"head_dim": 7}, "7 dimensions of a head"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ("llama", {"tie_word_embeddings": "perhaps"}, "tie_word_embeddings"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("qwen2", {"layer_types": ["full_attention"]}, "one name for each of the 2 layers"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window is in use"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "few"}, "max_window_layers: few"),
    ],
)  # fmt: skip
def test_invalid_config_is_named(family: str, changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=rf"config\.json.*{match}"):
        read_spec(write_model(tmp_path, family, **changes))


def test_every_family_has_a_test_config() -> None:
    assert set(CONFIGS) == set(HEADS) == set(FAMILIES) == {family for family, _ in CASES}


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_parts_of_fused_and_transposed_tensors_are_found() -> None:
    stored = np.arange(4 * 18).reshape(4, 18)
    source = TensorSource("attn.c_attn", part=(1, 3), transposed=True)
    ours = stored[:, 6:12].T
    assert source.stored_shape(ours.shape) == stored.shape
    for place in (np.s_[:,], np.s_[2:5,], np.s_[:, 1:3], np.s_[2:5, 1:3]):
        assert np.array_equal(stored[source.region(ours.shape, place)].T, ours[place])
    assert source.stored_shape((6,)) == (18,)
    assert source.region((6,), np.s_[2:5,]) == np.s_[8:11,]


def test_stored_head_is_ignored_if_tied(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    directory = write_model(tmp_path, "qwen2", prefix="model.")
    checkpoint = Checkpoint(directory)
    before = build_manifest(checkpoint, read_spec(directory))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, path)
    checkpoint = Checkpoint(directory)
    assert build_manifest(checkpoint, read_spec(directory)) == before
    (directory / "config.json").write_text(json.dumps({**CONFIGS["qwen2"], "tie_word_embeddings": False}))
    checkpoint = Checkpoint(directory)
    assert "head" in {ref.kind for ref in build_manifest(checkpoint, read_spec(directory))}
