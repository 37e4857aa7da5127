"""Small checkpoints written without torch, so that slicing is tested on every Python.

Tensor names are repeated here, apart from `coordinator.models.checkpoint.families`: a wrong name there fails a test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save_file

from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.chunk_layout import all_chunks
from coordinator.models.checkpoint.sharding import chunk_bytes
from hearth.plan.model_spec import ModelSpec

H, FFN, VOCAB, POSITIONS, LAYERS = 24, 130, 2500, 16, 2
# Query heads, key and value heads, head_dim.
HEADS = {
    "bert": (3, 3, 8), "distilbert": (3, 3, 8), "gpt2": (3, 3, 8), "opt": (3, 3, 8), "llama": (4, 2, 6),
    "mistral": (4, 2, 8), "qwen2": (4, 2, 6), "qwen3": (4, 2, 10),
}  # fmt: skip


def _llama_like(family: str, **more: Any) -> dict[str, Any]:
    heads, kv_heads, _ = HEADS[family]
    return {
        "model_type": family, "num_hidden_layers": LAYERS, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "hidden_size": H, "intermediate_size": FFN, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", **more,
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert", "num_hidden_layers": LAYERS, "num_attention_heads": 3, "hidden_size": H,
        "intermediate_size": FFN, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    },
    "distilbert": {
        "model_type": "distilbert", "n_layers": LAYERS, "n_heads": 3, "dim": H, "hidden_dim": FFN,
        "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "activation": "gelu",
    },
    "gpt2": {
        "model_type": "gpt2", "n_layer": LAYERS, "n_head": 3, "n_embd": H, "n_inner": FFN, "vocab_size": VOCAB,
        "n_positions": POSITIONS,
    },
    "opt": {
        "model_type": "opt", "num_hidden_layers": LAYERS, "num_attention_heads": 3, "hidden_size": H, "ffn_dim": FFN,
        "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "word_embed_proj_dim": H,
    },
    "llama": _llama_like("llama"),
    "mistral": _llama_like("mistral", head_dim=8, sliding_window=None),
    "qwen2": _llama_like("qwen2", tie_word_embeddings=True),
    "qwen3": _llama_like("qwen3", head_dim=10, tie_word_embeddings=True),
}  # fmt: skip

_LLAMA_NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj", "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
    "word": "embed_tokens", "final": "norm",
}  # fmt: skip
_NAMES = {
    "bert": {
        "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
        "o": "attention.output.dense", "norm1": "attention.output.LayerNorm", "up": "intermediate.dense",
        "down": "output.dense", "norm2": "output.LayerNorm", "word": "embeddings.word_embeddings",
        "position": "embeddings.position_embeddings", "type": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
    },
    "distilbert": {
        "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin", "o": "attention.out_lin",
        "norm1": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2", "norm2": "output_layer_norm",
        "word": "embeddings.word_embeddings", "position": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm",
    },
    "gpt2": {
        "qkv": "attn.c_attn", "o": "attn.c_proj", "norm1": "ln_1", "up": "mlp.c_fc", "down": "mlp.c_proj",
        "norm2": "ln_2", "word": "wte", "position": "wpe", "final": "ln_f",
    },
    "opt": {
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj",
        "norm1": "self_attn_layer_norm", "up": "fc1", "down": "fc2", "norm2": "final_layer_norm",
        "word": "decoder.embed_tokens", "position": "decoder.embed_positions", "final": "decoder.final_layer_norm",
    },
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA_NAMES),
}  # fmt: skip
_LAYER_PREFIXES = {
    "bert": "encoder.layer.{}.", "distilbert": "transformer.layer.{}.", "gpt2": "h.{}.", "opt": "decoder.layers.{}.",
}  # fmt: skip
_LAYER_NORM = ("bert", "distilbert", "gpt2", "opt")  # these have biases everywhere; the others have RMS norms


def canonical_tensors(family: str, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Every tensor of a small model, random, under Hearth's names: `1.q.weight`, `word.weight`."""
    heads, kv_heads, d = HEADS[family]
    q, kv = heads * d, kv_heads * d
    biases = ("q", "k", "v", "o", "up", "down") if family in _LAYER_NORM else ("q", "k", "v") * (family == "qwen2")
    norm_kinds = ("weight", "bias") if family in _LAYER_NORM else ("weight",)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        matrices = {"q": (q, H), "k": (kv, H), "v": (kv, H), "o": (H, q), "up": (FFN, H), "down": (H, FFN)}
        if family not in _LAYER_NORM:
            matrices["gate"] = (FFN, H)
        for part, shape in matrices.items():
            shapes[f"{layer}.{part}.weight"] = shape
            if part in biases:
                shapes[f"{layer}.{part}.bias"] = shape[:1]
        shapes.update({f"{layer}.{norm}.{kind}": (H,) for norm in ("norm1", "norm2") for kind in norm_kinds})
        if family == "qwen3":
            shapes.update({f"{layer}.{norm}.weight": (d,) for norm in ("q_norm", "k_norm")})
    shapes["word.weight"] = (VOCAB, H)
    if family in _LAYER_NORM:
        shapes["position.weight"] = (POSITIONS + 2 * (family == "opt"), H)
    if family == "bert":
        shapes["type.weight"] = (2, H)
    if family in ("llama", "mistral"):
        shapes["head.weight"] = (VOCAB, H)
    norm = "norm" if family in ("bert", "distilbert") else "final"
    shapes.update({f"{norm}.{kind}": (H,) for kind in norm_kinds})
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def as_stored(family: str, canonical: Mapping[str, np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
    """The tensors under the names and in the layout of the family's checkpoints."""
    stored = {}
    for name, array in (_as_conv1d(canonical) if family == "gpt2" else canonical).items():
        *layer, part, kind = name.split(".")
        before = prefix + (_LAYER_PREFIXES.get(family, "layers.{}.").format(*layer) if layer else "")
        stored["lm_head.weight" if part == "head" else f"{before}{_NAMES[family][part]}.{kind}"] = array
    return {name: np.ascontiguousarray(array) for name, array in stored.items()}


def _as_conv1d(canonical: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GPT-2's layers store Q, K and V in one tensor, and every weight as [in, out]."""
    fused: dict[str, np.ndarray] = {}
    for name, array in canonical.items():
        *layer, part, kind = name.split(".")
        if part == "q":
            array = np.concatenate([canonical[f"{layer[0]}.{each}.{kind}"] for each in "qkv"])
            name = f"{layer[0]}.qkv.{kind}"
        if part not in ("k", "v"):
            fused[name] = array.T if layer else array
    return fused


def stored_tensors(family: str, prefix: str = "", dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Every tensor of a small model, random, under the family's names."""
    return as_stored(family, canonical_tensors(family, dtype), prefix)


def reassembled(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, np.ndarray]:
    """All chunks of a checkpoint joined, under Hearth's names as in `canonical_tensors`."""
    parts: dict[str, list[np.ndarray]] = {}
    for kind, layer, grain in all_chunks(spec):
        before = f"{layer}." if kind in ("qkv", "out", "mlp", "connective") else ""
        for name, array in load(chunk_bytes(checkpoint, spec, kind, layer, grain)).items():
            parts.setdefault(before + name, []).append(array)
    by_column = ("o.weight", "down.weight")
    return {name: np.concatenate(arrays, axis=int(name.endswith(by_column))) for name, arrays in parts.items()}


def write_model(
    directory: Path,
    family: str = "bert",
    prefix: str = "",
    dtype: type = np.float32,
    num_files: int = 1,
    **changes: Any,
) -> Path:
    """A model directory: one safetensors file, or several with an index. `changes` of its config; `...` removes a field."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in {**CONFIGS[family], **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = stored_tensors(family, prefix, dtype)
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
