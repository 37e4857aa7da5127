"""Smoothing of profiles: devices of one kind share the shape of their curves; others keep their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from support.plans import BERT_LARGE, device_profile

from coordinator.devices.block_profiling import smooth_profiles
from hearth.plan.profile import BlockProfile, LatencyCurve

CURVES = ("qkv", "core", "out", "up", "down", "mlp_rows", "connective", "embedding")


def measured(speed: float, noise: Sequence[float]) -> BlockProfile:
    """Three points for each curve, each with its own noise factor."""
    true = device_profile(0, speed).blocks
    found = {}
    for number, name in enumerate(CURVES):
        curve: LatencyCurve = getattr(true, name)
        sizes = tuple(curve.sizes[0] * part // 4 for part in (1, 2, 4))
        seconds = tuple(curve(size) * noise[3 * number + index] for index, size in enumerate(sizes))
        found[name] = LatencyCurve(sizes=sizes, seconds=seconds)
    return true.model_copy(update=found)


def layer_seconds(blocks: BlockProfile) -> float:
    return blocks.attention(BERT_LARGE.num_heads) + blocks.mlp(BERT_LARGE.ffn_size)


def noise(random: Random) -> list[float]:
    return [random.uniform(0.95, 1.08) for _ in range(3 * len(CURVES))]


@given(st.integers(3, 5), st.integers(0, 17), st.randoms(use_true_random=False))
def test_smoothing_removes_disturbed_points(count: int, disturbed: int, random: Random) -> None:
    every = [noise(random) for _ in range(count)]
    every[0][disturbed] = 1.3
    found = smooth_profiles({str(index): measured(1.0, each) for index, each in enumerate(every)})
    assert all(getattr(blocks, name) == getattr(found["1"], name) for blocks in found.values() for name in CURVES)
    assert 0.95 <= layer_seconds(found["0"]) / layer_seconds(device_profile(0, 1.0).blocks) <= 1.08


@given(st.floats(1.3, 6.0), st.randoms(use_true_random=False))
def test_slower_device_of_the_same_kind_keeps_its_speed_ratio(factor: float, random: Random) -> None:
    found = smooth_profiles({"fast": measured(1.0, noise(random)), "slow": measured(1 / factor, noise(random))})
    fast, slow = ([second for name in CURVES for second in getattr(found[d], name).seconds] for d in ("fast", "slow"))
    ratios = [b / a for a, b in zip(fast, slow, strict=True)]
    assert max(ratios) / min(ratios) < 1.0001
    assert 0.9 * factor < ratios[0] < 1.1 * factor


def test_device_of_another_kind_keeps_its_profile() -> None:
    exact = [1.0] * 24
    odd = [3.0 if 3 <= index < 6 else 1.0 for index in range(24)]  # attention is slower on this device
    blocks = {"a": measured(1.0, exact), "b": measured(1.0, exact), "odd": measured(1.0, odd)}
    found = smooth_profiles(blocks)
    assert found["odd"] == blocks["odd"]
    assert all(math.isclose(layer_seconds(found[name]), layer_seconds(blocks[name])) for name in "ab")


def test_single_device_keeps_its_measurements() -> None:
    alone = {"only": measured(1.0, [1.1, 0.9, 1.0] * 8)}
    assert smooth_profiles(alone) == alone
