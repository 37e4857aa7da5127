"""A home of real processes with a draft model: no token changes, also if the device with the draft model is lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.home import TestHome
from support.models import endless_decoder, save_random_model
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.reference import greedy

from hearth.client.answers import Usage
from hearth.client.sync import Home

pytestmark = pytest.mark.processes

PROMPT = [1, *range(40, 60)]
COUNT, CONTEXT = 200, 320
OPTIONS = ("--strategy", "hmp", "--context", str(CONTEXT))
SAMPLED = {"temperature": 1.0, "top_k": 50, "seed": 7}  # nothing repeats itself, so only a draft model guesses right


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deep model, of whose layers only the first changes anything."""
    import torch
    from transformers import AutoModelForCausalLM

    shape = {"hidden_size": 240, "num_attention_heads": 12, "intermediate_size": 640, "num_hidden_layers": 16}
    whole = save_random_model(tmp_path_factory.mktemp("whole"), endless_decoder(**shape), generates=True)
    model = AutoModelForCausalLM.from_pretrained(whole)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def draft_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer alone, which computes the same and takes a sixteenth of the time."""
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("draft")
    AutoModelForCausalLM.from_pretrained(model_dir, num_hidden_layers=1).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def running_home(
    model_dir: Path, profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestHome]:
    with TestHome(tmp_path_factory.mktemp("home"), model_dir, profiles) as running_home:
        yield running_home


@pytest.fixture(scope="module")
def without_draft(running_home: TestHome) -> list[int]:
    """The sampled answer."""
    with running_home.serving("ab", "--min-devices", "2", *OPTIONS) as home:
        return ask(home, **SAMPLED)[0]


def ask(home: Home, **sampling: float) -> tuple[list[int], Usage]:
    answer = home.generate(token_ids=PROMPT, max_tokens=COUNT, timeout_seconds=120.0, **sampling)  # type: ignore[arg-type]
    assert answer.text() == ""
    assert answer.usage is not None
    return answer.token_ids, answer.usage


def draft_device(home: Home) -> str:
    """The device that the plan gives the draft model, the first one."""
    plan = home.status().plan
    assert plan is not None
    assert plan.body.generation.draft is not None
    return str(plan.devices[0].name)


def test_answers_are_those_without_a_draft_and_are_guessed(
    running_home: TestHome, draft_dir: Path, without_draft: list[int]
) -> None:
    with running_home.serving("ab", "--min-devices", "2", "--draft", str(draft_dir), *OPTIONS) as home:
        assert draft_device(home) in ("a", "b")
        assert ask(home)[0] == greedy(running_home.model_dir, PROMPT, COUNT)
        found, usage = ask(home, **SAMPLED)
        assert found == without_draft
        assert usage.num_accepted_tokens > COUNT / 2


def test_answer_goes_on_when_the_device_with_the_draft_is_killed(
    running_home: TestHome, draft_dir: Path, without_draft: list[int]
) -> None:
    with running_home.serving("ab", "--min-devices", "2", "--draft", str(draft_dir), *OPTIONS) as home:
        victim = draft_device(home)
        answer = home.generate(token_ids=PROMPT, max_tokens=COUNT, timeout_seconds=120.0, **SAMPLED)  # type: ignore[arg-type]
        for _ in itertools.islice(answer, 30):
            pass
        running_home.kill(victim)
        assert answer.text() == ""
        assert answer.token_ids == without_draft
        survivor = {"a": "b", "b": "a"}[victim]
        wait_for("a draft model on the other device", lambda: draft_device(home) == survivor)
        found, usage = ask(home, **SAMPLED)
        assert found == without_draft
        assert usage.num_accepted_tokens > COUNT / 2
        assert home.status().failed_requests == 0


def test_draft_of_another_vocabulary_is_refused(running_home: TestHome, tmp_path: Path) -> None:
    other = save_random_model(tmp_path / "other", endless_decoder(vocab_size=2000, num_hidden_layers=1), generates=True)
    running_home.start_coordinator("--draft", str(other), *OPTIONS)
    assert running_home.wait("coordinator") not in (0, None)
    said = running_home.log_of_run("coordinator")
    assert "--draft" in said
    assert "other has 2000 tokens" in said
    assert "choose a draft model of the same family as the model, or omit --draft" in said
    assert "Traceback" not in said
