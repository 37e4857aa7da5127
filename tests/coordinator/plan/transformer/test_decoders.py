"""Plans for decoders: memory with grouped queries and gated MLPs, the KV cache, and the time of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.checkpoints import write_model
from support.planning import plan_for
from support.plans import (
    BERT_LARGE,
    LLAMA_1B,
    cluster,
    device_profile,
    make_plan,
    with_blocks,
    with_rates,
    with_seq_len,
)
from typer.testing import CliRunner

from coordinator.cli.app import app
from coordinator.cli.output import out
from coordinator.cli.render.tables import generation_lines, plan_tables
from coordinator.models.checkpoint.families import read_spec
from coordinator.plan.simulator import transfer_resources
from coordinator.plan.transformer.choose import plan_strategy, plan_transformer
from coordinator.plan.transformer.cost.decode import attention_bytes, head_bytes, mlp_bytes, token_layer_seconds
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.cost.memory import kv_bytes
from coordinator.plan.transformer.cost.predict import predict, request_seconds
from coordinator.plan.transformer.explain import bottleneck, candidate_as_json, rates_by_format, why_lost, why_won
from coordinator.plan.transformer.replicate import replicate
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest, excess_bytes
from coordinator.plan.transformer.shares import ShareBudget, body_from_grains
from coordinator.plan.transformer.strategies import STRATEGIES, rank_memory, strategy_of_body
from coordinator.serve.goal import open_transformer, plan_request
from coordinator.serve.state import TransformerGoal
from coordinator.serve.text.prompts import TextTokenizer
from hearth.errors import BadSetting, ModelDoesNotFit
from hearth.plan.common import WireFormat
from hearth.plan.geometry import largest_remainder
from hearth.plan.model_spec import KvFormat, ModelSpec
from hearth.plan.phases import Phase
from hearth.plan.plan import TransformerPlan, plan_from_json
from hearth.plan.profile import ClusterProfile, WireCost
from hearth.plan.transformer import SEQUENCE, GenerationLimits, LayerMode, Pipeline, TransformerBody

EXACT = WireFormat()
# Two KV groups of four query heads; Q is wider than the hidden size.
SMALL = LLAMA_1B.model_copy(
    update={
        "name": "small", "num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "hidden_size": 96,
        "ffn_size": 320, "vocab_size": 2500, "max_positions": 128,
    }
)  # fmt: skip
LIMITS = GenerationLimits(kv_tokens=256, max_sequences=4, prefill_rows=32, context=64)


def request(
    speeds: Sequence[float],
    mbit: float = 1000,
    budgets: Sequence[int] | None = None,
    spec: ModelSpec = LLAMA_1B,
    seq_len: int = 512,
    generation: GenerationRequest | None = None,
    round_trip_seconds: float = 3e-4,
    **changes: Any,
) -> PlanRequest:
    devices = [
        device_profile(index, speed, spec, seq_len, budgets[index] if budgets else 16 << 30)
        for index, speed in enumerate(speeds)
    ]
    home = cluster(devices, mbit, round_trip_seconds)
    return PlanRequest(spec, home, seq_len, generation=generation or GenerationRequest(2048), **changes)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_of_a_small_llama_equals_hand_count() -> None:
    body = make_plan(SMALL, "hmp", (1, 1)).body
    assert (body.heads, body.columns, body.vocabulary) == ((4, 4), (192, 128), (2048, 452))
    first, second = (rank_memory(SMALL, with_seq_len(body, 32, LIMITS), rank) for rank in range(2))
    qkv, out, norms = (64 + 16 + 16) * 96, 96 * 64, 2 * 96
    assert first.weights == 2 * (qkv + out + 3 * 192 * 96 + norms) * 4
    assert second.weights == 2 * (qkv + out + 3 * 128 * 96 + norms) * 4
    assert first.embeddings == (2 * 2048 * 96 + 96) * 4  # embedding and head rows, and the last norm
    assert second.embeddings == (2 * 452 * 96 + 96) * 4
    assert first.kv_cache == second.kv_cache == 2 * 16 * 2 * 256 * 4  # one KV head each
    attention = 32 * (2 * (64 + 16 + 16) + 4 * 64)
    for use, columns, vocabulary, candidates in ((first, 192, 2048, 2500), (second, 128, 452, 0)):
        sampling = (4 + 12) * vocabulary + 12 * candidates
        decoding = 2 * 4 * 96 + sampling
        assert use.activations == (7 * 32 * 96 + max(attention, 3 * 32 * columns) + decoding) * 4
    assert first.total == first.weights + first.embeddings + first.activations + first.workspace + first.kv_cache


@pytest.mark.parametrize(("kind", "row_bytes"), [("float32", 64), ("bfloat16", 32), ("int8", 20)])
def test_memory_of_the_kv_cache_depends_on_its_format_and_is_in_whole_blocks(kind: KvFormat, row_bytes: int) -> None:
    spec = SMALL.model_copy(update={"kv_cache": kind})
    limits = LIMITS.model_copy(update={"kv_tokens": 250})
    use = rank_memory(spec, with_seq_len(make_plan(spec, "local", (1,)).body, 32, limits), 0)
    assert use.kv_cache == 2 * 2 * 2 * 256 * row_bytes == kv_bytes(spec, 8, limits)


def test_tied_ungated_and_smaller_limits_take_less_memory() -> None:
    def total(spec: ModelSpec = SMALL, limits: GenerationLimits | None = LIMITS) -> int:
        return rank_memory(spec, with_seq_len(make_plan(spec, "local", (1,)).body, 32, limits), 0).total

    tied = SMALL.model_copy(update={"tied_head": True})
    ungated = SMALL.model_copy(update={"gated": False})
    assert total() - total(tied) == 2500 * 96 * 4
    attention = 2 * (128 + 32 + 32) + 4 * 128  # values per row, more than those of the MLP without a gate
    assert total() - total(ungated) == 2 * 320 * 96 * 4 + 32 * (3 * 320 - attention) * 4
    half = LIMITS.model_copy(update={"kv_tokens": 128})
    assert total() - total(limits=half) == 2 * 32 * 2 * 128 * 4
    assert total(limits=None) < total(limits=half)


def test_activations_do_not_grow_with_the_context() -> None:
    body = make_plan(LLAMA_1B, "local", (1,)).body
    short, long = (
        rank_memory(LLAMA_1B, with_seq_len(body, 512, GenerationRequest(context, 1).limits(512)), 0).activations
        for context in (16384, 32768)
    )
    assert long == short


def test_replicated_weights_divide_the_cache_by_heads() -> None:
    body = make_plan(SMALL, "sp", (1, 1)).body
    uses = [rank_memory(SMALL, with_seq_len(body, 32, LIMITS), rank) for rank in range(2)]
    local = rank_memory(SMALL, with_seq_len(make_plan(SMALL, "local", (1,)).body, 32, LIMITS), 0)
    assert [use.weights for use in uses] == [local.weights] * 2
    assert sum(use.kv_cache for use in uses) == local.kv_cache


@given(
    st.sampled_from([SMALL, LLAMA_1B, BERT_LARGE]),
    st.lists(st.integers(0, 5), min_size=2, max_size=3).filter(any),
    st.sampled_from(["hmp", "megatron-tp"]),
    st.integers(1, 600),
    st.integers(1, 64),
)
def test_budget_never_exceeds_exact_memory_use(
    spec: ModelSpec, weights: list[int], strategy: Any, seq_len: int, sequences: int
) -> None:
    """The planners' linear memory estimate is an upper bound of what a device holds."""
    generation = GenerationRequest(128, sequences) if spec.causal else None
    devices = [device_profile(index, 1.0, spec, seq_len, 1 << 40) for index in range(len(weights))]
    asked = PlanRequest(spec, cluster(devices, 100), seq_len, generation=generation)
    budget = ShareBudget(asked, strategy)
    shares = [
        largest_remainder(weights, -(-total // grain))
        for total, grain in ((spec.num_kv_heads, 1), (spec.ffn_size, 64), (spec.vocab_size, 1024))
    ]
    body = body_from_grains(asked, strategy, *shares)
    for rank, (a, b, v) in enumerate(zip(*shares, strict=True)):
        counted = (
            a * budget.bytes_per_head_grain + b * budget.bytes_per_column_grain + v * budget.bytes_per_vocabulary_grain
        )
        assert counted <= budget.share_bytes(rank)
        assert excess_bytes(asked, body, rank) <= counted - budget.share_bytes(rank)


# ---- memory of the KV cache -----------------------------------------------------------------------------------------


def test_missing_kv_cache_bytes_are_exact() -> None:
    unrestricted = plan_for(request([1.0]))
    assert unrestricted.devices[0].memory.kv_cache == 2 * 8 * 64 * 16 * 4 * 2048 * 4
    held = unrestricted.devices[0].memory.total
    assert plan_for(request([1.0], budgets=[held])).devices[0].memory.total == held
    with pytest.raises(ModelDoesNotFit) as error:
        plan_for(request([1.0], budgets=[held - 1000]))
    assert error.value.missing_bytes == 1000
    fewer = request([1.0], budgets=[held - 1000], generation=GenerationRequest(2048, 3))
    assert plan_for(fewer).body.generation == unrestricted.body.generation.model_copy(  # type: ignore[union-attr]
        update={"kv_tokens": 3 * 2048}  # type: ignore[union-attr]
    )


def test_kv_cache_is_distributed_if_no_device_can_hold_it() -> None:
    generation = GenerationRequest(8192, 16)  # 8 GiB of keys and values
    for strategy in ("hmp", "megatron-tp", "auto"):
        spread = request([1.0, 1.0], budgets=[8 << 30] * 2, generation=generation, strategy=strategy)
        plan = plan_for(spread)
        assert sum(device.memory.kv_cache for device in plan.devices) == 8 << 30
        assert all(device.memory.total <= 8 << 30 for device in plan.devices)
    for device in spread.cluster.devices:
        with pytest.raises(ModelDoesNotFit) as error:
            plan_strategy(replace(spread, cluster=spread.cluster.subset((device.device_id,))), "local")
        assert error.value.missing_bytes > 1 << 30


def test_device_without_cache_memory_gets_no_heads() -> None:
    generation = GenerationRequest(8192, 32)  # 16 GiB: the cache of a group takes 2 GiB
    plan = plan_for(request([1.0, 1.0], budgets=[24 << 30, 2 << 30], generation=generation, strategy="hmp"))
    small = next(device for device in plan.devices if device.budget_bytes == 2 << 30)
    rank = plan.devices.index(small)
    assert (plan.body.heads[rank], small.memory.kv_cache) == (0, 0)
    assert plan.body.columns[rank] > 0
    assert plan.body.vocabulary[rank] > 0


def test_missing_bytes_are_summed_over_all_devices() -> None:
    with pytest.raises(ModelDoesNotFit) as error:
        plan_for(request([1.0, 1.0], budgets=[3 << 30] * 2, generation=GenerationRequest(8192, 16)))
    # 4.1 GiB of weights and embeddings, 8 GiB of cache and two processes, with 6 GiB of memory.
    assert 6 << 30 < error.value.missing_bytes < 8 << 30


# ---- time of a token ------------------------------------------------------------------------------------------------


def token_seconds(spec: ModelSpec, body: TransformerBody, devices: ClusterProfile, wire: WireFormat) -> float:
    """For a sequence with 100 tokens in the KV cache."""
    return strategy_of_body(body).decode_seconds(PlanLayout(spec, body, devices, wire), 100)


def priced(speeds: Sequence[float], mbit: float, rtt: float, spec: ModelSpec = SMALL, **wire: float) -> float:
    cost = WireCost.model_validate(wire)
    devices = [with_blocks(device_profile(index, speed, spec, 32), wire=cost) for index, speed in enumerate(speeds)]
    body = make_plan(spec, "local" if len(speeds) == 1 else "hmp", speeds).body
    return token_seconds(spec, body, cluster(devices, mbit, rtt), EXACT)


def test_token_time_on_one_device() -> None:
    weights = 2 * ((128 + 32 + 32) * 96 + 96 * 128 + 3 * 320 * 96) * 4
    cached = 2 * 2 * 32 * 100 * 4
    assert 2 * (attention_bytes(SMALL, 8, 100) + mlp_bytes(SMALL, 320)) == weights + cached
    assert head_bytes(SMALL, 2500) == 2500 * 96 * 4
    expected = (weights + cached + 2500 * 96 * 4) * 1e-10 + (2 + 4) * 5e-5
    assert priced([1.0], 100, 1e-3) == pytest.approx(expected)
    assert priced([0.5], 100, 1e-3) == pytest.approx(2 * expected)


def test_cached_tokens_are_priced_by_the_format_of_the_cache() -> None:
    def seconds(kind: KvFormat, num_tokens: float) -> float:
        spec = SMALL.model_copy(update={"kv_cache": kind})
        return token_layer_seconds(spec, device_profile(0, 1.0, spec, 32).blocks, num_tokens)

    assert seconds("float32", 0) == seconds("bfloat16", 0) == seconds("int8", 0)
    cached = {kind: seconds(kind, 3000) - seconds(kind, 0) for kind in get_args(KvFormat)}
    assert cached["float32"] == pytest.approx(2 * 32 * 3000 * 4e-10)
    assert 0.58 < cached["bfloat16"] / cached["float32"] < 0.88
    assert 1.5 < cached["int8"] / cached["float32"] < 4.3


def test_cached_tokens_are_priced_by_their_measured_time() -> None:
    device = device_profile(0, 1.0, SMALL, 32)
    slow_attention = with_blocks(device, decode_seconds_per_cached_value=7e-9)
    measured = slow_attention.blocks

    def seconds(num_tokens: float) -> float:
        return token_layer_seconds(SMALL, measured, num_tokens)

    assert seconds(0) == token_layer_seconds(SMALL, device.blocks, 0)
    assert seconds(3000) - seconds(0) == pytest.approx(2 * 32 * 3000 * 7e-9)
    assert token_layer_seconds(SMALL, measured.scaled(2.0), 3000) == pytest.approx(2 * seconds(3000))
    # The same on one rank of two.
    body = make_plan(SMALL, "hmp", (1, 1)).body
    even, uneven = (
        token_seconds(SMALL, body, cluster([each, device_profile(1, 1.0, SMALL, 32)], 1e6, 0.0), EXACT)
        for each in (device, slow_attention)
    )
    heads = body.heads[0]
    extra = 2 * SMALL.kv_width(heads) * 100 * (7e-9 - 4e-10)
    assert uneven - even == pytest.approx(SMALL.num_layers * extra, rel=1e-3)


def test_long_bfloat16_cache_is_converted_in_parts() -> None:
    def activations(kind: KvFormat, context: int) -> int:
        spec = LLAMA_1B.model_copy(update={"kv_cache": kind})
        body = with_seq_len(make_plan(spec, "local", (1,)).body, 512, GenerationRequest(context, 1).limits(512))
        return rank_memory(spec, body, 0).activations

    assert activations("bfloat16", 4096) == activations("bfloat16", 32768)
    assert activations("int8", 32768) - activations("int8", 16384) == 2 * 16384 * LLAMA_1B.kv_width(32) * 4


def test_token_time_on_two_devices() -> None:
    even = SMALL.model_copy(update={"ffn_size": 256, "vocab_size": 2048})
    rate, latency, message, per_byte = 1e6, 5e-4, 1e-4, 1e-8
    wire = {"seconds_per_message": message, "encrypted_seconds_per_byte": per_byte}

    def hop(num_values: int) -> float:
        """CPU work at both ends, the bytes, and half a round trip."""
        return 2 * (message + num_values * 4 * per_byte) + num_values * 4 / rate + latency

    layer = (attention_bytes(even, 4, 100) + mlp_bytes(even, 128)) * 1e-10 + 5e-5 + 2 * hop(96)
    head = head_bytes(even, 1024) * 1e-10 + 4 * 5e-5
    expected = 2 * layer + head + 2 * hop(16) + hop(96)
    assert priced([1.0, 1.0], 8, 2 * latency, even, **wire) == pytest.approx(expected)
    deep = even.model_copy(update={"num_layers": 12})
    assert priced([1.0, 1.0], 8, 2 * latency, deep, **wire) == pytest.approx(expected + 10 * layer)


def test_messages_to_several_peers_share_bandwidth_not_latency() -> None:
    """Bytes share the sender's bandwidth; round trips overlap."""
    even = SMALL.model_copy(update={"num_heads": 12, "num_kv_heads": 3, "ffn_size": 192, "vocab_size": 3072})
    layers = [
        priced([1.0] * 3, mbit, rtt, even.model_copy(update={"num_layers": 3}))
        - priced([1.0] * 3, mbit, rtt, even.model_copy(update={"num_layers": 2}))
        for mbit, rtt in ((8, 0.0), (1e9, 0.0), (1e9, 1e-2))
    ]
    assert layers[0] - layers[1] == pytest.approx(2 * 2 * 96 * 4 / 1e6, rel=1e-3)
    assert layers[2] - layers[1] == pytest.approx(2 * 5e-3, rel=1e-3)


def test_rank_without_heads_sends_no_partial_sums_of_attention() -> None:
    home = cluster([device_profile(index, 1.0, SMALL, 32) for index in range(2)], 8, 0.0)
    body = make_plan(SMALL, "hmp", (1, 1)).body
    alone = body.model_copy(update={"heads": (8, 0)})
    slow_back = with_rates(home, lambda link: 1e3 if link.source == "id1" else link.bytes_per_second)
    assert token_seconds(SMALL, body, slow_back, EXACT) > 3 * 96 * 4 / 1e3
    assert token_seconds(SMALL, alone, slow_back, EXACT) < token_seconds(SMALL, body, slow_back, EXACT)


def test_decoding_rates_of_all_formats_are_explained() -> None:
    asked = request([1.0, 1.0], 20, spec=LLAMA_1B, strategy="hmp")
    plan = plan_for(asked)
    said = rates_by_format(plan, asked.cluster, asked.num_cached_tokens)
    rates = dict(zip(said.split()[4::3], map(float, said.split()[5::3]), strict=True))
    assert list(rates) == ["exact", "bf16", "fp16", "int8"]
    assert rates["exact"] == pytest.approx(1 / plan.predicted.decode_seconds, rel=5e-3)
    assert rates["exact"] < rates["bf16"] < rates["int8"]
    assert not rates_by_format(plan_for(request([1.0])), asked.cluster, 0.0)


def test_lossy_format_shortens_exchanges_on_its_links() -> None:
    home = cluster([device_profile(index, 1.0, SMALL, 32) for index in range(2)], 8, 0.0)
    body = make_plan(SMALL, "hmp", (1, 1)).body
    exact, lossy, excepted = (
        token_seconds(SMALL, each, home, wire)
        for each, wire in (
            (body, EXACT),
            (body, WireFormat(values="fp16")),
            (body.model_copy(update={"exact_links": ((0, 1), (1, 0))}), WireFormat(values="fp16")),
        )
    )
    assert exact - lossy == pytest.approx(5 * 96 * 2 / 1e6)
    assert excepted == exact


@given(st.lists(st.floats(0.2, 4), min_size=1, max_size=4), st.floats(1, 10_000), st.floats(0, 0.01))
def test_token_time_has_a_lower_bound(speeds: list[float], mbit: float, rtt: float) -> None:
    body = make_plan(SMALL, "local" if len(speeds) == 1 else "hmp", speeds).body
    devices = [device_profile(index, speed, SMALL, 32) for index, speed in enumerate(speeds)]
    seconds = token_seconds(SMALL, body, cluster(devices, mbit, rtt), EXACT)
    shares = [
        2 * (attention_bytes(SMALL, body.heads[rank], 100) + mlp_bytes(SMALL, body.columns[rank])) * 1e-10 / speed
        for rank, speed in enumerate(speeds)
    ]
    waits = (2 * 2 + 1) * rtt / 2 if sum(heads > 0 for heads in body.heads) > 1 else 0.0
    assert seconds >= max(shares)
    assert seconds >= waits * (1 - 1e-9)


# ---- prefill --------------------------------------------------------------------------------------------------------


def sent_values(modes: LayerMode, strategy: Any = "hmp") -> dict[Phase, float]:
    """Values that rank 0 sends to rank 1 in one layer, by phase."""
    spec = LLAMA_1B.model_copy(update={"num_layers": 1})
    home = cluster([device_profile(index, 1.0, spec, 512) for index in range(2)], 8)
    body = make_plan(spec, strategy, (3, 1), row_weights=(1, 1), modes=(modes,) if strategy == "hmp" else ()).body
    found: dict[Phase, float] = {}
    for task in strategy_of_body(body).tasks(PlanLayout(spec, with_seq_len(body, 512), home, EXACT)):
        if task.resources == transfer_resources(0, 1):
            assert isinstance(task.kind, Phase)
            found[task.kind] = found.get(task.kind, 0.0) + task.num_bytes / 4
    return found


def test_grouped_queries_are_sent_with_their_keys_and_values() -> None:
    exchanged = sent_values(LayerMode(qkv="replicated", out="replicated", mlp="replicated"))
    assert exchanged[Phase.EXCHANGE_QKV] == 256 * (8 + 2 * 2) * 64  # the peer's 8 query heads and 2 KV heads
    assert exchanged[Phase.EXCHANGE_HEADS] == 256 * 24 * 64
    by_rows = sent_values(SEQUENCE, "sp")
    assert by_rows[Phase.GATHER_KEYS] == by_rows[Phase.GATHER_VALUES] == 256 * 8 * 64
    gathered = sent_values(LayerMode())
    assert gathered[Phase.GATHER_ATTENTION] == gathered[Phase.REDUCE_ATTENTION] == 256 * 2048


def test_prefill_ends_with_the_head_if_the_plan_generates_tokens() -> None:
    home = cluster([device_profile(0, 1.0, LLAMA_1B, 512)], 100)
    layers = 16 * (0.05 + 0.014 + 0.016 + 0.14 + 2 * 0.002) + 0.002
    head = 32000 * 2048 * 4 * 1e-10
    bodies = (make_plan(LLAMA_1B, "local", (1,)).body, Pipeline.of(LLAMA_1B, (16,), 512))
    for body, (limits, expected) in product(bodies, ((LIMITS, layers + head), (None, layers))):
        layout = PlanLayout(LLAMA_1B, with_seq_len(body, 512, limits), home, EXACT)
        assert predict(layout)[0].latency_seconds == pytest.approx(expected)


def test_pipeline_returns_the_last_row_or_all_rows() -> None:
    home = cluster([device_profile(rank, 1.0, LLAMA_1B, 512) for rank in range(2)], 100)
    body = Pipeline.of(LLAMA_1B, (8, 8), 512)
    for limits, num_rows in ((LIMITS, 1), (None, 512)):
        tasks = STRATEGIES["pipeline"].tasks(PlanLayout(LLAMA_1B, with_seq_len(body, 512, limits), home, EXACT))
        assert [task.num_bytes for task in tasks if task.kind is Phase.HEAD_ROWS] == [num_rows * 2048 * 4]


# ---- planning -------------------------------------------------------------------------------------------------------


def test_plans_are_compared_by_the_expected_request() -> None:
    plan = plan_for(request([1.0], generation=GenerationRequest(2048, prompt_tokens=1024, new_tokens=10)))
    assert (plan.body.generation.prompt_tokens, plan.body.generation.new_tokens) == (1024, 10)
    later = 16 * 2 * 0.014  # the second step attends to three times as many pairs of rows
    expected = 2 * plan.predicted.latency_seconds + later + 10 * plan.predicted.decode_seconds
    assert request_seconds(plan) == pytest.approx(expected)
    default = plan_for(request([1.0]))
    assert (default.body.generation.prompt_tokens, default.body.generation.new_tokens) == (512, 128)
    encoder = make_plan(BERT_LARGE, "hmp", (1, 1))
    assert request_seconds(encoder) == encoder.predicted.latency_seconds


def test_two_devices_decode_faster_on_fast_links_only() -> None:
    for mbit, rtt, num_devices in ((10_000, 5e-5, 2), (20, 1e-2, 1)):
        plan = plan_for(request([1.0, 1.0], mbit, round_trip_seconds=rtt))
        assert plan.num_ranks == num_devices
        alone = plan_for(request([1.0]))
        assert request_seconds(plan) <= request_seconds(alone) * 1.0001
        assert plan_from_json(plan.model_dump_json()) == plan


@given(st.floats(1.1, 20.0))
def test_scaled_profile_scales_prefill_and_decode(factor: float) -> None:
    asked = request([1.0], generation=GenerationRequest(2048))
    slower = asked.cluster.devices[0].model_copy(update={"blocks": asked.cluster.devices[0].blocks.scaled(factor)})
    before = plan_for(asked)
    after = plan_for(replace(asked, cluster=asked.cluster.model_copy(update={"devices": (slower,)})))
    assert after.predicted.latency_seconds == pytest.approx(factor * before.predicted.latency_seconds)
    assert after.predicted.decode_seconds == pytest.approx(factor * before.predicted.decode_seconds)


def test_tiny_decoder_stays_on_one_device_despite_faster_prefill() -> None:
    tiny = SMALL.model_copy(update={"num_layers": 6})
    asked = request([1.0, 1.0], 1000, spec=tiny, seq_len=64, generation=GenerationRequest(64))
    devices = tuple(
        device.model_copy(
            update={"blocks": device.blocks.scaled(0.02).model_copy(update={"decode_layer_seconds": 5e-5})}
        )
        for device in asked.cluster.devices
    )
    asked = replace(asked, cluster=asked.cluster.model_copy(update={"devices": devices}))
    plan = plan_for(asked)
    assert plan.body.strategy == "local"
    prefill = min(each.predicted.latency_seconds for each in (plan_strategy(asked, "hmp"), plan_strategy(asked, "sp")))
    assert prefill < plan.predicted.latency_seconds
    shared = [other for other in plan.alternatives if not other.strategy.startswith("local")]
    assert shared
    assert all("slower" in other.reason for other in shared)


def test_shares_depend_on_prompt_and_answer_lengths() -> None:
    def groups(prompt_tokens: int, new_tokens: int) -> tuple[int, ...]:
        asked = request([1.0, 1.0], 10_000, generation=GenerationRequest(2048, 4, prompt_tokens, new_tokens))
        slow_memory = with_blocks(asked.cluster.devices[1], decode_seconds_per_byte=3e-10)
        devices = (asked.cluster.devices[0], slow_memory)
        home = ClusterProfile(devices=devices, links=asked.cluster.links)
        body = plan_strategy(replace(asked, cluster=home), "hmp").body
        return tuple(heads // 4 for heads in body.heads)

    assert groups(2000, 1) == (4, 4)
    assert groups(10, 1000) == (6, 2)


def test_attention_by_rows_requires_prefill_in_one_step() -> None:
    long = request([1.0, 1.0], 20)
    plan = plan_for(long)
    assert [other.reason for other in plan.alternatives if other.strategy == "sp"] == [
        "needs a context (2048 tokens) that is prefilled in one step (of 512 rows)"
    ]
    assert all(mode.attention == "heads" for mode in plan.body.modes)
    with pytest.raises(BadSetting, match="one step"):
        plan_for(replace(long, strategy="sp"))
    short = request([1.0, 1.0], 20, generation=GenerationRequest(512))
    assert plan_for(short).body.strategy == "sp"


def test_sp_decodes_with_a_share_on_every_device() -> None:
    body = plan_for(request([3.0, 1.0], generation=GenerationRequest(512), strategy="sp")).body
    assert body.heads == (24, 8)
    assert body.columns == (6144, 2048)
    assert body.vocabulary[0] > 2 * body.vocabulary[1]
    assert min(body.row_weights) > 0


@given(
    st.lists(st.floats(0.05, 4), min_size=1, max_size=4),
    st.floats(5, 10_000),
    st.sampled_from([300, 500, 900, 16_000]),
    st.booleans(),
)
def test_auto_fits_memory_and_is_never_slower_than_one_device(
    speeds: list[float], mbit: float, mib: int, short: bool
) -> None:
    spec = LLAMA_1B.model_copy(update={"num_layers": 2})
    generation = GenerationRequest(512 if short else 2048)
    asked = request(speeds, mbit, [mib << 20] * len(speeds), spec, generation=generation)
    try:
        plan = plan_for(asked)
    except ModelDoesNotFit as error:
        assert error.missing_bytes > 0
        return
    assert plan.body.generation is not None
    num_copies = 2 if plan.body.generation.kv_copies else 1
    kv_bytes = 2 * 512 * 2 * 4 * generation.context * 4
    assert sum(device.memory.kv_cache for device in plan.devices) == num_copies * kv_bytes
    for rank, device in enumerate(plan.devices):
        assert device.memory.total <= device.budget_bytes
        for layer in range(spec.num_layers):
            held = plan.body.layer_share(rank, layer)
            assert held.qkv.size >= plan.body.heads[rank] <= held.out.size
            assert held.columns.size >= plan.body.columns[rank]
    for device in asked.cluster.devices:
        try:
            alone = plan_strategy(replace(asked, cluster=asked.cluster.subset((device.device_id,))), "local")
        except ModelDoesNotFit:
            continue
        assert request_seconds(plan) <= 1.011 * request_seconds(alone)


def test_encoder_plans_are_unchanged() -> None:
    budgets = (900, 1200, 8000)
    devices = [device_profile(i, speed, budget_bytes=budgets[i] << 20) for i, speed in enumerate((1, 0.7, 0.4))]
    asked = PlanRequest(BERT_LARGE, cluster(devices, 60), 284)
    assert plan_for(asked).body.strategy == "pipeline"
    asked = replace(asked, cluster=asked.cluster.subset(("id1", "id2")))
    plan = replicate(asked, plan_strategy(asked, "hmp"))
    assert plan.body.generation is None
    assert (plan.body.heads, plan.body.columns, plan.body.vocabulary) == ((10, 6), (2624, 1472), (15360, 15162))
    assert [mode.mlp for mode in plan.body.modes] == ["replicated"] * 5 + ["sharded"] * 19
    assert {mode.out for mode in plan.body.modes} == {"replicated"}
    assert plan.predicted.latency_seconds == pytest.approx(9.124620369319377, rel=1e-12)
    assert [device.memory.total for device in plan.devices] == [1254152960, 998376704]
    assert [device.memory.kv_cache for device in plan.devices] == [0, 0]


# ---- goals ----------------------------------------------------------------------------------------------------------


def test_goal_sets_context_and_sequences(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "model", "llama")
    spec = read_spec(model_dir)
    model = open_transformer(TransformerGoal(model_dir=str(model_dir)))
    assert model.generation == GenerationRequest(min(spec.max_positions, 2048), 4)
    assert model.seq_len == spec.max_positions
    assert model.tokenizer is None
    asked = TransformerGoal(model_dir=str(model_dir), context=8, sequences=2, seq_len=100)
    model = open_transformer(asked)
    assert (model.seq_len, model.generation) == (8, GenerationRequest(8, 2))
    home = cluster([device_profile(0, 1.0, spec, 8)], 100)
    assert plan_request(asked, model, home).generation == GenerationRequest(8, 2)
    with pytest.raises(BadSetting, match=f"at most {spec.max_positions}"):
        open_transformer(asked.model_copy(update={"context": spec.max_positions + 1}))
    encoder = write_model(tmp_path / "encoder")
    for option, value in (("context", 2), ("sequences", 2), ("kv_cache", "int8")):
        with pytest.raises(BadSetting, match="generates no text"):
            open_transformer(TransformerGoal.model_validate({"model_dir": str(encoder), option: value}))
    with pytest.raises(ValidationError):
        TransformerGoal(model_dir="/m", sequences=0)


def test_decoder_has_a_text_tokenizer_and_no_pooling(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    model_dir = write_model(tmp_path / "model", "llama")
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(model_dir / "tokenizer.json"))
    (model_dir / "modules.json").write_text("[")
    assert isinstance(open_transformer(TransformerGoal(model_dir=str(model_dir))).tokenizer, TextTokenizer)


# ---- printed plans --------------------------------------------------------------------------------------------------


def shown(plan: TransformerPlan) -> str:
    with out.capture() as captured:
        out.print(*plan_tables(plan), *generation_lines(plan), sep="\n")
    return captured.get()


def test_tables_show_cache_rate_and_limits() -> None:
    text = shown(plan_for(request([1.0, 1.0], 10_000)))
    for expected in ("cache", "256 MiB", "tokens/s", "8192 tokens: 4 concurrent sequences of 2048", "128 of answer"):
        assert expected in text
    assert "cache" not in shown(make_plan(BERT_LARGE, "hmp", (1, 1)))


def test_explanation_names_the_bottleneck_of_a_decoder() -> None:
    asked = request([1.0, 1.0], 10_000)
    planned = plan_transformer(asked)
    assert [each.seconds for each in planned.others] == sorted(each.seconds for each in planned.others)
    assert bottleneck(planned.plan, asked.cluster).sentence == "decoding, token by token"
    won = why_won(planned, asked.cluster, "auto")
    assert "for 512 tokens of prompt and 128 of answer" in won
    (ruled_out,) = (each for each in planned.candidates if each.strategy == "sp")
    assert why_lost(ruled_out, asked.cluster).startswith("needs a context")
    assert candidate_as_json(ruled_out, asked.cluster)["predicted_seconds"] is None
    prompts = replace(asked, generation=GenerationRequest(2048, new_tokens=1))
    assert bottleneck(plan_for(prompts), asked.cluster).sentence.startswith("the compute of")


def test_offline_decoder_plan_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = write_model(tmp_path / "model", "llama")
    spec = read_spec(model_dir)
    home = cluster([device_profile(index, index + 1.0, spec, 8) for index in range(3)], 1000)
    (tmp_path / "home.json").write_text(home.model_dump_json())
    encoders = cluster([device_profile(index, 1.0) for index in range(3)], 1000)
    (tmp_path / "encoders.json").write_text(encoders.model_dump_json())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str, profile: str = "home.json") -> Any:
        command = ["plan", str(model_dir), "--load-profile", str(tmp_path / profile), *arguments]
        return CliRunner().invoke(app, command)

    for arguments, texts in (
        ((), ()),
        (("--explain",), ()),
        (("--context", "8", "--sequences", "2"), ("16 tokens: 2 concurrent sequences of 8",)),
        (("--strategy", "pipeline", "--explain"), ("by pipeline on 2 devices", "0 to 0", "1 to 1")),
    ):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert max(map(len, result.output.splitlines())) <= 80
        assert all(text in result.output for text in ("tokens/s", *texts))
    assert "--context cannot be used" in run("--context", "9999").output
    assert "has no decode speed" in run(profile="encoders.json").output


def test_kv_caches_are_copied_where_memory_allows() -> None:
    spec = LLAMA_1B.model_copy(update={"num_layers": 2})
    generation = GenerationRequest(2048, sequences=16)
    plain = request(
        [1.0, 1.0], 1000.0, [16 << 30] * 2, spec, strategy="hmp", generation=replace(generation, kv_copies=False)
    )
    plan = plan_transformer(plain).plan
    assert not plan.body.generation.kv_copies
    least = max(device.memory.total for device in plan.devices)
    for budget, copies in ((16 << 30, True), (least + (100 << 20), False)):
        asked = request([1.0, 1.0], 1000.0, [budget] * 2, spec, strategy="hmp", generation=generation)
        found = plan_transformer(asked).plan
        assert found.body.generation.kv_copies is copies
        assert found.body.heads == plan.body.heads
        assert all(device.memory.total <= budget for device in found.devices)
        assert generation.matches(found.body, asked.seq_len)  # so a coordinator that starts again goes on with it
        assert not replace(generation, context=1024).matches(found.body, asked.seq_len)
        assert replace(generation, kv_copies=False).matches(found.body, asked.seq_len) is not copies
