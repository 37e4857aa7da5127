"""Greedy tokens equal those of `transformers` on one device: every family, strategy, split, prompt length and batch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.cases import mostly_slow
from support.models import FAMILIES, decoder_maker, prompts_of, save_random_model, small_decoder
from support.plans import make_plan, with_generation
from support.waiting import wait_for

from coordinator.models.checkpoint.families import read_spec
from coordinator.plan.transformer.strategies import rank_memory
from hearth.errors import BadRequest, FrameTooLarge, StepFailed
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import SEQUENCE, GenerationLimits, LayerMode
from hearth.wire.messages import Sampling, StepOrder

pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.engines import EngineCluster, GenerationCluster
from support.exactness import check_greedy_answers, check_logits, quantised_error
from support.reference import greedy

R = "replicated"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return decoder_maker(tmp_path_factory)


def generating_plan(
    spec: ModelSpec,
    strategy: str,
    split: tuple[float, ...],
    prefill_rows: int = 512,
    kv_tokens: int = 4096,
    **more: Any,
) -> TransformerPlan:
    plan = make_plan(spec, strategy, split, **more)
    limits = GenerationLimits(kv_tokens=kv_tokens, max_sequences=8, prefill_rows=prefill_rows)
    return with_generation(plan, limits)


@pytest.mark.parametrize(("strategy", "split"), [("hmp", (2, 1, 1)), ("pipeline", (1, 1))])
def test_logits_in_another_format_are_compared_with_exact_ones(
    strategy: str, split: tuple[int, ...], models: Any
) -> None:
    model_dir, spec = models("llama")
    prompt, other = prompts_of(spec, 30, 20)
    all_logits = {"sampling": Sampling(temperature=1.0, top_p=0.999999, seed=5)}
    with EngineCluster(model_dir, generating_plan(spec, strategy, split)) as cluster:
        home = GenerationCluster(cluster)

        def error(tokens: list[int], **fields: Any) -> float | None:
            request = home.submit(tokens, 6, **all_logits, **fields)
            home.run()
            return home.ended[request].logit_error

        assert error(prompt, values="exact", logits="keep") is None
        assert error(other, values="exact", logits="compare") is None  # after other tokens
        errors = [error(prompt, values=values, logits="compare") for values in ("exact", "fp16", "bf16", "int8")]
        assert errors[0] == pytest.approx(0.0, abs=1e-6)
        assert None not in errors
        assert errors[1:] == sorted(errors[1:]), errors
        assert 1e-5 < errors[1] < errors[3] < 0.2
        assert error(prompt) is None  # an ordinary request: what was kept is dropped
        assert error(prompt, logits="compare") is None


EVERYWHERE = [("local", (1,)), ("hmp", (2, 1, 3)), ("hmp", (1, 0, 2)), ("sp", (3, 1)), ("megatron-tp", (1, 2, 1, 1))]
FURTHER = [("hmp", (1, 1)), ("hmp", (3, 1)), ("hmp", (1, 2, 1, 1)), ("sp", (1, 2, 1, 1)), ("megatron-tp", (2, 1, 3))]
CASES: list[Any] = [(family, *case) for family in FAMILIES for case in EVERYWHERE]
CASES += mostly_slow(
    [(family, *case) for family in ("llama", "gpt2") for case in FURTHER], lambda *case: case[0] == "llama"
)


@pytest.mark.parametrize(("family", "strategy", "split"), CASES, ids=str)
def test_greedy_tokens_equal_transformers(family: str, strategy: str, split: tuple[int, ...], models: Any) -> None:
    rows = tuple(max(share, 0.5) for share in split) if strategy == "sp" else None
    model_dir, spec = models(family)
    plan = generating_plan(spec, strategy, split, row_weights=rows)
    with EngineCluster(model_dir, plan) as cluster:
        check_greedy_answers(cluster, model_dir, [1, 7, 61, 100], 16)


@pytest.mark.parametrize("family", ["gpt2", "llama"])  # a tied head, and one of its own
@pytest.mark.parametrize(("strategy", "split", "rows"), [("hmp", (2, 1, 1), None), ("hmp", (1, 2, 0), (1, 0, 1))])
def test_tokens_with_a_replicated_embedding_equal_transformers(
    family: str, strategy: str, split: tuple[int, ...], rows: tuple[int, ...] | None, models: Any
) -> None:
    model_dir, spec = models(family)
    plan = generating_plan(spec, strategy, split, row_weights=rows, embedding="replicated")
    with EngineCluster(model_dir, plan) as cluster:
        check_greedy_answers(cluster, model_dir, [1, 61], 8)
        held = [shard.num_bytes() for shard in cluster.shards]
    sharded = generating_plan(spec, strategy, split, row_weights=rows)
    with EngineCluster(model_dir, sharded) as cluster:
        for rank, (shard, num_bytes) in enumerate(zip(cluster.shards, held, strict=True)):
            more, less = (rank_memory(spec, each.body, rank).embeddings for each in (plan, sharded))
            assert more - less == (spec.vocab_size - plan.body.vocabulary[rank]) * spec.hidden_size * 4
            assert num_bytes - shard.num_bytes() == more - less  # a tied head is a part of the embedding


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_replicated_embedding_changes_no_token_in_other_weight_formats(weights: str, family: str, models: Any) -> None:
    model_dir, spec = models(family)
    spec = spec.model_copy(update={"weights": weights})
    (prompt,) = prompts_of(spec, 21)
    answers = []
    for embedding in ("sharded", "replicated"):
        with EngineCluster(model_dir, generating_plan(spec, "hmp", (1, 2), embedding=embedding)) as cluster:
            answers += GenerationCluster(cluster).answer([prompt], 8)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("strategy", ["hmp", "sp", "megatron-tp", "pipeline"])
def test_tiles_that_arrive_twice_change_no_token(strategy: str, models: Any) -> None:
    """After a connection broke, the newest tiles are sent again."""
    model_dir, spec = models("llama")
    with EngineCluster(model_dir, generating_plan(spec, strategy, (1, 1))) as cluster:
        cluster.hub.repeats = True
        check_greedy_answers(cluster, model_dir, [1, 7, 61], 12)


MODES = [LayerMode(qkv=R), LayerMode(out=R, mlp=R), LayerMode(qkv=R, out=R, mlp=R), SEQUENCE]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_replicated_groups_decode_with_their_share(family: str, mode: LayerMode, models: Any) -> None:
    model_dir, spec = models(family)
    plan = generating_plan(spec, "hmp", (2, 1, 3), modes=[mode, LayerMode(), mode])
    with EngineCluster(model_dir, plan) as cluster:
        check_greedy_answers(cluster, model_dir, [37], 16)


@pytest.mark.parametrize(("family", "prefill_rows"), [*((family, 32) for family in FAMILIES), ("llama", 5)])
def test_chunked_prompts_equal_transformers(family: str, prefill_rows: int, models: Any) -> None:
    model_dir, spec = models(family)
    plan = generating_plan(spec, "hmp", (2, 1), prefill_rows=prefill_rows)
    with EngineCluster(model_dir, plan) as cluster:
        check_greedy_answers(cluster, model_dir, [150, 3], 8)


@pytest.mark.parametrize(
    ("family", "strategy", "mode"),
    [
        ("llama", "hmp", None), ("mistral", "hmp", None), ("qwen3", "megatron-tp", None),
        ("gpt2", "hmp", LayerMode(qkv=R, mlp=R)),
    ],
    ids=str,
)  # fmt: skip
def test_micro_batches_equal_transformers(family: str, strategy: str, mode: LayerMode | None, models: Any) -> None:
    """Prompts that cross the cut between micro-batches, that have a cached chunk, or that are too short to split."""
    model_dir, spec = models(family)
    plan = generating_plan(spec, strategy, (2, 1), prefill_rows=300, modes=[mode] * 3 if mode else ())
    plan = plan.model_copy(update={"body": plan.body.model_copy(update={"micro_batches": 2})})
    with EngineCluster(model_dir, plan) as cluster:
        check_greedy_answers(cluster, model_dir, [150, 211, 3, 40], 8)


# Families differ at length by their positions: learned, rotary, and rotary in a window.
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, lambda family: family in ("gpt2", "llama", "mistral")))
def test_long_prompts_and_long_answers(family: str, models: Any) -> None:
    model_dir, spec = models(family)
    with EngineCluster(model_dir, generating_plan(spec, "hmp", (1, 2, 1))) as cluster:
        check_greedy_answers(cluster, model_dir, [500], 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, models: Any) -> None:
    model_dir, spec = models(family)
    with EngineCluster(model_dir, generating_plan(spec, "hmp", (2, 1, 1))) as cluster:
        check_logits(cluster, model_dir)


ROPE_SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 160},
]  # fmt: skip


@pytest.mark.parametrize("scaling", ROPE_SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_rotary_scalings_equal_transformers(scaling: dict[str, Any], tmp_path: Path) -> None:
    config = small_decoder("llama", rope_theta=10000.0, rope_scaling=scaling)  # as transformers before 5 wants it, too
    model_dir = save_random_model(tmp_path / "model", config, generates=True)
    spec = read_spec(model_dir)
    with EngineCluster(model_dir, generating_plan(spec, "hmp", (2, 1))) as cluster:
        check_greedy_answers(cluster, model_dir, [200], 16)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, seed=5),
        Sampling(temperature=1.5, top_k=20, seed=6),
        Sampling(temperature=1.0, top_p=0.8, min_p=0.01, seed=7),
        Sampling(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.3, seed=8),
    ],
    ids=str,
)
def test_seed_gives_equal_tokens_on_any_number_of_devices(sampling: Sampling, models: Any) -> None:
    model_dir, spec = models("llama")
    (prompt,) = prompts_of(spec, 20)
    answers = []
    for split in ((1,), (1, 1), (2, 1, 3)):
        plan = generating_plan(spec, "local" if len(split) == 1 else "hmp", split)
        with EngineCluster(model_dir, plan) as cluster:
            home = GenerationCluster(cluster)
            answers += home.answer([prompt], 20, sampling)
            # Resume, as after a device loss.
            assert home.answer([[*prompt, *answers[0][:7]]], 13, sampling, first_index=7) == [answers[0][7:]]
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 3


def test_continuous_batching_and_cancellation(models: Any) -> None:
    """Under a KV budget each request gets the same tokens as alone, and cancelling frees memory immediately."""
    model_dir, spec = models("llama")
    plan = generating_plan(spec, "hmp", (1, 2), kv_tokens=112)
    prompts = prompts_of(spec, 30, 40, 10, 25, 5)
    with EngineCluster(model_dir, plan) as cluster:
        home = GenerationCluster(cluster)
        first = [home.submit(prompt, 20) for prompt in prompts[:3]]
        for _ in range(6):
            home.step()
        assert {generation.num_sequences for generation in cluster.executors[:1]} == {2}  # the third does not fit
        home.leader.cancel(first[0])
        later = [home.submit(prompt, 20) for prompt in prompts[3:]]
        home.run()
        assert len(home.answers[first[0]]) < 20
        for request, prompt in zip([*first[1:], *later], prompts[1:], strict=True):
            assert home.answers[request] == greedy(model_dir, prompt, 20)
            assert home.ended[request].num_tokens == 20
        assert cluster.executors[0].num_sequences == 0


@pytest.mark.parametrize("final", [True, False])
def test_cancelled_stream_keeps_its_blocks_only_if_it_may_return(final: bool, models: Any) -> None:
    model_dir, _ = models("llama")
    (prompt,) = prompts_of(read_spec(model_dir), 40)
    with EngineCluster(model_dir, generating_plan(read_spec(model_dir), "hmp", (1, 2))) as cluster:
        home = GenerationCluster(cluster)
        num_free = home.leader._scheduler.num_free_blocks
        first = home.submit(prompt, 20, stream="story")
        while len(home.answers[first]) < 5:
            home.step()
        home.leader.cancel(first, final)
        home.run()
        assert (home.leader._scheduler.num_free_blocks == num_free) == final
        assert cluster.executors[0].num_sequences == int(not final)
        assert (home.leader.seconds_until_due is None) == final


@pytest.mark.parametrize("strategy", ["hmp", "sp", "pipeline"])
def test_preempted_and_shared_sequences_equal_transformers(strategy: str, models: Any) -> None:
    """Answers outgrow the KV cache, so that sequences are computed again; later ones take the rows of equal prefixes."""
    model_dir, spec = models("llama")
    prefix, *rest = prompts_of(spec, 40, 3, 9, 20)
    prompts = [prefix, *(prefix + each for each in rest)]
    with EngineCluster(model_dir, generating_plan(spec, strategy, (1, 2), kv_tokens=112, prefill_rows=100)) as cluster:
        home = GenerationCluster(cluster)
        assert home.answer(prompts, 40, prefix_scope="app") == [greedy(model_dir, prompt, 40) for prompt in prompts]
        assert home.leader._scheduler._num_caches > len(prompts)  # some were preempted
        kept = home.submit(prompts[0], 5, prefix_scope="app")
        home.run()
        assert home.answers[kept] == greedy(model_dir, prompts[0], 40)[:5]
        assert home.ended[kept].num_kept_rows == (0 if strategy == "sp" else 32)


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize("strategy", ["hmp", "pipeline"])
def test_stream_goes_on_for_the_next_coordinator(strategy: str, cancelled: bool, models: Any) -> None:
    """It asks again for a stream that the one before has begun: equal tokens, and no row is computed again."""
    model_dir, spec = models("llama")
    (prompt,) = prompts_of(spec, 30)
    sampling = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=11)
    with EngineCluster(model_dir, generating_plan(spec, strategy, (1, 2))) as cluster:
        home = GenerationCluster(cluster)
        whole = home.submit(prompt, 20, sampling)
        home.run()
        first = home.submit(prompt, 20, sampling, stream="story")
        while len(home.answers[first]) < 12:
            home.step()
        received = home.answers[first][:9]  # the others were lost on their way
        if cancelled:
            home.leader.cancel(first)
            home.submit(prompt[:5], 2)  # further steps
            for _ in range(3):
                home.step()
        home.refused.clear()
        rest = home.submit([*prompt, *received], 11, sampling, stream="story", first_index=9)
        assert home.answers[rest][:3] == home.answers[first][9:12]
        assert home.refused == ([] if cancelled else [first])
        home.run()
        assert received + home.answers[rest] == home.answers[whole]
        end = home.ended[rest]
        assert (end.num_prompt_tokens, end.num_tokens, end.num_kept_rows) == (39, 11, 39)
        again = home.submit([*prompt, *received], 11, sampling, stream="story", first_index=9)  # its answer was lost
        assert home.leader.idle
        assert home.answers[again] == home.answers[rest]
        assert home.ended[again].num_kept_rows == 39


@pytest.mark.parametrize("rows", [None, (1, 1)], ids=["no rows", "rows"])
def test_slow_rank_without_heads_and_columns_gets_every_order(rows: tuple[int, ...] | None, models: Any) -> None:
    """Rank 0 needs nothing that this rank computes, and yet must not be further ahead than tiles are kept."""
    model_dir, spec = models("llama")
    with EngineCluster(model_dir, generating_plan(spec, "hmp", (1, 0), row_weights=rows)) as cluster:
        slow, ended, pauses = cluster.executors[1], threading.Event(), iter([1.0])
        execute = slow.execute_next

        def execute_slowly() -> StepOrder:
            order = execute()
            ended.wait(next(pauses, 0.0))
            return order

        slow.execute_next = execute_slowly  # type: ignore[method-assign]
        home = GenerationCluster(cluster)
        (prompt,) = prompts_of(spec, 20)
        request = home.submit(prompt, 80)
        home.run()
        ended.set()
        assert home.answers[request] == greedy(model_dir, prompt, 80)
        wait_for("the end of the sequence on the slow rank", lambda: not slow.num_sequences)
        assert cluster.communicators[1].dropped == 0


def test_late_rank_gets_every_order_without_rows(models: Any) -> None:
    """Rank 0 waits for nobody after such an order, and sends it only once."""
    model_dir, _ = models("llama")
    orders = [StepOrder(kind="decode", rows=(), freed=(number,)) for number in range(1, 33)]
    executed: list[StepOrder] = []
    with EngineCluster(model_dir, generating_plan(read_spec(model_dir), "hmp", (1, 1))) as cluster:
        leader, late = cluster.executors

        def execute_all() -> None:
            for _ in orders:
                executed.append(late.execute_next())

        for order in orders:
            leader.begin(order)
            leader.finish()
        threading.Thread(target=execute_all, daemon=True).start()
        wait_for("all orders", lambda: executed == orders)


def test_stop_tokens_end_a_sequence(models: Any) -> None:
    model_dir, spec = models("gpt2")
    (prompt,) = prompts_of(spec, 12)
    expected = greedy(model_dir, prompt, 20)
    stop = expected[5]
    with EngineCluster(model_dir, generating_plan(spec, "hmp", (1, 1))) as cluster:
        home = GenerationCluster(cluster)
        assert home.answer([prompt], 20, stop_ids=(stop,)) == [expected[: expected.index(stop) + 1]]
        (end,) = home.ended.values()
        assert end.reason == "stop"


def test_invalid_requests_are_rejected(models: Any) -> None:
    model_dir, spec = models("gpt2")
    with EngineCluster(model_dir, generating_plan(spec, "local", (1,), kv_tokens=64)) as cluster:
        home = GenerationCluster(cluster)
        with pytest.raises(BadRequest, match="non-empty"):
            home.submit([], 5)
        with pytest.raises(BadRequest, match="between 0 and 2999"):
            home.submit([3000], 5)
        with pytest.raises(BadRequest, match="room for 64"):
            home.submit([5] * 60, 6)
        home.submit([5] * 60, 5)
        home.run()


@pytest.mark.parametrize("strategy", ["hmp", "pipeline"])
def test_lost_peer_fails_running_and_later_requests(strategy: str, models: Any) -> None:
    model_dir, spec = models("llama")
    with EngineCluster(model_dir, generating_plan(spec, strategy, (1, 1))) as cluster:
        home = GenerationCluster(cluster)
        home.submit([5, 6, 7], 50)
        for _ in range(3):
            home.step()
        cluster.communicators[0].abort(StepFailed(device="device1", reason="it is gone"))
        with pytest.raises(StepFailed, match="it is gone"):
            home.run()
        assert home.leader.idle
        with pytest.raises(StepFailed, match="it is gone"):
            home.submit([5, 6, 7], 50)


def test_frame_too_large_ends_the_plan(models: Any) -> None:
    """The other ranks wait for that step, so the coordinator must deploy again: the scope must not be `request`."""
    model_dir, _ = models("llama")
    with EngineCluster(model_dir, generating_plan(read_spec(model_dir), "hmp", (1, 1))) as cluster:
        home = GenerationCluster(cluster)
        home.submit([5, 6, 7], 50)
        home.step()
        cluster.communicators[0].abort(FrameTooLarge(num_bytes=2, cap_bytes=1))
        with pytest.raises(StepFailed, match="larger than the cap") as error:
            home.run()
        assert error.value.scope == "worker"


@pytest.mark.parametrize(
    ("weights", "tolerance"), [("float16", 0.01), ("bfloat16", 0.03), ("int8", 0.04), ("int4", 0.3)]
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_quantised_weights_stay_close(family: str, weights: str, tolerance: float, models: Any) -> None:
    model_dir, spec = models(family)
    spec = spec.model_copy(update={"weights": weights})
    with EngineCluster(model_dir, generating_plan(spec, "hmp", (2, 1))) as cluster:
        errors = [shard.weight_error() for shard in cluster.shards]
        assert all(1e-4 < error < tolerance for error in errors), errors
        assert quantised_error(cluster, model_dir) < tolerance
