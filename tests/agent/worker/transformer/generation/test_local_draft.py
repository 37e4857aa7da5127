"""A draft model on rank 0: answers are the same with it and without, whatever it guesses, and its KV cache stays consistent."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import mostly_slow
from support.models import save_random_model, small_decoder
from support.plans import make_plan, with_generation
from support.proposers import Never

from coordinator.models.checkpoint.families import read_spec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits
from hearth.wire.messages import Sampling

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.engines import (  # noqa: E402 (needs torch)
    EngineCluster,
    GenerationCluster,
    free_speculation,
    local_draft,
    speculative_answers,
)

from agent.worker.transformer.generation.local_draft import LocalDraft  # noqa: E402

# The last one is prefilled in parts.
PROMPTS = [[5, 9, 11] * 6, [7, 8, 21, 40, 8], [3], np.random.default_rng(2).integers(3, 2000, 70).tolist()]
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.9, top_k=50, top_p=0.9, repetition_penalty=1.1, seed=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, and a smaller one of other weights with the same vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    other = small_decoder("llama", num_hidden_layers=1)
    return {
        "itself": save_random_model(folder / "model", small_decoder("llama"), generates=True),
        "another": save_random_model(folder / "draft", other, generates=True, seed=1),
    }


def plan_with_draft(models: dict[str, Path], split: tuple[float, ...], draft: str, **limits: Any) -> TransformerPlan:
    fields = {"kv_tokens": 640, "max_sequences": 32, "prefill_rows": 32, "draft": read_spec(models[draft]), **limits}
    strategy = "local" if len(split) == 1 else "hmp"
    return with_generation(
        make_plan(read_spec(models["itself"]), strategy, split), GenerationLimits.model_validate(fields)
    )


def answers(
    models: dict[str, Path], plan: TransformerPlan, draft: LocalDraft | None, sampling: Sampling, max_drafted: int
) -> tuple[list[list[int]], int, int]:
    speculation = free_speculation(Never, draft)
    return speculative_answers(models["itself"], plan, PROMPTS, speculation, sampling, max_drafted=max_drafted)


@pytest.mark.parametrize(
    ("draft", "split", "sampling"),
    mostly_slow(
        product(["itself", "another"], [(1,), (1, 1)], [GREEDY, SAMPLED]),
        lambda *case: case in (("itself", (1, 1), SAMPLED), ("another", (1,), GREEDY)),
    ),
)
def test_answers_are_the_same_with_a_draft_model(
    draft: str, split: tuple[float, ...], sampling: Sampling, models: dict[str, Path]
) -> None:
    plan = plan_with_draft(models, split, draft)
    expected, *none = answers(models, plan, None, sampling, 0)
    assert none == [0, 0]
    found, num_drafted, num_accepted = answers(models, plan, local_draft(models[draft], plan), sampling, 6)
    assert found == expected
    assert num_drafted > 0
    if draft == "itself":  # it samples with the same noise, so its guesses are right, sampled ones too
        assert num_accepted == num_drafted


@pytest.mark.parametrize("draft", mostly_slow(["itself", "another"], lambda draft: draft == "another"))
def test_answers_are_the_same_when_sequences_are_preempted_and_the_draft_has_little_room(
    draft: str, models: dict[str, Path]
) -> None:
    plan = plan_with_draft(models, (1, 1), draft, kv_tokens=112)
    expected, *_ = answers(models, plan, None, SAMPLED, 0)
    found, num_drafted, _ = answers(models, plan, local_draft(models[draft], plan), SAMPLED, 6)
    assert found == expected
    assert num_drafted > 0


def test_next_turn_of_a_chat_takes_the_rows_of_the_first(models: dict[str, Path]) -> None:
    plan = plan_with_draft(models, (1,), "itself")
    draft = local_draft(models["itself"], plan)
    speculation = free_speculation(Never, draft)
    prompt = PROMPTS[3]
    with EngineCluster(models["itself"], plan) as cluster:
        home = GenerationCluster(cluster, speculation)
        first = home.submit(prompt, 20, prefix_scope="app", max_drafted=6)
        home.run()
        second = home.submit([*prompt, *home.answers[first], 5], 20, prefix_scope="app", max_drafted=6)
        home.run()
        others = home.submit([*prompt, *home.answers[first], 5], 20, prefix_scope="another", max_drafted=6)
        home.run()
    assert home.answers[second] == home.answers[others]
    shared, alone = (draft._sequences[number].blocks for number in (2, 3))
    assert shared[:5] == draft._sequences[1].blocks[:5]
    assert not set(alone) & set(shared)


def test_draft_with_a_short_context_or_fewer_tokens_stops_guessing(models: dict[str, Path]) -> None:
    """Instead of reading beyond its positions, or its embedding."""
    plan = plan_with_draft(models, (1,), "itself")
    draft = local_draft(models["itself"], plan)
    expected, *_ = answers(models, plan, None, GREEDY, 0)
    draft._spec = draft._spec.model_copy(update={"max_positions": 30, "vocab_size": 1000})
    found, num_drafted, _ = answers(models, plan, draft, GREEDY, 6)
    assert found == expected
    assert num_drafted > 0
