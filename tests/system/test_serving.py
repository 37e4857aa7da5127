"""A home of real processes that generates text, then also serves sentence embeddings and an ONNX graph, then pins a model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clients import Ask, Clients
from support.gateway_faults import CALL_SECONDS, survive_gateway_faults
from support.graphs import save_two_branch_model
from support.home import TestHome, home_of
from support.models import endless_decoder, save_random_model, small_bert
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.reference import greedy, hidden_states

from hearth.client.sync import Home
from hearth.errors import BadRequest, BadSetting, ContextTooLong, MemoryTaken, UnknownModel
from hearth.wire.messages import ServedModel

ort = pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python here")
pytestmark = pytest.mark.processes

PROMPT = [1, *range(40, 60)]
CONTEXT = 320
OPTIONS = ("--strategy", "hmp", "--context", str(CONTEXT))
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
def chat_home(
    models: dict[str, Path], profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestHome]:
    """Three agents that generate together, for the first tests, which leave them running."""
    with home_of("abc", tmp_path_factory.mktemp("home"), models["chat"], profiles, *OPTIONS) as home:
        home.ready().close()
        yield home


def test_greedy_tokens_equal_transformers(chat_home: TestHome) -> None:
    with chat_home.connect() as home:
        answer = home.generate(token_ids=PROMPT, max_tokens=40)
        answer.text()
    assert answer.token_ids == greedy(chat_home.model_dir, PROMPT, 40)
    usage = answer.usage
    assert usage is not None
    assert (usage.num_prompt_tokens, usage.num_tokens, usage.finish_reason) == (len(PROMPT), 40, "length")
    assert usage.first_token_seconds > 0
    assert usage.tokens_per_second > 0


def test_concurrent_answers_equal_single_ones(chat_home: TestHome) -> None:
    prompts = [[1, *range(start, start + length)] for start, length in ((50, 3), (70, 100), (90, 17), (300, 40))]
    with chat_home.connect() as home:

        def ask(prompt: list[int]) -> list[int]:
            answer = home.generate(token_ids=prompt, max_tokens=24)
            answer.text()
            return answer.token_ids

        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(ask, prompts))
    assert together == [greedy(chat_home.model_dir, prompt, 24) for prompt in prompts]


def test_equal_seeds_give_equal_answers(chat_home: TestHome) -> None:
    def ask(seed: int) -> list[int]:
        answer = home.generate(token_ids=PROMPT, max_tokens=16, temperature=1.0, top_k=500, top_p=0.95, seed=seed)
        answer.text()
        return answer.token_ids

    with chat_home.connect() as home:
        assert ask(3) == ask(3) != ask(4)


def test_abandoned_answer_is_cancelled(chat_home: TestHome) -> None:
    with chat_home.connect() as home:
        for _ in range(12):  # more than fit at once, so that each must be freed
            with home.generate(token_ids=PROMPT, max_tokens=CONTEXT - len(PROMPT)) as answer:
                assert [token.token_id for token in itertools.islice(answer, 2)] == answer.token_ids
        again = home.generate(token_ids=PROMPT, max_tokens=CONTEXT - len(PROMPT), timeout_seconds=60.0)
        again.text()
        assert again.usage is not None


def test_streams_go_on_when_the_gateway_dies_or_hangs(chat_home: TestHome) -> None:
    def ask(home: Home) -> list[int]:
        sampling = {"temperature": 1.0, "seed": 7}
        answer = home.generate(token_ids=PROMPT, max_tokens=60, timeout_seconds=CALL_SECONDS, **sampling)  # type: ignore[arg-type]
        answer.text()
        return answer.token_ids

    survive_gateway_faults(chat_home, ask, list.__eq__)


def test_requests_above_limits_and_invalid_ones_are_rejected(chat_home: TestHome) -> None:
    with chat_home.connect() as home:
        with pytest.raises(ContextTooLong) as error:
            home.generate(token_ids=[3] * CONTEXT).text()
        assert (error.value.num_prompt_tokens, error.value.context_tokens) == (CONTEXT, CONTEXT)
        for fields, message in (
            ({"token_ids": [3000]}, "between 0 and 2999"),
            ({"token_ids": []}, "empty"),
            ({"prompt": "hello"}, "tokenizer"),
            ({"token_ids": [1], "stop": "x"}, "tokenizer"),
        ):
            with pytest.raises(BadRequest, match=message):
                home.generate(**fields).text()  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="hearth generate"):
            home.embed(["a model that generates embeds nothing"])
        with pytest.raises(BadRequest, match="hearth generate"):
            home.hidden_states([1, 2])
        assert home.ready()


@pytest.fixture(scope="module")
def home(chat_home: TestHome, models: dict[str, Path]) -> TestHome:
    """The same home, which serves three models at once from now on."""
    for name in ("sentences", "detector"):
        chat_home.add_profiles(models[name])
        hearth(chat_home, "serve", str(models[name]), "--state-dir", str(chat_home.folder / "coordinator"))
    return chat_home


def hearth(home: TestHome, *arguments: str) -> str:
    """The output of a command that succeeds."""
    done = home.run(*arguments)
    assert done.returncode == 0, done.stderr + done.stdout + home.log("coordinator")
    return done.stdout


def reference_scores(models: dict[str, Path]) -> Any:
    session = ort.InferenceSession(str(models["detector"]), providers=["CPUExecutionProvider"])
    return session.run(["scores"], IMAGE)[0]


def checks(models: dict[str, Path]) -> dict[str, Ask]:
    """A request to each model, whose answer must equal that of the reference on one device."""
    tokens = greedy(models["chat"], PROMPT, 12)
    rows = hidden_states(models["sentences"], [TOKENS])
    scores = reference_scores(models)

    def chat(home: Home) -> None:
        answer = home.generate(token_ids=PROMPT, max_tokens=12, timeout_seconds=120.0)
        answer.text()
        assert answer.token_ids == tokens

    def sentences(home: Home) -> None:
        assert np.abs(home.hidden_states(TOKENS, 120.0, model="sentences") - rows).max() < 1e-4

    def detector(home: Home) -> None:
        assert np.abs(home.infer(IMAGE, 120.0)["scores"] - scores).max() < 1e-4

    return {"chat": chat, "sentences": sentences, "detector": detector}


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
        done = home.run(*command, "--model", "other")
        assert done.returncode == 1
        assert "other" in done.stderr
        assert "chat, sentences, detector" in done.stderr
    assert "chat, sentences, detector" in home.run("chat", "--model", "other", said="hello").stderr


def test_one_model_is_stopped_and_started_under_load_of_the_others(home: TestHome, models: dict[str, Path]) -> None:
    asked = checks(models)
    detector = asked.pop("detector")
    with Clients(home, [*asked.values()]) as clients:
        hearth(home, "stop", "detector")
        clients.wait_for_answers()
        with home.connect() as client, pytest.raises(UnknownModel):
            client.infer(IMAGE, model="detector")
        hearth(home, "serve", str(models["detector"]), "--state-dir", str(home.folder / "coordinator"))
    with home.connect() as client:
        detector(client)


@pytest.mark.thorough
def test_coordinator_that_starts_again_serves_all_models(home: TestHome, models: dict[str, Path]) -> None:
    home.kill("coordinator")
    home.start_coordinator(model=False)
    with home.ready() as client:
        for check in checks(models).values():
            check(client)
        assert [each.deployment for each in client.models()] == ["chat", "sentences", "detector"]


def test_requests_of_all_models_finish_when_a_device_is_killed(home: TestHome, models: dict[str, Path]) -> None:
    with Clients(home, [*checks(models).values()]) as clients:
        clients.wait_for_answers()
        home.kill("b")
        clients.wait_for_answers()
    with home.connect() as client:
        plans: dict[str, Any] = {each.deployment: each.devices for each in client.models()}
    assert all("b" not in devices for devices in plans.values())


@pytest.mark.thorough
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
    home.start_coordinator(*OPTIONS)
    with home.ready() as client:
        assert [each.deployment for each in client.models()] == ["chat", "sentences", "detector"]
        for check in checks(models).values():
            check(client)
    wait_for("the end of the life cycle", lambda: listed()["detector"]["phase"] == "unloaded")
    wait_for("the end of its workers", has_no_workers)


@pytest.mark.thorough
def test_pinned_model_takes_the_memory_that_is_left_after_a_loss(home: TestHome, models: dict[str, Path]) -> None:
    """Two models on two devices that have memory for one each."""
    expected = reference_scores(models)
    for name in ("sentences", "detector"):
        hearth(home, "stop", name)
    home.have_agents("a")
    home.start_coordinator("--as", "other", "--no-learn", model=models["detector"])
    with home.ready() as client:
        plan_bytes = served(client)["other"].memory_bytes
        limit = ("--memory-bytes", str(plan_bytes * 3 // 2))
        home.stop("a")
        for name in "ab":
            home.start_agent(name, *limit)
        client.wait_ready(180.0)
        goal = {"kind": "graph", "model_file": str(models["detector"]), "learn": False, "pinned": True}
        client.serve_model(json.dumps(goal), "pinned")
        wait_for("both models", lambda: all(each.ready for each in served(client).values()))
        (lost,) = served(client)["pinned"].devices
        (kept,) = served(client)["other"].devices
        assert {lost, kept} == {"a", "b"}
        home.kill(lost)
        wait_for("the pinned model", lambda: served(client)["pinned"].devices == (kept,), 60.0)
        assert np.abs(client.infer(IMAGE, 60.0, model="pinned")["scores"] - expected).max() < 1e-4
        missing_bytes = wait_for("what is missing", lambda: served(client)["other"].missing_bytes)
        assert 0 < missing_bytes <= plan_bytes
        with pytest.raises(MemoryTaken) as taken:
            client.infer(IMAGE, 1.0, model="other")
        assert taken.value.missing_bytes == missing_bytes
        assert taken.value.holders.startswith("pinned holds ")
        home.start_agent(lost, *limit)
        assert np.abs(client.infer(IMAGE, 60.0, model="other")["scores"] - expected).max() < 1e-4


def served(client: Home) -> dict[str, ServedModel]:
    return {each.deployment: each for each in client.models()}
