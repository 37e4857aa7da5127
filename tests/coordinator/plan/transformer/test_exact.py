"""The exact planner against brute force and Galaxy; sharded or replicated weight groups; the order of the ring."""

from __future__ import annotations

from itertools import pairwise, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planning import plan_for
from support.plans import BERT_LARGE, LLAMA_1B, cluster, device_profile, with_rates

from coordinator.plan.transformer.choose import plan_shares
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.planners.exact import best_shares, plan_exact
from coordinator.plan.transformer.planners.galaxy import plan_galaxy
from coordinator.plan.transformer.replicate import replicate
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest, best_ring, build_plan
from coordinator.plan.transformer.shares import LayerTimes, ShareBudget
from coordinator.plan.transformer.strategies import rank_memory
from hearth.errors import ModelDoesNotFit
from hearth.plan.model_spec import ModelSpec, RotarySpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile

TINY = BERT_LARGE.model_copy(
    update={
        "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "hidden_size": 256, "ffn_size": 256, "vocab_size": 3000,
        "max_positions": 64,
    }
)  # fmt: skip
# Four KV groups of two heads, whose cache takes more memory than their weights, and a separate head.
TINY_DECODER = TINY.model_copy(
    update={
        "num_heads": 8, "head_dim": 32, "causal": True, "norm": "rms", "norm_place": "pre", "gated": True,
        "qkv_bias": False, "out_bias": False, "mlp_bias": False, "rotary": RotarySpec(), "tied_head": False,
    }
)  # fmt: skip
speeds = st.lists(st.floats(0.2, 4), min_size=2, max_size=3)


def request(speeds: list[float], budgets: list[int], mbit: float = 100, spec=TINY, seq_len: int = 64) -> PlanRequest:
    devices = [
        device_profile(i, speed, spec=spec, seq_len=seq_len, budget_bytes=budget)
        for i, (speed, budget) in enumerate(zip(speeds, budgets, strict=True))
    ]
    generation = GenerationRequest(1024, 4, new_tokens=32) if spec.causal else None
    return PlanRequest(spec, cluster(devices, mbit), seq_len, generation=generation)


def splits(total: int, parts: int) -> list[tuple[int, ...]]:
    return [s for s in product(range(total + 1), repeat=parts) if sum(s) == total]


def brute_force(problem: PlanRequest) -> float:
    """The minimum objective over every split of every kind, or infinity."""
    blocks = [device.blocks for device in problem.cluster.devices]
    budget, work = ShareBudget(problem, "hmp"), LayerTimes(problem)
    group = problem.spec.num_heads // 4
    num = len(blocks)
    best = float("inf")
    for a in splits(4, num):
        for b in splits(4, num):
            seconds = max(work.attention(blocks[d], a[d] * group) for d in range(num)) + max(
                work.mlp(blocks[d], b[d] * 64) for d in range(num)
            )
            if seconds < best and any(
                all(
                    a[d] * budget.bytes_per_head_grain
                    + b[d] * budget.bytes_per_column_grain
                    + v[d] * budget.bytes_per_vocabulary_grain
                    <= budget.share_bytes(d)
                    for d in range(num)
                )
                for v in splits(3, num)
            ):
                best = seconds
    return best


@pytest.mark.parametrize(("spec", "most_extra"), [(TINY, 7 << 20), (TINY_DECODER, 14 << 20)])
@given(speeds=speeds, data=st.data())
def test_objective_equals_brute_force(
    spec: ModelSpec, most_extra: int, speeds: list[float], data: st.DataObject
) -> None:
    base = 289 << 20  # about the memory of a worker without shares, so that memory binds in a third of the cases
    extra = st.one_of(st.just(1 << 30), *[st.integers(0, most_extra)] * 3)
    problem = request(speeds, [base + data.draw(extra) for _ in speeds], spec=spec)
    expected = brute_force(problem)
    try:
        found = best_shares(problem, "hmp")
    except ModelDoesNotFit as error:
        assert expected == float("inf")
        assert error.missing_bytes > 0
        return
    assert found.value == pytest.approx(expected)
    assert found.bound <= found.value * (1 + 1e-9)


@pytest.mark.parametrize("spec", [BERT_LARGE, LLAMA_1B.model_copy(update={"num_layers": 4})])
@given(speeds=st.lists(st.floats(0.1, 4), min_size=2, max_size=4), mbit=st.floats(10, 1000), data=st.data())
def test_exact_shares_are_never_worse_than_galaxy(
    spec: ModelSpec, speeds: list[float], mbit: float, data: st.DataObject
) -> None:
    budgets = [data.draw(st.sampled_from([400 << 20, 600 << 20, 1 << 30, 8 << 30])) for _ in speeds]
    problem = request(speeds, budgets, mbit, spec=spec, seq_len=284)
    try:
        galaxy = plan_galaxy(problem, "hmp")
    except ModelDoesNotFit as error:
        assert error.missing_bytes > 0
        return
    exact = plan_shares(problem, "hmp")
    assert request_seconds(exact) <= request_seconds(galaxy)
    for rank, device in enumerate(exact.devices):
        assert rank_memory(spec, exact.body, rank).total <= device.budget_bytes


def test_spare_memory_is_used_to_replicate_on_slow_links() -> None:
    def planned(budget: int) -> tuple[float, int]:
        problem = request([1.0] * 4, [budget] * 4, mbit=60, spec=BERT_LARGE, seq_len=284)
        plan = replicate(problem, plan_shares(problem, "hmp"))
        for device in plan.devices:
            assert device.memory.total <= budget
        return plan.predicted.latency_seconds, sum(mode.mlp == "replicated" for mode in plan.body.modes)

    plans = [planned(budget << 20) for budget in (900, 1300, 8000)]
    assert all(more[0] < less[0] for less, more in pairwise(plans))
    assert plans[-1][1] == BERT_LARGE.num_layers


def test_word_embeddings_are_replicated_where_memory_allows() -> None:
    spec = BERT_LARGE.model_copy(update={"num_layers": 4})

    def planned(budgets: list[int]) -> TransformerPlan:
        problem = request([1.0, 0.5], budgets, mbit=125, spec=spec, seq_len=284)
        return replicate(problem, plan_shares(problem, "hmp"))

    plan = planned([8 << 30] * 2)
    assert plan.body.embedding == "replicated"
    sharded = plan.body.model_copy(update={"embedding": "sharded"})
    as_sharded = build_plan(request([1.0, 0.5], [8 << 30] * 2, 125, spec=spec, seq_len=284), sharded, "test")
    assert plan.predicted.latency_seconds < 0.99 * as_sharded.predicted.latency_seconds
    budgets = [device.memory.total + (16 << 20) for device in as_sharded.devices]  # the table has 60 MiB more
    tight = planned(budgets)
    assert tight.body.embedding == "sharded"
    assert all(device.memory.total <= budget for device, budget in zip(tight.devices, budgets, strict=True))


def test_nothing_is_replicated_on_fast_links() -> None:
    problem = request([1.0] * 2, [8 << 30] * 2, mbit=100_000, spec=BERT_LARGE, seq_len=284)
    plan = plan_exact(problem, "hmp")
    assert replicate(problem, plan).predicted.latency_seconds >= 0.97 * plan.predicted.latency_seconds


def slow_links(profile: ClusterProfile, slow: set[frozenset[str]]) -> ClusterProfile:
    return with_rates(profile, lambda link: link.bytes_per_second / (10 if {link.source, link.target} in slow else 1))


@given(st.integers(3, 6), st.data())
def test_ring_order_maximises_the_slowest_hop(num: int, data: st.DataObject) -> None:
    profile = cluster([device_profile(i, 1.0) for i in range(num)], 100)
    pairs = [frozenset((f"id{a}", f"id{b}")) for a in range(num) for b in range(a)]
    profile = slow_links(profile, set(data.draw(st.lists(st.sampled_from(pairs), max_size=num))))

    def slowest(order: tuple[str, ...]) -> float:
        hops = zip(order, (*order[1:], order[0]), strict=True)
        return min(profile.link(a, b).bytes_per_second for a, b in hops)

    ids = tuple(device.device_id for device in profile.devices)
    found = tuple(device.device_id for device in best_ring(profile).devices)
    assert slowest(found) == max(slowest((ids[0], *rest)) for rest in permutations(ids[1:]))


def test_large_ring_is_improved_by_swaps() -> None:
    profile = cluster([device_profile(i, 1.0) for i in range(10)], 100)
    profile = slow_links(profile, {frozenset((f"id{i}", f"id{i + 1}")) for i in range(0, 8, 2)})
    order = [device.device_id for device in best_ring(profile).devices]
    hops = zip(order, [*order[1:], order[0]], strict=True)
    assert min(profile.link(a, b).bytes_per_second for a, b in hops) == 100e6 / 8


def test_plan_names_its_planner_and_quality() -> None:
    plan = plan_for(request([1.0, 1.0], [8 << 30] * 2, mbit=500, spec=BERT_LARGE, seq_len=284))
    assert plan.planner.startswith("auto: ")
