"""Random weights under a grammar give valid answers: on vocabulary shards, in pipelines, with guesses and preemption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models import save_random_model, small_decoder
from support.plans import make_plan, with_generation
from support.proposers import Remembered

from agent.worker.transformer.generation.speculation import Speculation
from coordinator.models.checkpoint.families import read_spec
from hearth.grammars import Vocabulary
from hearth.plan.transformer import GenerationLimits
from hearth.wire.messages import Sampling

pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from support.engines import EngineCluster, GenerationCluster, free_speculation

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["room", "on", "level"],
    "properties": {
        "room": {"enum": ["kitchen", "bath"]}, "on": {"type": "boolean"},
        "level": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip
GRAMMAR = f"start: %json {json.dumps(SCHEMA)}"
SAMPLED = Sampling(temperature=2.0, seed=7)
LIMITS = GenerationLimits(kv_tokens=512, max_sequences=12, prefill_rows=64)
PROMPTS = [[5, 9, 11], [7, 8, 21, 40, 8] * 3, [3]]
CASES = [
    ("local", (1,), SAMPLED), ("hmp", (1, 1), Sampling()), ("hmp", (1, 0, 2), SAMPLED),
    ("hmp", (1, 1), SAMPLED.model_copy(update={"top_p": 0.9, "top_k": 5})), ("pipeline", (1, 1), SAMPLED),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Vocabulary]:
    """A model of 300 tokens, of which the first 256 are bytes."""
    directory = save_random_model(
        tmp_path_factory.mktemp("llama"), small_decoder("llama", vocab_size=300), generates=True
    )
    tokens = [bytes([n]) for n in range(256)] + [b"kitchen", b'":', b"tru", b"</s>"]
    return directory, Vocabulary([*tokens, *[b""] * (300 - len(tokens))], [259], [259])


def text_of(tokens: list[int], vocabulary: Vocabulary) -> str:
    assert tokens[-1] == 259
    return b"".join(vocabulary.tokens[n] for n in tokens[:-1]).decode()


def generated(
    model: tuple[Path, Vocabulary],
    strategy: str,
    split: tuple[float, ...],
    sampling: Sampling,
    limits: GenerationLimits = LIMITS,
    speculation: Speculation | None = None,
) -> tuple[list[list[int]], GenerationCluster]:
    """The answers to all prompts at once, each in a grammar."""
    directory, vocabulary = model
    plan = with_generation(make_plan(read_spec(directory), strategy, split), limits)
    with EngineCluster(directory, plan, vocabulary=vocabulary) as cluster:
        home = GenerationCluster(cluster, speculation)
        fields = {"prefix_scope": "app", "stop_ids": (259,), "grammar": GRAMMAR}
        return home.answer(PROMPTS, 64, sampling, max_drafted=6 if speculation is not None else 0, **fields), home


@pytest.mark.parametrize(("strategy", "split", "sampling"), CASES, ids=str)
def test_random_weights_give_valid_json(
    strategy: str, split: tuple[float, ...], sampling: Sampling, model: tuple[Path, Vocabulary]
) -> None:
    answers, _ = generated(model, strategy, split, sampling)
    for answer in answers:
        value = json.loads(text_of(answer, model[1]))
        assert list(value) == ["room", "on", "level"]
        assert value["room"] in ("kitchen", "bath")
        assert 0 <= value["level"] <= 99


@pytest.mark.parametrize(("strategy", "split"), [("hmp", (1, 1)), ("pipeline", (1, 1))])
def test_guesses_are_verified_against_the_grammar(
    strategy: str, split: tuple[float, ...], model: tuple[Path, Vocabulary]
) -> None:
    expected, _ = generated(model, strategy, split, SAMPLED)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    # Token 0, which the grammar forbids everywhere.
    speculation = free_speculation(lambda: Remembered(texts, spoil=lambda token: 0))
    found, home = generated(model, strategy, split, SAMPLED, speculation=speculation)
    assert found == expected
    ends = home.ended.values()
    assert 0 < sum(end.num_accepted for end in ends) < sum(end.num_drafted for end in ends)


def test_preempted_answer_goes_on_in_its_grammar(model: tuple[Path, Vocabulary]) -> None:
    expected, _ = generated(model, "hmp", (1, 1), SAMPLED)
    tight = GenerationLimits(kv_tokens=96, max_sequences=12, prefill_rows=16)
    assert generated(model, "hmp", (1, 1), SAMPLED, tight)[0] == expected


def test_answer_goes_on_in_its_grammar_on_another_plan(model: tuple[Path, Vocabulary]) -> None:
    """As after the loss of a device: the tokens so far are part of the prompt."""
    directory, vocabulary = model
    (expected, *_), _ = generated(model, "local", (1,), SAMPLED)
    plan = with_generation(make_plan(read_spec(directory), "hmp", (1, 1)), LIMITS)
    with EngineCluster(directory, plan, vocabulary=vocabulary) as cluster:
        home = GenerationCluster(cluster)
        prompt = PROMPTS[0] + expected[:9]
        (rest,) = home.answer([prompt], 55, SAMPLED, first_index=9, stop_ids=(259,), grammar=GRAMMAR)
        assert expected[:9] + rest == expected


def test_request_whose_grammar_cannot_be_followed_fails_alone(model: tuple[Path, Vocabulary]) -> None:
    """A grammar that does not compile on the devices, although the coordinator's did."""
    directory, vocabulary = model
    plan = with_generation(make_plan(read_spec(directory), "hmp", (1, 1)), LIMITS)
    with EngineCluster(directory, plan, vocabulary=vocabulary) as cluster:
        home = GenerationCluster(cluster)
        failing = home.submit(PROMPTS[0], 20, grammar="start: nothing")
        other = home.submit(PROMPTS[1], 20)
        home.run()
        assert home.refused == [failing]
        assert len(home.answers[other]) == 20
        assert cluster.executors[0].num_sequences == 0
