"""Comparison of all ranks of a plan with `transformers` on one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from support.engines import EngineCluster, GenerationCluster
from support.models import prompts_of
from support.reference import decoder, greedy


def check_greedy_answers(cluster: EngineCluster, model_dir: Path, lengths: Sequence[int], num_tokens: int) -> None:
    """Answer random prompts of these lengths, all at once, and compare the answers with those of `transformers`."""
    prompts = prompts_of(cluster.plan.model, *lengths)
    expected = [greedy(model_dir, prompt, num_tokens) for prompt in prompts]
    assert GenerationCluster(cluster).answer(prompts, num_tokens) == expected
    assert (cluster.executors[0].num_sequences, cluster.executors[0].num_in_flight) == (0, 0)


def check_logits(cluster: EngineCluster, model_dir: Path, tolerance: float = 1e-3) -> None:
    """Compare the logits after all tokens of some sequences with those of `transformers`."""
    sequences = prompts_of(cluster.plan.model, 1, 29, 130)
    hidden, _ = cluster.run(sequences)
    model = decoder(model_dir)
    with torch.inference_mode():
        logits = model.get_output_embeddings()(torch.from_numpy(hidden))
        expected = torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences])
    assert (logits - expected).abs().max() < tolerance


def quantised_error(cluster: EngineCluster, model_dir: Path) -> float:
    """The relative error of hidden states against those of `transformers` with the weights as they are."""
    (prompt,) = prompts_of(cluster.plan.model, 60)
    hidden, _ = cluster.run([prompt])
    (answer,) = GenerationCluster(cluster).answer([prompt], 12)
    assert len(answer) == 12
    with torch.inference_mode():
        expected = decoder(model_dir).base_model(torch.tensor([prompt])).last_hidden_state[0].numpy()
    return float(np.linalg.norm(hidden - expected) / np.linalg.norm(expected))
