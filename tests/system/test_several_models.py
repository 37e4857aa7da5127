"""Three models at once in a home of real processes: a decoder, sentence embeddings, and an ONNX graph."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.graphs import save_two_branch_model
from support.home import TestHome, home_of
from support.models import endless_decoder, save_random_model, small_bert
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.reference import greedy, hidden_states

from hearth.client.sync import Home
from hearth.errors import BadSetting, UnknownModel

ort = pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python here")
pytestmark = pytest.mark.processes

PROMPT = [1, *range(40, 60)]
IMAGE = {"image": np.random.default_rng(0).standard_normal((1, 3, 48, 48)).astype(np.float32)}
TOKENS = list(range(5, 25))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "chat": save_random_model(folder / "chat", endless_decoder(), generates=True),
        "sentences": save_random_model(folder / "sentences", small_bert()),
        "detector": save_two_branch_model(folder / "detector.onnx", channels=8, size=48, depth=2),
    }


@pytest.fixture(scope="module")
def home(
    models: dict[str, Path], profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestHome]:
    folder = tmp_path_factory.mktemp("home")
    with home_of("abc", folder, models["chat"], profiles, "--context", "320") as home:
        cache = folder / "coordinator" / "profiles"
        for name in ("sentences", "detector"):
            profiles.copy_to(cache, models[name], home.device_ids)
        home.ready().close()
        for name in ("sentences", "detector"):
            hearth(home, "serve", str(models[name]), "--state-dir", str(folder / "coordinator"))
        yield home


def run(home: TestHome, *arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command against the running coordinator. `said`: its standard input."""
    connection = () if arguments[0] == "serve" else ("--address", f"127.0.0.1:{home.port('coordinator')}")
    return subprocess.run(
        [str(Path(sys.executable).parent / "hearth"), *arguments, "--key", str(home.key), *connection],
        input=said, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def hearth(home: TestHome, *arguments: str) -> str:
    """The output of a command that succeeds."""
    done = run(home, *arguments)
    assert done.returncode == 0, done.stderr + done.stdout + home.log("coordinator")
    return done.stdout


def checks(models: dict[str, Path]) -> dict[str, Callable[[Home], None]]:
    """A request to each model, whose answer must equal that of the reference on one device."""
    tokens = greedy(models["chat"], PROMPT, 12)
    rows = hidden_states(models["sentences"], [TOKENS])
    session = ort.InferenceSession(str(models["detector"]), providers=["CPUExecutionProvider"])
    (scores,) = session.run(["scores"], IMAGE)

    def chat(home: Home) -> None:
        answer = home.generate(token_ids=PROMPT, max_tokens=12, timeout_seconds=120.0)
        answer.text()
        assert answer.token_ids == tokens

    def sentences(home: Home) -> None:
        assert np.abs(home.hidden_states(TOKENS, 120.0, model="sentences") - rows).max() < 1e-4

    def detector(home: Home) -> None:
        assert np.abs(home.infer(IMAGE, 120.0)["scores"] - scores).max() < 1e-4

    return {"chat": chat, "sentences": sentences, "detector": detector}


@contextmanager
def load(home: TestHome, asked: dict[str, Callable[[Home], None]]) -> Iterator[dict[str, int]]:
    """Requests to these models, one after the other each, while the block runs; yields how many each has answered."""
    counts, errors = dict.fromkeys(asked, 0), []
    ending = threading.Event()

    def ask(name: str) -> None:
        try:
            with home.connect() as client:
                while not ending.is_set():
                    asked[name](client)
                    counts[name] += 1
        except BaseException as error:  # reported below, in the test's thread
            errors.append((name, error))

    threads = [threading.Thread(target=ask, args=(name,)) for name in asked]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        ending.set()
        for thread in threads:
            thread.join(240.0)
    assert errors == []


def test_requests_go_to_the_model_that_they_name_or_to_the_default_of_their_kind(
    home: TestHome, models: dict[str, Path]
) -> None:
    listed = json.loads(hearth(home, "ps", "--json"))["models"]
    assert [(each["deployment"], each["answers"], each["ready"]) for each in listed] == [
        ("chat", "text", True), ("sentences", "vectors", True), ("detector", "arrays", True),
    ]  # fmt: skip
    with home.connect() as client:
        for check in checks(models).values():
            check(client)
        with pytest.raises(UnknownModel, match="chat, sentences, detector"):
            client.embed(["hello"], model="other")
        with pytest.raises(BadSetting, match="served already"):
            client.serve_model(json.dumps({"kind": "graph", "model_file": str(models["detector"])}), "detector")


def test_commands_ask_the_model_that_they_name(home: TestHome, models: dict[str, Path]) -> None:
    prompt = ("--token-ids", ",".join(map(str, PROMPT)), "--max-tokens", "5")
    answer = json.loads(hearth(home, "generate", *prompt, "--model", "chat", "--json"))
    assert answer["token_ids"] == greedy(models["chat"], PROMPT, 5)
    assert json.loads(hearth(home, "infer", "--model", "detector", "--json"))["outputs"]["scores"]
    measured = json.loads(hearth(home, "bench-model", "--model", "detector", "--seconds", "0.5", "--json"))
    assert measured["load"]["answers"] > 0
    assert measured["predicted"] is not None  # of the detector's plan, although another model is older
    for command in (("generate", "hello"), ("embed", "hello"), ("infer",), ("bench-model",)):
        done = run(home, *command, "--model", "other")
        assert done.returncode == 1
        assert "other" in done.stderr
        assert "chat, sentences, detector" in done.stderr
    assert "chat, sentences, detector" in run(home, "chat", "--model", "other", said="hello").stderr


def test_one_model_is_stopped_and_started_under_load_of_the_others(home: TestHome, models: dict[str, Path]) -> None:
    asked = checks(models)
    detector = asked.pop("detector")
    with load(home, asked) as counts:
        hearth(home, "stop", "detector")
        before = dict(counts)
        wait_for("answers of the others", lambda: all(counts[each] > before[each] for each in asked))
        with home.connect() as client, pytest.raises(UnknownModel):
            client.infer(IMAGE, model="detector")
        hearth(home, "serve", str(models["detector"]), "--state-dir", str(home.folder / "coordinator"))
    with home.connect() as client:
        detector(client)


def test_coordinator_that_starts_again_serves_all_models(home: TestHome, models: dict[str, Path]) -> None:
    home.kill("coordinator")
    home.start_coordinator(model=False)
    with home.ready() as client:
        for check in checks(models).values():
            check(client)
        assert [each.deployment for each in client.models()] == ["chat", "sentences", "detector"]


def test_requests_of_all_models_finish_when_a_device_is_killed(home: TestHome, models: dict[str, Path]) -> None:
    with load(home, checks(models)) as counts:
        before = dict(counts)
        wait_for("requests to all models", lambda: all(counts[each] > before[each] for each in counts))
        home.kill("b")
        killed = dict(counts)
        wait_for("answers after the loss", lambda: all(counts[each] > killed[each] + 1 for each in counts))
    with home.connect() as client:
        plans: dict[str, Any] = {each.deployment: each.devices for each in client.models()}
    assert all("b" not in devices for devices in plans.values())


def test_idle_model_is_unloaded_and_the_next_request_waits_until_it_is_loaded(
    home: TestHome, models: dict[str, Path]
) -> None:
    """Also after a restart whose options name another model: those that were added stay."""
    state_dir = str(home.folder / "coordinator")
    hearth(home, "stop", "detector")
    hearth(home, "serve", str(models["detector"]), "--state-dir", state_dir, "--keep-alive", "0.5")
    detector = checks(models)["detector"]

    def listed() -> dict[str, Any]:
        return {each["deployment"]: each for each in json.loads(hearth(home, "ps", "--json"))["models"]}

    def has_no_workers() -> bool:
        with home.connect() as client:
            alive = [device for device in client.devices().devices if device.state == "alive"]  # one has been killed
        running = [worker.deployment for device in alive for worker in device.workers]
        return "detector" not in running and "chat" in running

    wait_for("the end of the life cycle", lambda: listed()["detector"]["phase"] == "unloaded")
    assert (listed()["detector"]["ready"], listed()["detector"]["memory_bytes"]) == (True, 0)
    wait_for("the end of its workers", has_no_workers)
    with home.connect() as client:
        detector(client)
    home.kill("coordinator")
    home.start_coordinator("--context", "320")
    with home.ready() as client:
        assert [each.deployment for each in client.models()] == ["chat", "sentences", "detector"]
        for check in checks(models).values():
            check(client)
    wait_for("the end of the life cycle", lambda: listed()["detector"]["phase"] == "unloaded")
    wait_for("the end of its workers", has_no_workers)
