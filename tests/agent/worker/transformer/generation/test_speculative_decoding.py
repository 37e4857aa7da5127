"""Answers are the same with drafted tokens and without: on any number of ranks, in batches, with sampling and preemption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models import save_random_model, small_decoder
from support.plans import make_plan, with_generation
from support.proposers import Remembered

from agent.worker.transformer.generation.drafting import NgramProposer, Proposer
from coordinator.models.checkpoint.families import read_spec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits
from hearth.wire.messages import Sampling

pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.engines import free_speculation, speculative_answers

PROMPTS = [[5, 9, 11] * 6, [7, 8, 21, 40, 8], [5, 9, 11] * 6 + [33], [3]]
SAMPLED = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=4)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("llama"), small_decoder("llama"), generates=True)


def answers(
    model_dir: Path,
    plan: TransformerPlan,
    sampling: Sampling,
    make_proposer: Callable[[], Proposer] = NgramProposer,
    **fields: Any,
) -> tuple[list[list[int]], int, int]:
    return speculative_answers(model_dir, plan, PROMPTS, free_speculation(make_proposer), sampling, **fields)


CASES = [
    ("local", (1,), Sampling()), ("hmp", (1, 0, 2), Sampling()), ("hmp", (1, 1), SAMPLED), ("sp", (1, 1), Sampling()),
    ("pipeline", (1, 1), SAMPLED),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "split", "sampling"), CASES, ids=str)
def test_answers_are_the_same_with_drafts(
    strategy: str, split: tuple[float, ...], sampling: Sampling, model_dir: Path
) -> None:
    plan = with_generation(
        make_plan(read_spec(model_dir), strategy, split),
        GenerationLimits(kv_tokens=512, max_sequences=12, prefill_rows=64),
    )
    expected, *none = answers(model_dir, plan, sampling)
    assert none == [0, 0]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    found, num_drafted, num_accepted = answers(model_dir, plan, sampling, lambda: Remembered(texts), max_drafted=6)
    assert found == expected
    assert 0 < num_accepted < num_drafted


@pytest.mark.parametrize("kv_tokens", [96, 512])
def test_ngrams_are_exact_also_with_preemption_and_stop_tokens(kv_tokens: int, model_dir: Path) -> None:
    limits = GenerationLimits(kv_tokens=kv_tokens, max_sequences=12, prefill_rows=16)
    plan = with_generation(make_plan(read_spec(model_dir), "hmp", (1, 1)), limits)
    expected, *_ = answers(model_dir, plan, Sampling())
    stop = (expected[0][9],)
    expected, *_ = answers(model_dir, plan, Sampling(), stop_ids=stop)
    found, num_drafted, _ = answers(model_dir, plan, Sampling(), stop_ids=stop, max_drafted=8)
    assert found == expected
    assert num_drafted > 0
