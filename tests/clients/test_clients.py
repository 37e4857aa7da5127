"""Third-party clients, each unmodified and in an environment of its own, against a home of real processes.

`make test-clients` makes the environments and names their folder in HEARTH_CLIENTS.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from clients.homes import served
from support.chat_models import TEMPLATE, save_byte_level, save_scripted_chat, write_config
from support.home import LOOPBACK, TestHome
from support.models import endless_decoder, minilm, save_random_model
from support.profiles import MeasuredProfiles
from support.tokens import new_token
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

import torch
from support.reference import decoder, greedy
from transformers import AutoTokenizer

ENVIRONMENTS = os.environ.get("HEARTH_CLIENTS")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(ENVIRONMENTS is None, reason="HEARTH_CLIENTS names no folder: run `make test-clients`"),
]


@pytest.fixture(scope="module")
def chat_home(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """A home whose model says "hello", calls a tool, and says that the light is on."""
    call = '{"name": "turn_on", "arguments": {"name": "kitchen"}}'
    model_dir = save_scripted_chat(tmp_path_factory.mktemp("models") / "model", call, "The light is on.")
    with served(model_dir, profiles, tmp_path_factory.mktemp("home"), "--context", "320") as home:
        yield home


@pytest.fixture(scope="module")
def embedding_home(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    with served(minilm(), profiles, tmp_path_factory.mktemp("home")) as home:
        yield home


@pytest.mark.parametrize("client", ["openai", "ollama", "langchain_openai", "langchain_ollama", "litellm", "llm"])
def test_chat_client_works_unmodified(client: str, chat_home: TestHome) -> None:
    run_client(client, "text", chat_home)


@pytest.mark.parametrize("client", ["ollama", "langchain_openai", "langchain_ollama", "litellm"])
def test_embedding_client_works_unmodified(client: str, embedding_home: TestHome) -> None:
    run_client(client, "vectors", embedding_home)


def test_embeddings_by_openai_equal_those_of_the_home(embedding_home: TestHome) -> None:
    found = json.loads(run_client("openai", "vectors", embedding_home))
    with embedding_home.connect() as client:
        assert np.abs(np.asarray(found) - client.embed(["the kitchen", "the attic"])).max() < 1e-6


@pytest.fixture(scope="module")
def busy_home(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """A home whose random weights never end an answer. It runs one at a time, and none may wait."""
    shape = endless_decoder(vocab_size=512)
    model_dir = save_random_model(tmp_path_factory.mktemp("models") / "tiny", shape, generates=True)
    write_config(save_byte_level(model_dir), chat_template=TEMPLATE, bos_token="<s>", eos_token="</s>")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("HEARTH_COORDINATOR_QUEUE_LIMIT", "1")
        options = ("--context", "320", "--sequences", "1", "--speculate", "off")
        with served(model_dir, profiles, tmp_path_factory.mktemp("home"), *options) as home:
            yield home


def test_log_probabilities_by_openai_equal_those_of_transformers(busy_home: TestHome) -> None:
    found = json.loads(run_client("openai", "log_probs", busy_home))
    tokenizer = AutoTokenizer.from_pretrained(busy_home.model_dir)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    answer = greedy(busy_home.model_dir, prompt, 12)
    with torch.inference_mode():
        logits_TV = decoder(busy_home.model_dir)(torch.tensor([[*prompt, *answer]])).logits[0]
    expected_TV = torch.log_softmax(logits_TV.double(), -1)[len(prompt) - 1 : -1]
    assert len(found) == 12
    for (chosen, tops), token, expected_V in zip(found, answer, expected_TV, strict=True):
        assert chosen == pytest.approx(float(expected_V[token]), abs=1e-4)
        assert tops == pytest.approx(expected_V.topk(3).values.tolist(), abs=1e-4)


def test_openai_raises_its_own_errors_for_a_full_queue_a_broken_stream_and_a_home_without_devices(
    busy_home: TestHome,
) -> None:
    run_client("openai", "busy", busy_home)
    running = start_client("openai", "broken_stream", busy_home)
    assert running.stdout.readline() == "began\n"
    with busy_home.connect() as client:
        client.revoke_app("openai-broken-stream")
    errors = running.communicate(timeout=60)[1]
    assert running.returncode == 0, errors
    for name in "abc":
        busy_home.kill(name)
    with busy_home.connect() as client:  # a request that came before would wait for the next plan
        wait_for("the losses", lambda: not client.ready())
    run_client("openai", "not_ready", busy_home, "tiny")


def run_client(client: str, kind: str, home: TestHome, *more: str) -> str:
    """Run `CLIENT_client.py` with the Python of the client's environment. Returns what it has printed."""
    running = start_client(client, kind, home, *more)
    try:
        printed, errors = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 0, errors
    return printed


def start_client(client: str, kind: str, home: TestHome, *more: str) -> subprocess.Popen[str]:
    assert ENVIRONMENTS is not None
    python = Path(ENVIRONMENTS) / ("litellm" if client == "litellm" else "common") / "bin" / "python"
    script = Path(__file__).with_name(f"{client}_client.py")
    address = f"http://{LOOPBACK}:{home.port('coordinator', http=True)}"
    token = new_token(home, f"{client}-{kind}".replace("_", "-"))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [str(python), str(script), kind, address, token, *more],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
