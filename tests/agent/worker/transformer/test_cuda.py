"""The worker on a CUDA device; where there is none, on its double (`support.cuda_double`), which refuses what CUDA refuses.

The normal run takes one family, strategy and format of each kind of test; all others are `slow`.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import mostly_slow
from support.models import (
    FAMILIES,
    FORMAT_ERRORS,
    decoder_maker,
    prompts_of,
    save_random_model,
    small_bert,
    small_decoder,
)
from support.plans import make_plan, with_generation

from coordinator.models.checkpoint.families import read_spec
from hearth.grammars import Vocabulary
from hearth.plan.model_spec import KvFormat, ModelSpec, WeightFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import KV_BLOCK_TOKENS, GenerationLimits, Strategy

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.cuda_double import CUDA, gpu  # noqa: E402 (needs torch)
from support.engines import EngineCluster, GenerationCluster, free_speculation  # noqa: E402
from support.exactness import quantised_error  # noqa: E402
from support.reference import decoder, greedy, hidden_states  # noqa: E402
from transformers import BertConfig  # noqa: E402

from agent.worker.transformer.comm.staging import CudaStaging  # noqa: E402
from agent.worker.transformer.generation.speculation import Speculation  # noqa: E402
from agent.worker.transformer.matrices import empty_matrix  # noqa: E402
from agent.worker.transformer.profiler import profile_blocks  # noqa: E402

HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device here")
TOLERANCE = 1e-4
SHARED = np.random.default_rng(1).integers(3, 2000, 3 * KV_BLOCK_TOKENS).tolist()  # a common beginning of prompts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return decoder_maker(tmp_path_factory)


def generating_plan(spec: ModelSpec, strategy: Strategy, split: tuple[int, ...]) -> TransformerPlan:
    limits = GenerationLimits(kv_tokens=60 * KV_BLOCK_TOKENS, max_sequences=8, prefill_rows=64)
    return with_generation(make_plan(spec, strategy, split), limits)


def answers(
    model_dir: Path,
    plan: TransformerPlan,
    prompts: list[list[int]],
    count: int = 8,
    speculation: Speculation | None = None,
    **fields: Any,
) -> tuple[list[list[int]], GenerationCluster]:
    """The answers to all prompts at once, on CUDA."""
    with gpu(), EngineCluster(model_dir, plan, compute_device="cuda") as cluster:
        home = GenerationCluster(cluster, speculation)
        return home.answer(prompts, count, **fields), home


# ---- encoders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "split"),
    mostly_slow(
        product(["hmp", "sp", "megatron-tp"], [(1,), (2, 1), (1, 0, 2)]), lambda *case: case == ("hmp", (2, 1))
    ),
    ids=str,
)
def test_encoder_of_every_strategy_equals_transformers(
    strategy: Strategy, split: tuple[int, ...], tmp_path: Path
) -> None:
    model_dir = save_random_model(tmp_path / "model", small_bert())
    spec = read_spec(model_dir)
    of_lengths = prompts_of(spec, 1, 33, 64)
    expected = [hidden_states(model_dir, [token_ids]) for token_ids in of_lengths]
    with gpu(), EngineCluster(model_dir, make_plan(spec, strategy, split), compute_device="cuda") as cluster:
        for token_ids, states in zip(of_lengths, expected, strict=True):
            rows, _ = cluster.run([token_ids])
            assert np.abs(rows - states).max() < TOLERANCE
            assert np.array_equal(cluster.run([token_ids])[0], rows)


def test_step_of_a_stage_ends_when_its_rows_are_sent(tmp_path: Path) -> None:
    """A first stage has no rows of its own to wait for. Its trace would be without its sends, and its time that of a launch."""
    model_dir = save_random_model(tmp_path, small_bert(num_hidden_layers=2))
    plan = make_plan(read_spec(model_dir), "pipeline", (1, 1))
    with gpu(event_seconds=0.05), EngineCluster(model_dir, plan, compute_device="cuda") as cluster:
        _, results = cluster.run([list(range(5, 38))], trace=True)
    sent = [sum(event.num_bytes for event in result.trace if event.lane == "send") for result in results]
    assert 33 * 96 * 4 <= sent[0] < 1.05 * 33 * 96 * 4
    assert sent[1] == 0
    if not HAS_GPU:
        assert results[0].compute_seconds[0] >= 0.05


@needs_gpu
def test_bert_base_shape_is_exact_and_repeatable(tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", BertConfig())
    (token_ids,) = prompts_of(read_spec(model_dir), 301)
    plan = make_plan(read_spec(model_dir), "hmp", (5, 4, 3))
    with EngineCluster(model_dir, plan, bytes_per_second=1e9, compute_device="cuda") as cluster:
        rows, _ = cluster.run([token_ids])
        for _ in range(5):
            assert np.array_equal(cluster.run([token_ids])[0], rows)
    assert np.abs(rows - hidden_states(model_dir, [token_ids])).max() < TOLERANCE


# ---- decoders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, lambda family: family == "llama"))
def test_greedy_tokens_of_every_family_equal_transformers(family: str, models: Any) -> None:
    model_dir, spec = models(family)
    prompts = prompts_of(spec, 1, 40, 77)
    expected = [greedy(model_dir, prompt, 8) for prompt in prompts]
    assert answers(model_dir, generating_plan(spec, "hmp", (2, 1)), prompts)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "split"), [("local", (1,)), ("megatron-tp", (1, 2)), ("sp", (1, 1)), ("pipeline", (1, 1))], ids=str
)
def test_greedy_tokens_of_every_strategy_equal_transformers(
    strategy: Strategy, split: tuple[int, ...], models: Any
) -> None:
    model_dir, spec = models("llama")
    prompts = prompts_of(spec, 3, 50)
    expected = [greedy(model_dir, prompt, 8) for prompt in prompts]
    assert answers(model_dir, generating_plan(spec, strategy, split), prompts)[0] == expected


def test_prefix_cache_is_used_and_changes_nothing(models: Any) -> None:
    model_dir, spec = models("llama")
    prompts = [[*SHARED, *prompt] for prompt in prompts_of(spec, 5, 9, 30)]
    expected = [greedy(model_dir, prompt, 8) for prompt in prompts]
    plan = generating_plan(spec, "hmp", (1, 1))
    with gpu(), EngineCluster(model_dir, plan, compute_device="cuda") as cluster:
        home = GenerationCluster(cluster)
        first = home.submit(prompts[0], 8, prefix_scope="app")
        home.run()
        others = [home.submit(prompt, 8, prefix_scope="app") for prompt in prompts[1:]]
        home.run()
    assert [home.answers[request] for request in (first, *others)] == expected
    assert all(home.ended[request].num_kept_rows >= len(SHARED) - KV_BLOCK_TOKENS for request in others)


def test_speculation_changes_nothing(models: Any) -> None:
    model_dir, spec = models("llama")
    prompts = [[5, 9, 11] * 6, [7, 8, 21, 40, 8]]
    expected = [greedy(model_dir, prompt, 16) for prompt in prompts]
    speculation = free_speculation()
    found, home = answers(model_dir, generating_plan(spec, "hmp", (1, 1)), prompts, 16, speculation, max_drafted=6)
    assert found == expected
    assert sum(end.num_drafted for end in home.ended.values()) > 0


def test_constrained_answers_are_valid(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    model_dir = save_random_model(tmp_path, small_decoder("llama", vocab_size=300), generates=True)
    tokens = [bytes([n]) for n in range(256)] + [b"</s>"]
    vocabulary = Vocabulary([*tokens, *[b""] * (300 - len(tokens))], [256], [256])
    grammar = f"start: %json {json.dumps({'enum': ['kitchen', 'bath']})}"
    plan = generating_plan(read_spec(model_dir), "hmp", (1, 1))
    with gpu(), EngineCluster(model_dir, plan, compute_device="cuda", vocabulary=vocabulary) as cluster:
        (answer,) = GenerationCluster(cluster).answer([[5, 9, 11]], 32, stop_ids=(256,), grammar=grammar)
    assert bytes(answer[:-1]) in (b'"kitchen"', b'"bath"')


@pytest.mark.parametrize("kv_cache", mostly_slow(["bfloat16", "int8"], lambda kind: kind == "int8"))
def test_keys_and_values_in_other_formats_stay_close(kv_cache: KvFormat, models: Any) -> None:
    """The sampled tokens' log probabilities, against those of a cache in float32."""
    model_dir, spec = models("llama")
    prompts = prompts_of(spec, 70)
    chosen = []
    for kind in ("float32", kv_cache):
        plan = generating_plan(spec.model_copy(update={"kv_cache": kind}), "hmp", (1, 1))
        _, home = answers(model_dir, plan, prompts, 4, top_log_probs=0)
        chosen.append([each.chosen.value for each in next(iter(home.log_probs.values()))])
    assert np.abs(np.subtract(*chosen)).max() < 0.05


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [0, 1, 70, 300])
@pytest.mark.parametrize("weights", FORMAT_ERRORS)
def test_products_of_all_formats_and_kernels(weights: WeightFormat, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight, x, bias = (torch.randn(shape, generator=generator) for shape in ((96, 160), (num_rows, 160), (96,)))
    x *= 3000  # beyond what sums of float16 could hold
    expected = x @ weight.t() + bias
    with gpu() as double, torch.inference_mode():
        matrix = empty_matrix(96, 160, weights, CUDA)
        for rows in (slice(0, 40), slice(40, None)):
            matrix.load(rows, slice(None), weight[rows])
        on_gpu, bias_on_gpu, out = x.to(CUDA), bias.to(CUDA), torch.empty(num_rows, 96, device=CUDA)
        for kernel in matrix.kernels:
            before = 0 if double is None else double.synchronisations
            y = matrix.product(kernel, on_gpu, bias_on_gpu, out)
            assert y.data_ptr() == out.data_ptr()
            assert double is None or double.synchronisations == before  # the host queues products, and waits for none
            assert (y.cpu() - expected).norm() <= FORMAT_ERRORS[weights] * expected.norm() + 1e-9


@pytest.mark.parametrize("shape", [(8, 32), (48, 96), (160, 256)])
def test_int4_kernels_multiply_the_same_quantised_values(shape: tuple[int, int]) -> None:
    with gpu(), torch.inference_mode():
        matrix = empty_matrix(*shape, "int4", CUDA)
        matrix.load(slice(None), slice(None), torch.randn(shape, device=CUDA) * 0.02 + 0.01)
        assert matrix.kernels == ("torch", "expand-bfloat16")
        assert matrix.default_kernel(300) == "expand-bfloat16"
        for rows in (1, 17, 70):
            x = torch.randn(rows, shape[1], device=CUDA)
            few, many = (matrix.product(kernel, x).cpu() for kernel in matrix.kernels)
            assert (few - many).norm() <= 5e-3 * few.norm()


@pytest.mark.parametrize(
    ("weights", "tolerance"),
    mostly_slow(
        [("float16", 0.01), ("bfloat16", 0.03), ("int8", 0.04), ("int4", 0.3)], lambda weights, _: weights == "int8"
    ),
)
def test_models_with_quantised_weights_stay_close(weights: WeightFormat, tolerance: float, models: Any) -> None:
    model_dir, spec = models("llama")
    spec = spec.model_copy(update={"weights": weights})
    decoder(model_dir)  # loaded outside: transformers uses "meta" tensors, which the double takes for its device
    with gpu(), EngineCluster(model_dir, generating_plan(spec, "hmp", (2, 1)), compute_device="cuda") as cluster:
        assert quantised_error(cluster, model_dir) < tolerance


@needs_gpu
@pytest.mark.parametrize("weights", FORMAT_ERRORS)
def test_profiler_measures_every_format(weights: WeightFormat, models: Any) -> None:
    spec = models("llama")[1].model_copy(update={"weights": weights})
    profile = profile_blocks(spec, 64, 1, "cuda")
    assert profile.attention(spec.num_heads) > 0
    assert profile.decode_seconds_per_byte > 0
    # With int4, matrices of other shapes are int8.
    assert {time.kernel for time in profile.kernels} == (
        {"torch", "expand-bfloat16", "expand-float32"} if weights in ("int8", "int4") else set()
    )


# ---- staging --------------------------------------------------------------------------------------------------------


def test_staged_tensors_round_trip() -> None:
    with gpu():
        staging = CudaStaging()
        tensor = torch.randn(300, 700, device=CUDA)
        for _ in range(20):  # buffers are reused many times and must never be read half copied
            tile = staging.to_wire(tensor)()
            into = torch.empty_like(tensor)
            staging.from_wire(tile, into)
            doubled = into * 2
            staging.add_from_wire(tile, into)
            assert torch.equal(doubled, tensor * 2)
            assert torch.equal(into, doubled)
            tensor = torch.randn(300, 700, device=CUDA)


@needs_gpu
def test_copy_to_the_device_does_not_wait_for_queued_compute() -> None:
    """While products are queued that take tens of milliseconds, a tile arrives; they still read what it replaces."""
    staging = CudaStaging()
    into, x = torch.zeros(1000, 1000, device=CUDA), torch.randn(8192, 8192, device=CUDA)
    tile = np.ones((1000, 1000), np.float32)
    staging.from_wire(tile, into)
    into.zero_()
    torch.cuda.synchronize()
    for _ in range(10):
        x @ x
    before = into.clone()
    staging.from_wire(tile, into)
    copied = staging._to_device.record_event()
    copied.synchronize()
    assert not torch.cuda.current_stream().query()  # the products still run
    assert not before.any()
    assert into.all()
