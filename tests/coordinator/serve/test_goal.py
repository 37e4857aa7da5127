"""Defaults of a goal that follow from its other settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_model

from coordinator.serve.goal import open_transformer
from coordinator.serve.state import TransformerGoal
from hearth.errors import BadSetting


@pytest.mark.parametrize(
    ("family", "weights", "deterministic", "given", "kv_cache"),
    [
        ("llama", "float32", False, None, "float32"),
        ("llama", "float32", False, "int8", "int8"),
        ("llama", "bfloat16", False, None, "bfloat16"),
        ("llama", "float16", False, None, "bfloat16"),
        ("llama", "int8", False, None, "bfloat16"),
        ("llama", "int8", False, "int8", "int8"),
        ("llama", "int8", True, None, "float32"),
        ("llama", "int8", True, "int8", "int8"),
        ("llama", "int4", False, None, "bfloat16"),
        ("bert", "int8", False, None, "float32"),
    ],
)
def test_format_of_the_kv_cache(
    family: str, weights: str, deterministic: bool, given: str | None, kv_cache: str, tmp_path: Path
) -> None:
    fields = {"weights": weights, "deterministic": deterministic, "kv_cache": given}
    goal = TransformerGoal.model_validate({"model_dir": str(write_model(tmp_path, family)), **fields})
    assert open_transformer(goal).spec.kv_cache == kv_cache


def with_tokenizer(directory: Path, words: list[str]) -> None:
    """A tokenizer.json of these words."""
    from tokenizers import Tokenizer, models

    vocabulary = {word: number for number, word in enumerate(words)}
    Tokenizer(models.WordLevel(vocabulary, unk_token=words[0])).save(str(directory / "tokenizer.json"))


def test_draft_model_is_opened_with_the_formats_of_the_model(tmp_path: Path) -> None:
    model, draft = (
        write_model(tmp_path / "model", "llama"),
        write_model(tmp_path / "draft", "llama", num_hidden_layers=1),
    )
    goal = TransformerGoal(model_dir=str(model), draft_dir=str(draft), weights="int8")
    opened = open_transformer(TransformerGoal.model_validate_json(goal.model_dump_json()))
    assert (opened.draft.spec.weights, opened.draft.spec.kv_cache) == ("int8", "bfloat16")
    assert opened.generation.draft == opened.draft.spec


@pytest.mark.parametrize(
    ("changes", "family", "message"),
    [
        ({"vocab_size": 77}, "llama", r"vocabulary is another one \(draft has 77 tokens.*same family.*or omit --draft"),
        ({}, "bert", "draft generates no text"),
    ],
)
def test_draft_that_cannot_guess_is_refused(changes: dict[str, Any], family: str, message: str, tmp_path: Path) -> None:
    model, draft = write_model(tmp_path / "model", "llama"), write_model(tmp_path / "draft", family, **changes)
    with pytest.raises(BadSetting, match=message) as error:
        open_transformer(TransformerGoal(model_dir=str(model), draft_dir=str(draft)))
    assert error.value.setting == "--draft"


def test_draft_with_other_tokens_is_refused_and_one_with_a_padded_vocabulary_is_not(tmp_path: Path) -> None:
    model, draft = write_model(tmp_path / "model", "llama"), write_model(tmp_path / "draft", "llama", vocab_size=77)
    goal = TransformerGoal(model_dir=str(model), draft_dir=str(draft))
    with_tokenizer(model, ["?", "the", "lamp"])
    with_tokenizer(draft, ["?", "the", "lamp"])
    assert open_transformer(goal).draft is not None
    with_tokenizer(draft, ["?", "the", "attic"])
    with pytest.raises(
        BadSetting, match=r"another one \('(lamp|attic)' is .* in draft and .* in model\): choose a draft"
    ):
        open_transformer(goal)


@pytest.mark.parametrize("changes", [{"deterministic": True}, {"max_drafted": 0}])
def test_draft_needs_guesses(changes: dict[str, Any], tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", "llama"))
    with pytest.raises(BadSetting, match="--draft"):
        open_transformer(TransformerGoal(model_dir=model, draft_dir=model, **changes))


def test_goals_saved_before_there_were_drafts_are_read(tmp_path: Path) -> None:
    saved = json.loads(TransformerGoal(model_dir="m").model_dump_json())
    del saved["draft_dir"]
    assert TransformerGoal.model_validate(saved).draft_dir is None
