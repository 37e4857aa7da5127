"""The accuracy budget: measurement of errors, choice of the value format, and steps in another format."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import minilm, save_random_model, small_bert
from support.plans import make_plan

from coordinator.cli.demo_run import COMMANDS, SENTENCES
from coordinator.models.checkpoint.families import read_spec
from coordinator.serve.kinds.accuracy import (
    FORMATS,
    MIN_TIME_SAVING,
    SAFETY_FACTOR,
    FormatMeasurement,
    ValueFormatName,
    calibrate,
    calibration_batches,
    choose_format,
    describe_choice,
    max_relative_error,
)
from coordinator.serve.text.sentences import SentenceTokenizer
from hearth.plan.common import WireFormat
from hearth.wire.messages import Run

Array = np.ndarray[Any, Any]

# ---- the error ------------------------------------------------------------------------------------------------------


def rows(seed: int, num_rows: int = 5, width: int = 8) -> Array:
    return np.random.default_rng(seed).standard_normal((num_rows, width)).astype(np.float32)


@given(st.integers(0, 1000), st.floats(0, 0.5), st.integers(0, 4))
def test_error_is_that_of_the_worst_row(seed: int, size: float, row: int) -> None:
    exact = rows(seed)
    other = exact.astype(np.float64)
    other[row] *= 1 + size
    assert max_relative_error(exact, other) == pytest.approx(size)
    other[(row + 1) % 5] *= 1 - size / 2
    assert max_relative_error(exact, other) == pytest.approx(size)


@given(st.integers(0, 1000), st.floats(1e-3, 1e3), st.floats(0, 1))
def test_error_is_scale_invariant(seed: int, scale: float, size: float) -> None:
    exact, noise = rows(seed).astype(np.float64), rows(seed + 1)
    plain = max_relative_error(exact, exact + size * noise)
    assert max_relative_error(scale * exact, scale * (exact + size * noise)) == pytest.approx(plain, abs=1e-12)


def test_nan_is_an_infinite_error_and_zero_rows_are_allowed() -> None:
    exact = rows(0)
    exact[2] = 0
    assert max_relative_error(exact, exact) == 0.0
    other = exact.copy()
    other[1] *= 1.5
    assert max_relative_error(exact, other) == pytest.approx(0.5)
    other[2] = 1e-9
    assert max_relative_error(exact, other) == np.inf
    for bad in (np.nan, np.inf):
        other = exact.copy()
        other[0, 0] = bad
        assert max_relative_error(exact, other) == np.inf
        assert max_relative_error(other, exact) == np.inf
    assert max_relative_error(exact[:0], exact[:0]) == 0.0


# ---- the choice -----------------------------------------------------------------------------------------------------

POSITIVE = st.floats(1e-6, 10)


@given(
    st.lists(POSITIVE, min_size=4, max_size=4), st.lists(st.floats(0, 1) | st.just(np.inf), min_size=3, max_size=3),
    st.floats(1e-6, 1),
)  # fmt: skip
def test_chosen_format_is_the_fastest_within_the_budget(
    seconds: list[float], errors: list[float], budget: float
) -> None:
    measured = [FormatMeasurement(*each) for each in zip(FORMATS, [0.0, *errors], seconds, strict=True)]
    chosen = choose_format(measured, budget)
    exact = measured[0]
    assert chosen.error * SAFETY_FACTOR <= budget
    assert chosen is exact or chosen.seconds <= (1 - MIN_TIME_SAVING) * exact.seconds
    for each in measured:
        if each.error * SAFETY_FACTOR <= budget and each.seconds <= (1 - MIN_TIME_SAVING) * exact.seconds:
            assert chosen.seconds <= each.seconds
    assert choose_format(measured, 2 * budget).seconds <= chosen.seconds  # a larger budget never makes it slower
    assert f"travel as {chosen.values} " in describe_choice(measured, chosen, budget)


def test_exact_is_chosen_if_nothing_is_faster_or_accurate_enough() -> None:
    same = [FormatMeasurement("exact", 0.0, 1.0), FormatMeasurement("int8", 1e-3, 1.0)]
    assert choose_format(same, 0.1).values == "exact"
    hardly = [FormatMeasurement("exact", 0.0, 1.0), FormatMeasurement("int8", 1e-3, 0.96)]
    assert choose_format(hardly, 0.1).values == "exact"
    faster = [
        FormatMeasurement("exact", 0.0, 1.0),
        FormatMeasurement("int8", 0.03, 0.4),
        FormatMeasurement("bf16", 0.004, 0.6),
    ]
    assert [choose_format(faster, budget).values for budget in (0.1, 0.01, 0.001)] == ["int8", "bf16", "exact"]
    line = describe_choice(faster, faster[2], 0.01)
    assert line == (
        "activations travel as bf16 (accuracy budget 0.01: exact 1.00 s, int8 400 ms error 3.0e-02, "
        "bf16 600 ms error 4.0e-03)"
    )


# ---- calibration ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 60_000), st.integers(1, 600))
def test_calibration_batches_are_valid_and_deterministic(vocab_size: int, seq_len: int) -> None:
    found = calibration_batches(vocab_size, seq_len)
    again = calibration_batches(vocab_size, seq_len)
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))
    assert all(ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < vocab_size for ids in found)
    lengths = [len(ids) for ids in found]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == seq_len
    assert len(lengths) == 3 or seq_len < 8


def test_calibration_uses_the_worst_error_against_kept_exact_values_and_the_median_time() -> None:
    errors = {"exact": 0.0, "bf16": 0.01, "fp16": 0.001, "int8": 0.1}
    kept: set[bytes] = set()
    timed: list[ValueFormatName] = []

    async def run(values: ValueFormatName, keep: bool, ids: Array) -> tuple[float, float]:
        if keep:
            assert values == "exact"
            kept.add(ids.tobytes())
            return 0.0, 9.0
        assert ids.tobytes() in kept
        if len(ids) == 64:
            timed.append(values)
        worst = 3.0 if len(ids) == 32 else 1.0  # batches of middle length have the largest error
        late = 5.0 if timed.count(values) == 2 else 0.0
        return worst * errors[values], 1.0 + FORMATS.index(values) + late

    measured = asyncio.run(calibrate(run, 100, 64))
    assert [each.values for each in measured] == list(FORMATS)
    assert [each.error for each in measured] == [3 * error for error in errors.values()]
    assert [each.seconds for each in measured] == [1.0, 2.0, 3.0, 4.0]
    assert {len(ids) // 4 for ids in kept} == {8, 32, 64}


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    pytest.importorskip("transformers")
    return save_random_model(tmp_path_factory.mktemp("bert"), small_bert())


def test_calibrated_formats_equal_the_plan_formats() -> None:
    assert get_args(WireFormat.model_fields["values"].annotation) == FORMATS


@pytest.mark.parametrize("strategy", ["hmp", "sp", "megatron-tp"])
@pytest.mark.parametrize("lz4", ["off", "on", "auto"])
def test_step_in_another_format_equals_a_plan_in_that_format(strategy: Any, lz4: Any, bert: Path) -> None:
    from support.engines import EngineCluster

    spec = read_spec(bert)
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, 40, dtype=np.int32)
    lengths = np.array([0, 25, 40], np.int32)

    def run(cluster: EngineCluster, step: int, values: ValueFormatName | None) -> Array:
        request = Run(
            holder="test", epoch=cluster.plan.epoch, step=step, output="hidden", timeout_seconds=30.0, values=values
        )
        with ThreadPoolExecutor(len(cluster.engines)) as pool:
            results = list(pool.map(lambda engine: engine.run(request, ids, lengths), cluster.engines))
        for done, _ in results:
            assert 0 < sum(done.compute_seconds) <= done.ended_seconds - done.began_seconds
        return np.concatenate([part for _, part in results])

    def plan(values: ValueFormatName) -> Any:
        return make_plan(spec, strategy, (2, 1, 3), wire=WireFormat(values=values, lz4=lz4))

    expected: dict[ValueFormatName, Array] = {}
    for values in FORMATS:
        with EngineCluster(bert, plan(values)) as cluster:
            expected[values] = run(cluster, 1, None)
    assert len({rows.tobytes() for rows in expected.values()}) == len(FORMATS)
    with EngineCluster(bert, plan("bf16")) as cluster:
        for step, values in enumerate((None, "int8", "exact", None, "fp16", "bf16")):
            assert np.array_equal(run(cluster, step, values), expected[values or "bf16"]), values


@pytest.mark.thorough
def test_calibrated_error_holds_on_real_sentences() -> None:
    """A trained model, calibrated on random tokens: errors on real inputs are within the safety factor."""
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    from support.engines import EngineCluster

    model_dir = minilm()
    spec = read_spec(model_dir)
    plan = make_plan(spec, "hmp", (1, 1, 2), wire=WireFormat(lz4="off"))
    sentences = SentenceTokenizer(model_dir).encode([*COMMANDS, *SENTENCES], 128)
    with EngineCluster(model_dir, plan) as cluster:
        step = 0

        def run(values: ValueFormatName, sequences: list[Array]) -> Array:
            nonlocal step
            step += 1
            request = Run(
                holder="test", epoch=plan.epoch, step=step, output="hidden", timeout_seconds=30.0, values=values
            )
            lengths = np.cumsum([0, *map(len, sequences)], dtype=np.int32)
            ids = np.concatenate(sequences).astype(np.int32)
            with ThreadPoolExecutor(len(cluster.engines)) as pool:
                results = list(pool.map(lambda engine: engine.run(request, ids, lengths), cluster.engines))
            return np.concatenate([part for _, part in results])

        exact: dict[int, Array] = {}

        async def once(values: ValueFormatName, keep: bool, ids: Array) -> tuple[float, float]:
            rows = run(values, [ids])
            if keep:
                exact[len(ids)] = rows
            return max_relative_error(exact[len(ids)], rows), 1.0

        measured = asyncio.run(calibrate(once, spec.vocab_size, 128))
        texts = [np.asarray(ids) for ids in sentences]
        expected = run("exact", texts)
        for format_ in measured[1:]:
            assert 0 < max_relative_error(expected, run(format_.values, texts)) <= SAFETY_FACTOR * format_.error, (
                format_
            )


def test_waiting_for_a_slow_peer_is_not_compute_time(bert: Path) -> None:
    from support.engines import EngineCluster

    spec = read_spec(bert)
    with EngineCluster(bert, make_plan(spec, "hmp", (1, 1)), bytes_per_second=100e3) as cluster:
        _, answers = cluster.run([list(range(60))])
    for answer in answers:  # each tile of 30 rows takes over 100 ms to transfer
        assert sum(answer.compute_seconds) < (answer.ended_seconds - answer.began_seconds) / 2
