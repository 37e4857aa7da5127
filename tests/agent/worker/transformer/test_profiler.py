"""The block profiler on decoders."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from support.cases import mostly_slow
from support.plans import BERT_LARGE, LLAMA_1B

from hearth.plan.kernels import choose_kernels
from hearth.plan.model_spec import ModelSpec
from hearth.plan.profile import DECODING_TIMES, BlockProfile, LatencyCurve
from hearth.wire.messages import BlocksOf, Profile, Profiled, StartProfile, decode, encode

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from agent.worker.transformer import kernel_times  # noqa: E402 (needs torch)
from agent.worker.transformer.kernel_times import bytes_to_evict, layer_bytes, layer_shapes, measure_kernels  # noqa: E402
from agent.worker.transformer.kernels.base import emulates_bfloat16  # noqa: E402
from agent.worker.transformer.profiler import decoding_times, profile_blocks  # noqa: E402
from agent.worker.transformer.shard import filled_layer  # noqa: E402

SMALL = LLAMA_1B.model_copy(
    update={
        "num_layers": 3, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "hidden_size": 96, "ffn_size": 320,
        "vocab_size": 100,
    }
)  # fmt: skip
# Like GPT-2: LayerNorm, biases, learned positions, no gate, no grouped queries. Like Qwen3: norms of every head.
LEARNED = SMALL.model_copy(
    update={
        "num_kv_heads": 8, "norm": "layer", "gated": False, "rotary": None, "tied_head": True, "qkv_bias": True,
        "out_bias": True, "mlp_bias": True, "activation": "gelu_new", "max_positions": 16,
    }
)  # fmt: skip
HEAD_NORMS = SMALL.model_copy(update={"qk_norm": True, "sliding_window": 8})


@pytest.mark.parametrize("spec", mostly_slow([SMALL, LEARNED, HEAD_NORMS], lambda spec: spec == SMALL))
def test_decoder_blocks_and_decoding_are_profiled(spec: ModelSpec) -> None:
    blocks = profile_blocks(spec, 32, 1, "cpu")
    assert (blocks.seq_len, blocks.qkv.sizes[-1], blocks.up.sizes[-1]) == (32, 8, 320)
    assert all(size % spec.group_size == 0 for size in blocks.qkv.sizes)
    assert blocks.mlp_rows.sizes == (4, 8, 16, 24, 32)  # every eighth, for the steps of the kernels
    curves = (blocks.qkv, blocks.core, blocks.out, blocks.up, blocks.down, blocks.connective, blocks.mlp_rows)
    assert all(seconds > 0 for curve in curves for seconds in curve.seconds)
    assert 0 < blocks.decode_seconds_per_byte < 1e-6
    assert 0 < blocks.decode_layer_seconds < 0.1
    assert 0 <= blocks.decode_seconds_per_cached_value < 1e-6


def test_times_of_decoding_are_slopes_and_intercept_of_three_layers() -> None:
    def seconds(num_bytes: int, num_values: int = 0) -> float:
        return num_bytes * 4e-11 + num_values * 5e-10 + 3e-4

    found = decoding_times(
        (25 << 20, seconds(25 << 20)), (12 << 20, seconds(12 << 20)), (1000, seconds(25 << 20, 1000))
    )
    assert found == pytest.approx(
        {"decode_seconds_per_byte": 4e-11, "decode_layer_seconds": 3e-4, "decode_seconds_per_cached_value": 5e-10}
    )
    assert set(found) == set(DECODING_TIMES)
    # Noise: the share seems slower than the layer, and the longer KV cache faster. All weights cost something, and so do calls.
    noisy = decoding_times((1000, 1e-4), (500, 1.1e-4), (1000, 0.9e-4))
    assert noisy["decode_seconds_per_byte"] == pytest.approx(1e-9)
    assert noisy["decode_layer_seconds"] == pytest.approx(0.99e-4)
    assert noisy["decode_seconds_per_cached_value"] == 0
    steep = decoding_times((1000, 1e-4), (500, 0.2e-4), (1000, 1e-4))
    assert steep["decode_layer_seconds"] == pytest.approx(1e-6)


def test_kernels_are_measured_for_every_shape_and_number_of_rows() -> None:
    spec = SMALL.model_copy(update={"weights": "int8"})
    times = measure_kernels(spec, 20, torch.device("cpu"))
    assert {(time.num_outputs, time.num_inputs) for time in times} == set(layer_shapes(spec))
    assert {time.rows for time in times} == {1, 4, 16}
    with_bfloat16 = set() if emulates_bfloat16(torch.device("cpu")) else {"expand-bfloat16"}
    assert {time.kernel for time in times} - {"onnxruntime", "onednn"} == {"torch", "expand-float32"} | with_bfloat16
    choices = choose_kernels(times)
    layer = filled_layer(spec, torch.device("cpu"), choices)
    assert {matrix.layout for matrix in layer.matrices.values()} == {choice.layout for choice in choices}
    encoder = spec.model_copy(update={"causal": False})
    assert {time.rows for time in measure_kernels(encoder, 20, torch.device("cpu"))} == {16}
    plain = spec.model_copy(update={"weights": "bfloat16"})
    assert measure_kernels(plain, 20, torch.device("cpu")) == ()  # nothing to choose


@pytest.mark.parametrize(
    ("num_layers", "cache_bytes", "expected"),
    [
        (16, 8 << 20, 16 << 20),
        (16, 0, 32 << 20),
        (16, 480 << 20, 256 << 20),
        (1, 480 << 20, layer_bytes(LLAMA_1B)),  # no more than decoding reads
    ],
)
def test_evicted_bytes_follow_the_cache_and_the_model(num_layers: int, cache_bytes: int, expected: int) -> None:
    assert layer_bytes(LLAMA_1B) < 256 << 20 < 16 * layer_bytes(LLAMA_1B)
    assert bytes_to_evict(LLAMA_1B.model_copy(update={"num_layers": num_layers}), cache_bytes) == expected


def test_weights_are_evicted_before_each_product_that_would_find_them_in_the_cache() -> None:
    events: list[str] = []

    class Matrix:
        shape = (8, 8)

        def __init__(self, name: str) -> None:
            self.name = name

        def product(self, kernel: str, x_sk: torch.Tensor) -> None:
            events.append(self.name)

    class Evicted:
        def sum(self) -> None:
            events.append("evict")

    one, two, before = Matrix("one"), Matrix("two"), Matrix("before")
    kinds: Any = [(one, "a", before), (one, "b", before), (two, "c", before)]
    options = [kernel_times._Option(*each) for each in kinds]
    evicted: Any = Evicted()
    kernel_times._least_seconds(options, 1, evicted, torch.device("cpu"))
    assert events[:9] == ["evict", "before", "one", "evict", "before", "one", "before", "two", "evict"]
    timed = [event for event in events if event != "before"]
    assert not any(name == after for name, after in zip(timed, timed[1:], strict=False))
    events.clear()
    kernel_times._least_seconds(options, 64, evicted, torch.device("cpu"))
    assert set(events) == {"one", "two"}


def test_bfloat16_is_not_measured_where_it_is_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without instructions for it, one such product of 256 rows takes seconds."""
    spec = SMALL.model_copy(update={"weights": "int8"})
    for emulates in (True, False):
        monkeypatch.setattr(kernel_times, "emulates_bfloat16", lambda device, emulates=emulates: emulates)
        kernels = {time.kernel for time in measure_kernels(spec, 4, torch.device("cpu"))}
        assert ("expand-bfloat16" in kernels) is not emulates


@pytest.mark.parametrize(
    ("dependence", "left"),
    [
        ({"torch": 0.0, "expand-bfloat16": 1e-5, "expand-float32": 4e-7}, {"torch", "expand-float32"}),
        (
            {"torch": 3e-6, "expand-bfloat16": 1e-5, "expand-float32": 4e-6},
            {"torch"},
        ),  # the least, if all are above the limit
    ],
)
def test_deterministic_kernels_do_not_depend_on_the_number_of_rows(
    dependence: dict[str, float], left: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernel_times, "_row_dependence", lambda matrix, kernel, rows, device: dependence.get(kernel, 1.0)
    )
    spec = SMALL.model_copy(update={"weights": "int8"})
    times = measure_kernels(spec, 4, torch.device("cpu"), deterministic=True)
    assert {time.kernel for time in times} == left


def test_row_dependence_is_the_difference_of_rows_alone_and_among_others() -> None:
    class Matrix:
        shape = (8, 8)

        def product(self, kernel: str, x_sk: torch.Tensor) -> torch.Tensor:
            return x_sk * (1 + 1e-3 * (len(x_sk) == 1)) if kernel == "dependent" else x_sk

    matrix: Any = Matrix()
    assert kernel_times._row_dependence(matrix, "dependent", 8, torch.device("cpu")) == pytest.approx(1e-3, rel=1e-2)
    assert kernel_times._row_dependence(matrix, "same", 8, torch.device("cpu")) == 0


def test_filled_layer_has_shapes_of_grouped_queries_and_gate() -> None:
    layer = filled_layer(SMALL, torch.device("cpu"))
    shapes = {part: tuple(matrix.shape) for part, matrix in layer.matrices.items()}
    assert shapes["qkv"] == ((8 + 2 * 2) * 16, 96)
    assert shapes["gate"] == shapes["up"] == (320, 96)
    assert not layer.biases


def test_profiler_measures_every_curve_of_a_model() -> None:
    changes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "ffn_size": 256, "vocab_size": 100}
    spec = BERT_LARGE.model_copy(update=changes)
    request = StartProfile(
        profile=Profile(subject=BlocksOf(model=spec, seq_len=32), timeout_seconds=60), device="here", folder="/nowhere",
        num_threads=1, compute_device="cpu",
    )  # fmt: skip
    command = [sys.executable, "-m", "agent.worker.transformer.profiler"]
    done = subprocess.run(command, input=encode(request), capture_output=True, timeout=120, check=True)
    answer = decode(done.stdout)
    assert isinstance(answer, Profiled)
    blocks = answer.result
    assert isinstance(blocks, BlockProfile)
    assert blocks.seq_len == 32
    assert (blocks.qkv.sizes[-1], blocks.up.sizes[-1], blocks.connective.sizes[-1]) == (4, 256, 32)
    curves = (blocks.qkv, blocks.core, blocks.out, blocks.up, blocks.down, blocks.connective, blocks.mlp_rows)
    assert all(seconds > 0 for curve in curves for seconds in curve.seconds)
    assert 0 < blocks.wire.encrypted_seconds_per_byte < 1e-6
    assert set(blocks.wire.convert_seconds_per_value) == {"exact", "bf16", "fp16", "int8"}


@pytest.mark.parametrize("spec", [SMALL, LEARNED, HEAD_NORMS])
def test_quick_profile_is_scaled_up_from_few_rows(spec: ModelSpec) -> None:
    blocks = profile_blocks(spec, 256, 1, "cpu", quick=True)
    assert (blocks.seq_len, blocks.kernels, blocks.qkv.sizes[-1], blocks.mlp_rows.sizes[-1]) == (256, (), 8, 256)
    assert 0 < blocks.decode_seconds_per_byte < 1e-6
    assert blocks.tile_factor(256) == 1.0
    few = blocks.with_rows(64)
    assert few.core(8) == pytest.approx(blocks.core(8) / 16)
    assert few.attention(8) - few.core(8) == pytest.approx((blocks.attention(8) - blocks.core(8)) / 4)
    assert few.mlp_rows(64) == pytest.approx(blocks.mlp_rows(256) / 4)


def test_rest_of_a_whole_layer_is_connective() -> None:
    line = LatencyCurve(sizes=(1, 32), seconds=(1e-3, 32e-3))
    profile = BlockProfile(
        seq_len=32, qkv=line, core=line, out=line, up=line, down=line, connective=line, embedding=line, mlp_rows=line
    )
    parts = profile.attention(8) + profile.mlp(16) + 2 * profile.connective(32)
    whole = profile.with_layer_seconds(8, 16, parts + 0.016)
    assert whole.attention(8) + whole.mlp(16) + 2 * whole.connective(32) == pytest.approx(parts + 0.016)
    assert whole.connective(16) == pytest.approx(1.25 * profile.connective(16))  # grows with the rows, as before
    assert profile.with_layer_seconds(8, 16, 0.9 * parts) == profile  # noise
