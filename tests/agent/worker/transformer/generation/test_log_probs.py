"""Log-probabilities are those of `transformers`: on vocabulary shards, in pipelines, and of guessed tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import save_random_model, small_decoder
from support.plans import make_plan, with_generation
from support.proposers import Remembered

from agent.worker.transformer.generation.sampling import MergedShares, log_prob_share
from coordinator.models.checkpoint.families import read_spec
from hearth.errors import BadMessage
from hearth.plan.transformer import GenerationLimits
from hearth.wire.messages import Sampling

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.engines import EngineCluster, GenerationCluster, free_speculation  # noqa: E402 (needs torch)
from support.reference import decoder  # noqa: E402

PROMPT = [5, 9, 11] * 6
PENALISED = Sampling(temperature=1.5, repetition_penalty=1.3, top_k=9, seed=4)
MAX_ERROR = 1e-4


def reference(logits_V: Any) -> Any:
    largest = logits_V.astype(np.float64).max()
    return logits_V - largest - np.log(np.exp(logits_V.astype(np.float64) - largest).sum())


@given(st.data())
def test_shares_of_ranks_give_those_of_the_whole_vocabulary(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 30))
    values = st.floats(-60, 60, width=32)
    logits_V = np.array(data.draw(st.lists(values, min_size=size, max_size=size)), np.float32)
    cuts = sorted(data.draw(st.lists(st.integers(1, size - 1), max_size=3, unique=True))) if size > 1 else []
    num_top = data.draw(st.integers(0, 20))
    chosen = data.draw(st.integers(0, size - 1))
    shares = []
    for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
        ids = np.array([chosen] if start <= chosen < stop else [], np.int64)
        candidates = np.stack([ids, np.zeros(len(ids))], axis=1).astype(np.float32)
        shares.append(log_prob_share(candidates, logits_V[start:stop], start, num_top))
    merged = MergedShares(shares)
    assert np.concatenate(merged.candidates).tolist() == [[chosen, 0.0]]
    found, expected = merged.log_probs(chosen, num_top), reference(logits_V)
    assert found.chosen.value == pytest.approx(expected[chosen], abs=1e-4)
    order = np.lexsort((np.arange(size), -logits_V))[:num_top]
    assert [each.token_id for each in found.top] == order.tolist()
    assert [each.value for each in found.top] == pytest.approx(expected[order].tolist(), abs=1e-4)


@pytest.mark.parametrize("form", [np.zeros((1, 2)), np.zeros(3), np.array([[5.0, 0.0, 0.0]]), np.array([[-1.0, 0, 0]])])
def test_share_of_a_wrong_form_is_refused(form: Any) -> None:
    with pytest.raises(BadMessage):
        MergedShares([form.astype(np.float32)])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("llama"), small_decoder("llama"), generates=True)


@pytest.mark.parametrize(("strategy", "split"), [("hmp", (1, 1)), ("hmp", (1, 0, 2)), ("pipeline", (1, 1))], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), PENALISED], ids=["greedy", "penalised"])
def test_log_probs_are_those_of_transformers(
    strategy: str, split: tuple[float, ...], sampling: Sampling, model_dir: Path
) -> None:
    limits = GenerationLimits(kv_tokens=512, max_sequences=12, prefill_rows=64)
    plan = with_generation(make_plan(read_spec(model_dir), strategy, split), limits)
    answer: list[int] = []
    for drafted in (0, 6):
        speculation = free_speculation(partial(Remembered, [PROMPT + answer]))
        with EngineCluster(model_dir, plan) as cluster:
            home = GenerationCluster(cluster, speculation)
            request = home.submit(PROMPT, 16, sampling, max_drafted=drafted, top_log_probs=5)
            home.run()
        assert not drafted or (home.answers[request] == answer and home.ended[request].num_accepted > 0)
        answer = home.answers[request]
        with torch.inference_mode():
            logits_TV = decoder(model_dir)(torch.tensor([PROMPT + answer])).logits[0]
        expected_TV = torch.log_softmax(logits_TV.double(), -1)[len(PROMPT) - 1 : -1].numpy()
        found = home.log_probs[request]
        assert [each.chosen.token_id for each in found] == answer
        for each, expected_V in zip(found, expected_TV, strict=True):
            assert each.chosen.value == pytest.approx(expected_V[each.chosen.token_id], abs=MAX_ERROR)
            assert [top.value for top in each.top] == pytest.approx(sorted(expected_V)[:-6:-1], abs=MAX_ERROR)
            assert [top.value for top in each.top] == pytest.approx(
                [expected_V[top.token_id] for top in each.top], abs=MAX_ERROR
            )
