"""Greedy answers are the same with prefix cache, preemption and guesses, and without: exactly, or within the kernels' error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.cases import mostly_slow
from support.models import save_random_model, small_decoder
from support.plans import make_plan, with_generation
from support.proposers import Never

from coordinator.models.checkpoint.families import read_spec
from hearth.plan.kernels import KernelChoice
from hearth.plan.model_spec import WeightFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import KV_BLOCK_TOKENS, GenerationLimits

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.engines import EngineCluster, GenerationCluster, free_speculation, local_draft  # noqa: E402 (needs torch)

from agent.worker.transformer.generation import sampling  # noqa: E402
from agent.worker.transformer.generation.drafting import NgramProposer, Proposer  # noqa: E402
from agent.worker.transformer.generation.speculation import DraftModel  # noqa: E402

SYSTEM = np.random.default_rng(1).integers(3, 2000, 3 * KV_BLOCK_TOKENS).tolist()
PROMPTS = [[*SYSTEM, *np.random.default_rng(seed).integers(3, 2000, 1 + 5 * seed).tolist()] for seed in range(2, 6)]
PROMPTS += [[*SYSTEM[:20], 5, 9, 11, 5, 9, 11, 5, 9], [7]]
NUM_TOKENS = 20


class Mode(NamedTuple):
    """What is on."""

    prefix_cache: bool = False
    preemption: bool = False
    guesses: str = ""  # "" or "lookup" or "draft"
    together: bool = True  # all requests at once


PLAIN = Mode(together=False)
MODES = [
    Mode(prefix_cache, preemption, guesses)
    for prefix_cache in (False, True)
    for preemption in (False, True)
    for guesses in ("", "lookup", "draft")
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, and a draft model of the same vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    return (
        save_random_model(folder / "model", small_decoder("llama"), generates=True),
        save_random_model(folder / "draft", small_decoder("llama", num_hidden_layers=1), generates=True, seed=1),
    )


def answers(
    models: tuple[Path, Path], plan: TransformerPlan, mode: Mode, kernels: Sequence[KernelChoice] = ()
) -> tuple[list[list[int]], dict[str, int]]:
    """The answers to all prompts, and how often what is on was used."""
    model_dir, draft_dir = models
    limits = GenerationLimits(
        kv_tokens=(10 if mode.preemption else 60) * KV_BLOCK_TOKENS,
        max_sequences=32,
        prefill_rows=40,
        draft=read_spec(draft_dir) if mode.guesses == "draft" else None,
    )
    plan = with_generation(plan, limits)
    draft: DraftModel | None = local_draft(draft_dir, plan) if mode.guesses == "draft" else None

    def make_proposer() -> Proposer:
        return NgramProposer() if mode.guesses == "lookup" else Never()

    speculation = free_speculation(make_proposer, draft)
    preempted: list[int] = []
    with EngineCluster(model_dir, plan, kernels=kernels) as cluster:
        home = GenerationCluster(cluster, speculation)
        scheduler = home.leader._scheduler
        preempt = scheduler._preempt
        scheduler._preempt = lambda sequence: (preempted.append(sequence.number), preempt(sequence))[1]  # type: ignore[method-assign, func-returns-value]
        requests = []
        for prompt in PROMPTS:
            scope, most = "app" if mode.prefix_cache else "", 6 if mode.guesses else 0
            requests.append(home.submit(prompt, NUM_TOKENS, prefix_scope=scope, max_drafted=most))
            if not mode.together:
                home.run()
        home.run()
        assert scheduler.num_free_blocks == limits.num_kv_blocks
    ends = [home.ended[request] for request in requests]
    used = {
        "prefix_cache": sum(end.num_kept_rows for end in ends),
        "preemption": len(preempted),
        "guesses": sum(end.num_drafted for end in ends),
    }
    return [home.answers[request] for request in requests], used


@pytest.mark.parametrize("split", [(1,), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def test_float32_answers_are_the_same_in_all_modes(split: tuple[float, ...], models: tuple[Path, Path]) -> None:
    plan = make_plan(read_spec(models[0]), "local" if len(split) == 1 else "hmp", split)
    expected, _ = answers(models, plan, PLAIN)
    all_used: Counter[str] = Counter()
    for mode in MODES:
        found, used = answers(models, plan, mode)
        assert found == expected, mode
        assert not any(count for name, count in used.items() if not getattr(mode, name)), (mode, used)
        all_used.update(used)
    assert all(all_used[name] for name in ("prefix_cache", "preemption", "guesses"))


def test_eight_chats_hold_their_common_prompt_once(models: tuple[Path, Path]) -> None:
    """On each rank's own memory, and each answers as if it were alone."""
    limits = GenerationLimits(kv_tokens=60 * KV_BLOCK_TOKENS, max_sequences=16, prefill_rows=40)
    plan = with_generation(make_plan(read_spec(models[0]), "hmp", (1, 2)), limits)
    prompts = [[*SYSTEM, *range(30 + chat, 50 + chat)] for chat in range(8)]

    def run(scope: str) -> tuple[list[list[int]], list[list[list[int]]], int]:
        """The answers; the blocks of each sequence on each rank, and the number of free ones, once all have begun."""
        with EngineCluster(models[0], plan) as cluster:
            home = GenerationCluster(cluster)
            requests = [home.submit(prompt, 12, prefix_scope=scope) for prompt in prompts]
            while not all(home.answers[request] for request in requests):
                home.step()
            blocks = [[cache.blocks[:] for cache in executor._caches.values()] for executor in cluster.executors]
            num_free = home.leader._scheduler.num_free_blocks
            home.run()
            return [home.answers[request] for request in requests], blocks, num_free

    expected, *_ = run("")
    found, by_rank, num_free = run("app")
    assert found == expected
    assert by_rank[0] == by_rank[1]
    assert len(by_rank[0]) == 8
    assert len({tuple(blocks[:3]) for blocks in by_rank[0]}) == 1
    assert len({block for blocks in by_rank[0] for block in blocks}) == limits.num_kv_blocks - num_free
    assert limits.num_kv_blocks - num_free == 3 + sum(len(blocks) - 3 for blocks in by_rank[0])


# int8 with one kernel, whose rows depend on no others (`--deterministic`). Nothing is guessed then.
ONE_KERNEL = KernelChoice(num_outputs=96, num_inputs=96, layout="torch", rows=(1,), kernels=("expand-float32",))


@pytest.mark.parametrize("weights", mostly_slow(["int8", "int4"], lambda weights: weights == "int8"))
def test_deterministic_answers_are_the_same_in_all_modes(weights: WeightFormat, models: tuple[Path, Path]) -> None:
    spec = read_spec(models[0]).model_copy(update={"weights": weights})
    plan = make_plan(spec, "local", (1,))
    expected, _ = answers(models, plan, PLAIN, [ONE_KERNEL])
    for mode in MODES:
        if not mode.guesses:
            found, _ = answers(models, plan, mode, [ONE_KERNEL])
            assert found == expected, mode


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], np.ndarray[Any, Any]]:
    """The logits after each context, of one rank; a test empties it between two runs."""
    seen: dict[tuple[int, ...], np.ndarray[Any, Any]] = {}
    select = sampling.select_candidates

    def recording(logits_V: Any, first_id: int, choice: Any, tokens: Sequence[int], *rest: Any) -> Any:
        seen[tuple(tokens)] = np.array(logits_V)
        return select(logits_V, first_id, choice, tokens, *rest)

    monkeypatch.setattr(sampling, "select_candidates", recording)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4", "bfloat16"])
def test_first_different_token_lies_within_the_kernels_error(
    weights: WeightFormat, models: tuple[Path, Path], logits: dict[tuple[int, ...], np.ndarray[Any, Any]]
) -> None:
    """With the fastest kernels, a row's values depend on the rows next to it.

    The error is that of the logits against the same quantised weights in float32, of any context, all requests alone.
    """
    spec = read_spec(models[0]).model_copy(update={"weights": weights})
    answers(models, make_plan(spec, "local", (1,)), PLAIN, [ONE_KERNEL])
    exact = dict(logits)
    plan = make_plan(spec.model_copy(update={"kv_cache": "bfloat16"}), "local", (1,))  # as such weights are served
    logits.clear()
    expected, _ = answers(models, plan, PLAIN)
    reference = dict(logits)
    common = exact.keys() & reference.keys()
    error = max(float(np.abs(exact[each] - reference[each]).max()) for each in common)
    num_answers = num_different = 0
    for mode in MODES:
        if mode.guesses == "draft":
            continue  # recorded contexts would be those of the draft model, too
        found, _ = answers(models, plan, mode)
        for prompt, one, other in zip(PROMPTS, expected, found, strict=True):
            num_answers += 1
            first = next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
            if first is None:
                continue
            num_different += 1
            best, second = np.sort(reference[(*prompt, *one[:first])])[[-1, -2]]
            assert best - second < 2 * error
    print(f"{weights}: {num_different} of {num_answers} answers differ; error {error:.2g}")
