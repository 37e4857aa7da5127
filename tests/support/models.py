"""Models for tests: random weights at a given shape, with every bias and norm gain randomised.

A fresh `transformers` model has zero biases and gains of exactly 1: a bias added on every device would not be noticed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.models.checkpoint.families import read_spec
from hearth.plan.model_spec import ModelSpec, WeightFormat

FAMILIES = ("gpt2", "opt", "llama", "qwen2", "qwen3", "mistral")  # of decoders
# Largest relative errors of products, in the Euclidean norm, by weight format. bfloat16 has 8 significant bits; int8 has 7 bits
# below the largest weight of a normal distribution.
FORMAT_ERRORS: dict[WeightFormat, float] = {
    "float32": 1e-6, "float16": 1e-3, "bfloat16": 5e-3, "int8": 1.5e-2, "int4": 0.1,
}  # fmt: skip


def save_random_model(
    directory: Path, config: Any, seed: int = 0, max_shard_size: str = "5GB", generates: bool = False
) -> Path:
    """Build, randomise and save a model as safetensors; with its output head if it `generates`."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = (AutoModelForCausalLM if generates else AutoModel).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name.lower() or ".ln_" in name:
                parameter.normal_(1, 0.2)
    model.save_pretrained(directory, safe_serialization=True, max_shard_size=max_shard_size)
    del model
    gc.freeze()  # no collection looks again at what `transformers` has just imported: 0.2 s each time
    return directory


def small_bert(**changes: Any) -> Any:
    """Six heads and 5 MLP grains (the last one short), so that uneven splits over five devices exist."""
    from transformers import BertConfig

    shape = {
        "hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 300,
        "vocab_size": 3000, "max_position_embeddings": 64,
    }  # fmt: skip
    return BertConfig(**{**shape, **changes})


def small_distilbert() -> Any:
    from transformers import DistilBertConfig

    return DistilBertConfig(dim=96, n_heads=6, n_layers=2, hidden_dim=300, vocab_size=3000, max_position_embeddings=64)


def small_decoder(family: str, **changes: Any) -> Any:
    """Six heads, in three KV groups if the family has groups; odd sizes; three layers."""
    from transformers import AutoConfig

    common = {"vocab_size": 3000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    llama = {
        **common, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3,
        "intermediate_size": 300, "max_position_embeddings": 640,
    }  # fmt: skip
    shapes: dict[str, dict[str, Any]] = {
        "gpt2": {**common, "n_embd": 96, "n_head": 6, "n_layer": 3, "n_positions": 640},
        "opt": {
            **common, "hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 3, "ffn_dim": 300,
            "max_position_embeddings": 640, "word_embed_proj_dim": 96,
        },
        "llama": llama,
        "qwen2": llama,
        "qwen3": {**llama, "head_dim": 32},
        "mistral": {**llama, "sliding_window": 48, "head_dim": 16},
    }  # fmt: skip
    return AutoConfig.for_model(family, **{**shapes[family], **changes})


def decoder_maker(
    factory: pytest.TempPathFactory, num_layers: int | None = None
) -> Callable[[str], tuple[Path, ModelSpec]]:
    """Makes a small decoder of a family, once: its directory and its spec."""

    @cache
    def model(family: str) -> tuple[Path, ModelSpec]:
        depth = {} if num_layers is None else {"n_layer" if family == "gpt2" else "num_hidden_layers": num_layers}
        directory = save_random_model(factory.mktemp(family), small_decoder(family, **depth), generates=True)
        return directory, read_spec(directory)

    return model


def endless_decoder(**changes: Any) -> Any:
    """A Llama without an end token, which random weights would generate anywhere: answers have their full length."""
    return small_decoder("llama", eos_token_id=None, **changes)


def minilm() -> Path:
    """MiniLM's real weights, which `make test` downloads; the test is skipped without them."""
    path = Path(__file__).parents[2] / ".models" / "minilm"
    if not (path / "model.safetensors").exists():
        pytest.skip("the model of `make test` is not here (.models/minilm)")
    return path


def prompts_of(spec: ModelSpec, *lengths: int) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(3, spec.vocab_size, length).tolist() for length in lengths]
