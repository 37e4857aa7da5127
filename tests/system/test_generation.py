"""Text generation in a home of real processes: equality with `transformers`, cancellation, limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.gateway_faults import CALL_SECONDS, survive_gateway_faults
from support.home import TestHome, home_of
from support.models import endless_decoder, save_random_model
from support.profiles import MeasuredProfiles

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.reference import greedy

from hearth.client.sync import Home
from hearth.errors import BadRequest, ContextTooLong

pytestmark = pytest.mark.processes

PROMPT = [1, *range(40, 60)]
CONTEXT = 320


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), endless_decoder(), generates=True)


@pytest.fixture(scope="module")
def pair(model_dir: Path, profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """Two agents that generate together, for tests that leave them running."""
    options = ("--strategy", "hmp", "--context", str(CONTEXT))
    with home_of("ab", tmp_path_factory.mktemp("pair"), model_dir, profiles, *options) as home:
        home.ready().close()
        yield home


def test_greedy_tokens_equal_transformers(pair: TestHome) -> None:
    with pair.connect() as home:
        answer = home.generate(token_ids=PROMPT, max_tokens=40)
        answer.text()
    assert answer.token_ids == greedy(pair.model_dir, PROMPT, 40)
    usage = answer.usage
    assert usage is not None
    assert (usage.num_prompt_tokens, usage.num_tokens, usage.finish_reason) == (len(PROMPT), 40, "length")
    assert usage.first_token_seconds > 0
    assert usage.tokens_per_second > 0


def test_concurrent_answers_equal_single_ones(pair: TestHome) -> None:
    prompts = [[1, *range(start, start + length)] for start, length in ((50, 3), (70, 100), (90, 17), (300, 40))]
    with pair.connect() as home:

        def ask(prompt: list[int]) -> list[int]:
            answer = home.generate(token_ids=prompt, max_tokens=24)
            answer.text()
            return answer.token_ids

        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(ask, prompts))
    assert together == [greedy(pair.model_dir, prompt, 24) for prompt in prompts]


def test_equal_seeds_give_equal_answers(pair: TestHome) -> None:
    def ask(seed: int) -> list[int]:
        answer = home.generate(token_ids=PROMPT, max_tokens=16, temperature=1.0, top_k=500, top_p=0.95, seed=seed)
        answer.text()
        return answer.token_ids

    with pair.connect() as home:
        assert ask(3) == ask(3) != ask(4)


def test_abandoned_answer_is_cancelled(pair: TestHome) -> None:
    with pair.connect() as home:
        for _ in range(12):  # more than fit at once, so that each must be freed
            with home.generate(token_ids=PROMPT, max_tokens=CONTEXT - len(PROMPT)) as answer:
                assert [token.token_id for token in itertools.islice(answer, 2)] == answer.token_ids
        again = home.generate(token_ids=PROMPT, max_tokens=CONTEXT - len(PROMPT), timeout_seconds=60.0)
        again.text()
        assert again.usage is not None


def test_streams_go_on_when_the_gateway_dies_or_hangs(pair: TestHome) -> None:
    def ask(home: Home) -> list[int]:
        sampling = {"temperature": 1.0, "seed": 7}
        answer = home.generate(token_ids=PROMPT, max_tokens=60, timeout_seconds=CALL_SECONDS, **sampling)  # type: ignore[arg-type]
        answer.text()
        return answer.token_ids

    survive_gateway_faults(pair, ask, list.__eq__)


def test_requests_above_limits_and_invalid_ones_are_rejected(pair: TestHome) -> None:
    with pair.connect() as home:
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
