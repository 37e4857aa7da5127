"""Text generation in a home that loses workers, devices, the coordinator or clients, or has a draft: no token changes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from support.home import LOOPBACK, TestHome, plan_devices, plan_of
from support.models import endless_decoder, save_random_model
from support.profiles import MeasuredProfiles
from support.waiting import WAIT_LIMIT_SECONDS, wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.reference import greedy

from hearth.client.answers import Usage
from hearth.client.sync import Home

pytestmark = pytest.mark.processes

PROMPT = [1, *range(40, 60)]
CONTEXT = 320


# Deep rather than wide: starts quickly, and answers take long enough to be interrupted.
SLOW = {"num_hidden_layers": 16, "hidden_size": 240, "num_attention_heads": 12, "intermediate_size": 640}


@pytest.fixture(scope="module")
def running_home(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """The home of all tests of this module, which begin with those that need the fewest devices."""
    folder = tmp_path_factory.mktemp("home")
    config = endless_decoder(**SLOW, max_position_embeddings=8192)
    with TestHome(folder, save_random_model(folder / "slow", config, generates=True), profiles) as running_home:
        yield running_home


@pytest.mark.thorough
def test_coordinator_killed_during_an_answer_changes_no_token(running_home: TestHome) -> None:
    # A greedy answer repeats itself: with more guesses it would end before the coordinator does.
    count, options = 280, ("--context", str(CONTEXT), "--speculate", "2")
    with running_home.serving("a", *options) as home:
        port = running_home.port("coordinator")
        asked = partial(home.generate, token_ids=PROMPT, max_tokens=count, timeout_seconds=WAIT_LIMIT_SECONDS)
        greedy_answer, sampled, undisturbed = asked(), *(asked(temperature=1.0, seed=7) for _ in range(2))
        undisturbed.text()
        for answer in (greedy_answer, sampled):
            for _ in itertools.islice(answer, 10):
                pass
        running_home.kill("coordinator")
        running_home.start_coordinator(*options, "--port", str(port))
        assert (greedy_answer.text(), sampled.text()) == ("", "")
        assert greedy_answer.token_ids == greedy(running_home.model_dir, PROMPT, count)
        assert sampled.token_ids == undisturbed.token_ids
        assert greedy_answer.usage is not None
        assert greedy_answer.usage.num_tokens == count
        if "loading on" not in running_home.log_of_run(
            "coordinator"
        ):  # the worker was taken over, as on an idle machine
            rows = re.findall(r"a stream goes on with (\d+) rows of its KV cache", running_home.log("a"))
            assert [int(each) >= len(PROMPT) + 9 for each in rows] == [True, True]


@pytest.mark.thorough
def test_killed_client_frees_its_requests(running_home: TestHome) -> None:
    with (
        running_home.serving("a", "--strategy", "local", "--context", "8000") as home,
        _two_long_answers(running_home) as other,
    ):
        assert home.models()[0].running_requests == 2
        other.kill()  # without closing its connection
        wait_for("the end of its requests", lambda: home.models()[0].running_requests == 0)


ANSWERS = f"""
import sys
from hearth.client.sync import connect

home = connect(sys.argv[1], key=sys.argv[2])
answers = [home.generate(token_ids={PROMPT}, max_tokens=7900) for _ in range(2)]
for answer in answers:
    next(answer)
print("begun", flush=True)
sys.stdin.read()
"""


@contextmanager
def _two_long_answers(running_home: TestHome) -> Iterator[subprocess.Popen[str]]:
    """A client process that has started both answers."""
    command = [sys.executable, "-c", ANSWERS, f"{LOOPBACK}:{running_home.port('coordinator')}", str(running_home.key)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "begun\n"
            yield client
        finally:
            client.kill()


# ---- with a draft model -------------------------------------------------------------------------------------------------

COUNT = 200
OPTIONS = ("--min-devices", "2", "--strategy", "hmp", "--context", str(CONTEXT))
SAMPLED = {"temperature": 1.0, "top_k": 50, "seed": 7}  # nothing repeats itself, so only a draft model guesses right


@pytest.fixture(scope="module")
def guessed_dir(running_home: TestHome) -> Path:
    """A deep model, of whose layers only the first changes anything."""
    import torch
    from transformers import AutoModelForCausalLM

    whole = save_random_model(running_home.folder / "whole", endless_decoder(**SLOW), generates=True)
    model = AutoModelForCausalLM.from_pretrained(whole)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(running_home.folder / "guessed")
    return running_home.folder / "guessed"


@pytest.fixture(scope="module")
def draft_options(guessed_dir: Path) -> tuple[str, ...]:
    """With the first layer alone, which computes the same and takes a sixteenth of the time."""
    from transformers import AutoModelForCausalLM

    directory = guessed_dir.with_name("draft")
    AutoModelForCausalLM.from_pretrained(guessed_dir, num_hidden_layers=1).save_pretrained(directory)
    return (*OPTIONS, "--draft", str(directory))


@pytest.fixture(scope="module")
def without_draft(running_home: TestHome, guessed_dir: Path) -> list[int]:
    """The sampled answer."""
    with running_home.serving("ab", *OPTIONS, model=guessed_dir) as home:
        return ask(home, **SAMPLED)[0]


def ask(home: Home, **sampling: float) -> tuple[list[int], Usage]:
    answer = home.generate(token_ids=PROMPT, max_tokens=COUNT, timeout_seconds=120.0, **sampling)  # type: ignore[arg-type]
    assert answer.text() == ""
    assert answer.usage is not None
    return answer.token_ids, answer.usage


def draft_device(home: Home) -> str:
    """The device that the plan gives the draft model, the first one."""
    plan = plan_of(home)
    assert plan.body.generation.draft is not None
    return str(plan.devices[0].name)


@pytest.mark.thorough
def test_answers_with_a_draft_are_those_without_it(
    running_home: TestHome, guessed_dir: Path, draft_options: tuple[str, ...], without_draft: list[int]
) -> None:
    """Also if the device with the draft model is killed."""
    with running_home.serving("ab", *draft_options, model=guessed_dir) as home:
        victim = draft_device(home)
        assert ask(home)[0] == greedy(guessed_dir, PROMPT, COUNT)
        found, usage = ask(home, **SAMPLED)
        assert found == without_draft
        assert usage.num_accepted_tokens > COUNT / 2
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


@pytest.mark.thorough
def test_draft_of_another_vocabulary_is_refused(running_home: TestHome, guessed_dir: Path, tmp_path: Path) -> None:
    other = save_random_model(tmp_path / "other", endless_decoder(vocab_size=2000, num_hidden_layers=1), generates=True)
    running_home.start_coordinator(*OPTIONS, "--draft", str(other), model=guessed_dir)
    assert running_home.wait("coordinator") not in (0, None)
    said = running_home.log_of_run("coordinator")
    assert "--draft" in said
    assert "other has 2000 tokens" in said
    assert "choose a draft model of the same family as the model, or omit --draft" in said
    assert "Traceback" not in said


# ---- lost devices and workers ---------------------------------------------------------------------------------------------


def test_device_lost_during_an_answer_changes_no_token(running_home: TestHome) -> None:
    count = 40
    options = ("--strategy", "hmp", "--min-devices", "2", "--context", str(CONTEXT))
    with running_home.serving("ab", *options) as home:
        pids = [pid for pid in (running_home.pid("b"), running_home.worker_pid("b")) if pid is not None]
        answers = [home.generate(token_ids=prompt, max_tokens=count) for prompt in (PROMPT, PROMPT[:5])]
        texts = [threading.Thread(target=answer.text) for answer in answers]
        for thread in texts:
            thread.start()
        wait_for("both answers to begin", lambda: all(len(answer.token_ids) > 5 for answer in answers))
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            for thread in texts:
                thread.join(120)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        expected = [greedy(running_home.model_dir, prompt, count) for prompt in (PROMPT, PROMPT[:5])]
        assert [answer.token_ids for answer in answers] == expected


@pytest.mark.thorough
def test_worker_killed_during_an_answer_changes_no_token(running_home: TestHome) -> None:
    """The worker of one of three stages dies, and starts again in the same plan."""
    count, victim = 80, "a"
    options = ("--strategy", "pipeline", "--min-devices", "3", "--context", str(CONTEXT))
    with running_home.serving("abc", *options) as home:
        pid = running_home.worker_pid(victim)
        assert pid is not None
        answer = home.generate(token_ids=PROMPT, max_tokens=count, timeout_seconds=120.0)
        for _ in itertools.islice(answer, 10):
            pass
        os.kill(pid, signal.SIGKILL)
        assert answer.text() == ""
        assert answer.token_ids == greedy(running_home.model_dir, PROMPT, count)
        assert victim in plan_devices(home)
        assert len(plan_of(home).body.layers) == 3
        assert running_home.worker_pid(victim) not in (None, pid)
        assert home.status().failed_requests == 0
        assert "trying again" not in running_home.log_of_run("coordinator")


@pytest.mark.thorough
def test_killed_device_does_not_cost_the_kv_cache(running_home: TestHome) -> None:
    """One of three devices is lost: the copies of the others make the KV cache whole, and few rows are computed again."""
    count = 200
    options = ("--strategy", "hmp", "--min-devices", "3", "--context", str(CONTEXT))
    with running_home.serving("abc", *options) as home:
        assert plan_of(home).body.generation.kv_copies
        logged = len(running_home.log("a"))
        answer = home.generate(token_ids=PROMPT, max_tokens=count, timeout_seconds=120.0)
        for _ in itertools.islice(answer, 100):
            pass
        running_home.kill("b")
        assert answer.text() == ""
        assert answer.token_ids == greedy(running_home.model_dir, PROMPT, count)
        kept = re.search(r"a stream continues with (\d+) rows of its KV cache", running_home.log("a")[logged:])
        assert kept is not None, running_home.log("a")[logged:]
        assert int(kept[1]) >= len(PROMPT) + 100 - 40
