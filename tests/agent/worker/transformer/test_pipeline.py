"""Pipelines: whole layers on each device, several steps in flight, tokens equal to `transformers`."""

from __future__ import annotations

import random
from collections import deque
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import mostly_slow
from support.models import decoder_maker, prompts_of, save_random_model, small_bert
from support.plans import make_plan, with_generation, with_seq_len

from agent.worker.transformer.generation.scheduler import Scheduler
from agent.worker.transformer.generation.sequence import SequenceState
from coordinator.models.checkpoint.families import read_spec
from hearth.errors import StepFailed
from hearth.plan.common import WireFormat
from hearth.plan.geometry import spans
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits, Pipeline
from hearth.wire.messages import GenerateTokens, Sampling, StepOrder

pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.engines import EngineCluster, GenerationCluster
from support.exactness import check_greedy_answers, check_logits
from support.reference import greedy, hidden_states

LAYERS = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return decoder_maker(tmp_path_factory, LAYERS)


def staged(spec: ModelSpec, layers: tuple[int, ...], prefill_rows: int = 512, kv_tokens: int = 4096) -> TransformerPlan:
    plan = make_plan(spec, "pipeline", layers)
    assert plan.body.layers == layers
    limits = GenerationLimits(kv_tokens=kv_tokens, max_sequences=8, prefill_rows=prefill_rows)
    return with_generation(plan, limits)


# ---- exactness ------------------------------------------------------------------------------------------------------


STAGES = {
    "gpt2": (3, 2), "opt": (1, 1, 2, 1), "llama": (2, 1, 2), "qwen2": (4, 1), "qwen3": (1, 3, 1), "mistral": (1, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "prefill_rows"),
    mostly_slow(product(STAGES, (512, 24)), lambda family, rows: rows == 24 or family in ("gpt2", "llama")),
)
def test_greedy_tokens_equal_transformers(family: str, prefill_rows: int, models: Any) -> None:
    """A mixed batch; prompts in one step, or in chunks of which several are in flight."""
    model_dir, spec = models(family)
    with EngineCluster(model_dir, staged(spec, STAGES[family], prefill_rows)) as cluster:
        check_greedy_answers(cluster, model_dir, [1, 7, 61, 130], 12)


def test_long_prompts_and_long_answers(models: Any) -> None:
    model_dir, spec = models("llama")
    with EngineCluster(model_dir, staged(spec, (2, 3), 100)) as cluster:
        check_greedy_answers(cluster, model_dir, [500], 64)


def test_single_stage_equals_transformers(models: Any) -> None:
    model_dir, spec = models("gpt2")
    with EngineCluster(model_dir, staged(spec, (5,), 32)) as cluster:
        check_greedy_answers(cluster, model_dir, [70], 8)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_logits_equal_transformers(family: str, models: Any) -> None:
    model_dir, spec = models(family)
    with EngineCluster(model_dir, staged(spec, (2, 1, 2))) as cluster:
        check_logits(cluster, model_dir)
        assert cluster.rows_by_rank == [160, 0, 0]


def test_encoder_output_is_on_the_last_stage(tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "bert", small_bert(num_hidden_layers=4))
    spec = read_spec(model_dir)
    rng = np.random.default_rng(7)
    sequences = [rng.integers(0, spec.vocab_size, n).tolist() for n in (17, 1, 40)]
    expected = hidden_states(model_dir, sequences)
    for layers in ((1, 2, 1), (3, 1), (4,)):
        with EngineCluster(model_dir, make_plan(spec, "pipeline", layers)) as cluster:
            rows, answers = cluster.run(sequences, trace=True)
            rows_by_rank = cluster.rows_by_rank
            sums, _ = cluster.run(sequences, output="mean")
        assert np.abs(rows - expected).max() < 1e-4, layers
        assert rows_by_rank == [0] * (len(layers) - 1) + [58]
        assert np.allclose(sums[0], expected[:17].sum(axis=0), atol=1e-3)
        sent = [sum(event.num_bytes for event in answer.trace if event.lane == "send") for answer in answers]
        rows_bytes = 58 * 96 * 4
        assert all(rows_bytes <= each < 1.05 * rows_bytes for each in sent[:-1])  # one hop each and nothing more
        assert sent[-1] == 0


def test_lossy_wire_format_stays_close(models: Any) -> None:
    model_dir, spec = models("llama")
    sequences = prompts_of(spec, 60)
    rows = []
    for values in ("exact", "fp16"):
        plan = staged(spec, (2, 2, 1)).model_copy(update={"wire": WireFormat(values=values, lz4="on")})
        with EngineCluster(model_dir, plan) as cluster:
            rows.append(cluster.run(sequences)[0])
    assert 0 < np.abs(rows[0] - rows[1]).max() < 0.02


# ---- memory of a stage ----------------------------------------------------------------------------------------------


def test_stage_memory_covers_its_layers_only(models: Any) -> None:
    from coordinator.plan.transformer.strategies import rank_memory

    for family in ("gpt2", "llama"):  # tied, and with a separate output head
        model_dir, spec = models(family)
        plan = staged(spec, (1, 3, 1), kv_tokens=200)
        with EngineCluster(model_dir, plan) as cluster:
            home = GenerationCluster(cluster)
            request = home.submit(prompts_of(spec, 20)[0], 30)
            for _ in range(6):
                home.step()
            planned = [rank_memory(spec, with_seq_len(plan.body, 64, plan.body.generation), rank) for rank in range(3)]
            for generation, shard, use, count in zip(
                cluster.executors, cluster.shards, planned, plan.body.layers, strict=True
            ):
                held = shard.num_bytes()  # packed matrices are padded to blocks of 64 outputs
                assert use.weights + use.embeddings <= held < 1.4 * (use.weights + use.embeddings)
                cached = generation._memory.values
                assert cached.shape[0] == count
                assert use.kv_cache == cached.nbytes
            assert [use.embeddings > 0 for use in planned] == [True, False, False]
            home.run()
            assert len(home.answers[request]) == 30


# ---- several steps in flight ----------------------------------------------------------------------------------------


def test_chunks_and_decode_groups_are_in_flight_concurrently(models: Any) -> None:
    model_dir, spec = models("llama")
    with EngineCluster(model_dir, staged(spec, (2, 1, 2), prefill_rows=10)) as cluster:
        home, generation = GenerationCluster(cluster), cluster.executors[0]
        cluster.hub.latency_seconds = 0.03  # far longer than a chunk takes: none returns before the next starts
        (prompt,) = prompts_of(spec, 100)
        request = home.submit(prompt, 6)
        most = 0
        while not home.answers[request]:
            home.step()
            most = max(most, generation.num_in_flight)
        assert most == 4  # of 5 allowed: the leader waits for the oldest once the last has started
        home.run()
        assert home.answers[request] == greedy(model_dir, prompt, 6)
        prompts = prompts_of(spec, 5, 6, 7, 4)
        requests = [home.submit(prompt, 20) for prompt in prompts]
        orders: list[int] = []
        while not home.leader.idle:
            home.step()
            orders.append(generation.num_in_flight)
        assert max(orders[len(orders) // 2 :]) >= 2  # decoding runs in groups
        assert [home.answers[each] for each in requests] == [greedy(model_dir, prompt, 20) for prompt in prompts]


def test_requests_start_and_end_during_steps_in_flight(models: Any) -> None:
    model_dir, spec = models("llama")
    prompts = prompts_of(spec, 30, 40, 10, 25, 5)
    with EngineCluster(model_dir, staged(spec, (1, 2, 2), 16, kv_tokens=120)) as cluster:
        home = GenerationCluster(cluster)
        first = [home.submit(prompt, 20) for prompt in prompts[:3]]
        for _ in range(9):
            home.step()
        home.leader.cancel(first[0])
        later = [home.submit(prompt, 20) for prompt in prompts[3:]]
        for _ in range(3):
            home.step()
        home.leader.cancel(later[0])
        home.run()
        for request, prompt in zip([*first[1:], later[1]], [*prompts[1:3], prompts[4]], strict=True):
            assert home.answers[request] == greedy(model_dir, prompt, 20)
        assert home.leader.idle
        assert [generation.num_sequences for generation in cluster.executors[:1]] == [0]


def test_generation_resumes_on_another_plan_with_equal_tokens(models: Any) -> None:
    """With sampling, only the seed decides. From three stages to two, to tensor parallel, to one device."""
    model_dir, spec = models("llama")
    (prompt,) = prompts_of(spec, 20)
    sampling = Sampling(temperature=1.2, top_p=0.9, repetition_penalty=1.2, seed=11)
    plans = [
        staged(spec, (2, 1, 2)), staged(spec, (4, 1)), make_plan(spec, "hmp", (1, 2)), make_plan(spec, "local", (1,)),
    ]  # fmt: skip
    answers, resumed = [], list[int]()
    for plan in plans:
        with EngineCluster(model_dir, plan) as cluster:
            home = GenerationCluster(cluster)
            answers += home.answer([prompt], 20, sampling)
            rest = home.submit([*prompt, *resumed], 20 - len(resumed), sampling, first_index=len(resumed))
            while len(home.answers[rest]) < 5 and not home.leader.idle:
                home.step()
            home.leader.cancel(rest)
            home.run()
            resumed += home.answers[rest]
    assert answers == [answers[0]] * 4
    assert resumed == answers[0]


def test_silent_stage_times_out(models: Any) -> None:
    model_dir, spec = models("llama")
    plan = staged(spec, (2, 2, 1))
    with EngineCluster(model_dir, plan) as cluster:
        home = GenerationCluster(cluster)
        for generation in cluster.executors:
            generation.peer_timeout_seconds = 0.3
        home.submit([5, 6, 7], 50)
        for _ in range(4):
            home.step()
        cluster.hub.cut(1, 2)
        with pytest.raises(StepFailed, match="HEAD_ROWS"):
            home.run()


# ---- the scheduler, while steps are in flight -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_random_orders_in_flight_respect_token_dependencies(seed: int) -> None:
    """Each sequence's rows come in order, never before the token they need, and all sequences end."""
    rng = random.Random(seed)
    limits = GenerationLimits(kv_tokens=rng.randint(60, 300), max_sequences=6, prefill_rows=rng.choice([1, 5, 64]))
    depth = rng.randint(2, 7)
    scheduler = Scheduler(limits, num_groups=rng.randint(1, 4))
    flights: deque[StepOrder] = deque()
    waiting: set[int] = set()  # KV caches with a sampled row in flight
    wanted: dict[int, int] = {}
    number = 0
    for turn in range(3000):
        if turn < 400 and rng.random() < 0.2:
            number += 1
            prompt, most = rng.randint(1, 30), rng.randint(1, 10)
            request = GenerateTokens(holder="test", epoch=1, max_tokens=most, stop_ids=())
            scheduler.add(SequenceState(number, request, list(range(10, 10 + prompt)), prompt))
            wanted[number] = most
        if rng.random() < 0.02 and wanted:
            cancelled = rng.choice(list(wanted))
            scheduler.remove(cancelled)
            del wanted[cancelled]
        order = scheduler.next_order() if len(flights) < depth else None
        if order is not None:
            flights.append(order)
            waiting -= set(order.freed)
            for rows in order.rows:
                assert rows.sequence not in waiting
                if rows.sample:
                    waiting.add(rows.sequence)
        elif flights:
            for rows in flights.popleft().rows:
                sequence = scheduler.append_tokens(rows.sequence, [7])[0] if rows.sample else None
                if sequence is not None:
                    waiting.remove(rows.sequence)
                    if sequence.ended:
                        assert len(sequence.generated) == wanted.pop(sequence.number)
                        scheduler.remove(sequence.number)
        elif turn >= 400 and scheduler.idle:
            break
    assert scheduler.idle
    assert not wanted
    assert not flights


def test_decode_groups_alternate() -> None:
    scheduler = Scheduler(GenerationLimits(kv_tokens=500, max_sequences=8, prefill_rows=64), num_groups=2)
    for number in range(1, 6):
        request = GenerateTokens(holder="test", epoch=1, max_tokens=20, stop_ids=())
        scheduler.add(SequenceState(number, request, [5, 6], 2))
    first = scheduler.next_order()
    assert first.kind == "prefill"
    assert scheduler.next_order() is None
    for rows in first.rows:
        scheduler.append_tokens(rows.sequence, [9])
    groups = []
    for _ in range(2):
        order = scheduler.next_order()
        groups.append([rows.sequence for rows in order.rows])
    assert groups == [[1, 2, 3], [4, 5]]
    assert scheduler.next_order() is None
    for number in (1, 2, 3):
        scheduler.append_tokens(number, [9])
    again = scheduler.next_order()
    assert [rows.sequence for rows in again.rows] == [1, 2, 3]


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_stages_are_consecutive_layers(models: Any) -> None:
    spec = models("llama")[1]
    body = Pipeline.of(spec, (2, 1, 2), 64)
    assert [body.layers_of(rank, LAYERS) for rank in range(3)] == list(spans((2, 1, 2)))
    held = [[rank for rank in range(3) if body.layer_share(rank, layer).qkv.size] for layer in range(LAYERS)]
    assert held == [[0], [0], [1], [2], [2]]
    assert body.row_weights == (1.0, 0.0, 0.0)
    assert body.max_steps_in_flight == 5
