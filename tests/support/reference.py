"""Results of `transformers` on one device, cached, since many tests compare with the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

torch.set_num_threads(1)  # more threads do not speed up small models and take cores from others


@lru_cache(maxsize=8)
def decoder(model_dir: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # random weights would generate the end token
    return model


@lru_cache(maxsize=8)
def encoder(model_dir: Path) -> Any:
    return transformers.AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()


def greedy(model_dir: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy `count` tokens after a prompt."""
    return list(_greedy(model_dir, tuple(prompt), count))


def hidden_states(model_dir: Path, sequences: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Last hidden states [T,H] of each sequence alone, one after another."""
    return np.concatenate([_hidden_states(model_dir, tuple(ids)) for ids in sequences])


@cache
def _greedy(model_dir: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    with torch.inference_mode():
        ids = decoder(model_dir).generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count, do_sample=False,
        )  # fmt: skip
    return tuple(ids[0, len(prompt) :].tolist())


@cache
def _hidden_states(model_dir: Path, ids: tuple[int, ...]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        rows: np.ndarray[Any, Any] = encoder(model_dir)(torch.tensor([ids])).last_hidden_state[0].numpy()
    return rows
