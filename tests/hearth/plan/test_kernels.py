"""The choice of kernels by measured times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.plan.kernels import KernelTime, choose_kernels, chosen_bytes_per_weight, nearest_choice


def times(*columns: tuple[str, str, float, dict[int, float]], shape: tuple[int, int] = (512, 256)) -> list[KernelTime]:
    """Times of (layout, kernel, bytes per weight, seconds by rows)."""
    return [
        KernelTime(
            num_outputs=shape[0], num_inputs=shape[1], rows=rows, layout=layout, kernel=kernel, seconds=seconds,
            bytes_per_weight=num_bytes,
        )
        for layout, kernel, num_bytes, by_rows in columns
        for rows, seconds in by_rows.items()
    ]  # fmt: skip


NATIVE = ("torch", "torch", 0.625, {1: 1.0, 256: 60.0})
EXPAND = ("torch", "expand", 0.625, {1: 10.0, 256: 15.0})
PACKED = ("ort", "ort", 0.94, {1: 0.9, 256: 40.0})


def test_each_number_of_rows_gets_the_fastest_kernel_of_one_layout() -> None:
    (choice,) = choose_kernels(times(NATIVE, EXPAND, PACKED))
    # torch leads by 9 s at 1 row and lags by 45 s at 256: the lines cross at 1 + 255 * 9 / 54 = 43.5 rows.
    assert (choice.layout, choice.rows, choice.kernels) == ("torch", (43, 256), ("torch", "expand"))
    assert [choice.kernel(rows) for rows in (0, 1, 2, 256, 999)] == [*["torch"] * 3, *["expand"] * 2]


@given(
    st.lists(st.integers(1, 300), min_size=2, max_size=5, unique=True).map(sorted),
    st.lists(st.tuples(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)), min_size=5, max_size=5),
)
def test_rows_between_measured_ones_get_the_kernel_that_is_faster_there(
    measured: list[int], seconds: list[tuple[float, float]]
) -> None:
    by_kernel = [{rows: pair[i] for rows, pair in zip(measured, seconds, strict=False)} for i in (0, 1)]
    (choice,) = choose_kernels(times(*(("torch", str(i), 0.6, each) for i, each in enumerate(by_kernel))))
    for rows in range(measured[0], measured[-1] + 1):
        interpolated = [np.interp(rows, measured, [each[number] for number in measured]) for each in by_kernel]
        assert interpolated[int(choice.kernel(rows))] <= min(interpolated) * (1 + 1e-9)


def test_a_kernel_without_a_time_at_the_next_number_of_rows_ends_at_its_own() -> None:
    (choice,) = choose_kernels(times(("torch", "one", 0.6, {1: 1.0}), ("torch", "other", 0.6, {1: 2.0, 64: 9.0})))
    assert (choice.rows, choice.kernels) == ((1, 64), ("one", "other"))


def test_single_kernel_serves_all_numbers_of_rows() -> None:
    (choice,) = choose_kernels(times(NATIVE, EXPAND, PACKED), single=True)
    assert set(choice.kernels) == {"ort"}


@pytest.mark.parametrize(("seconds", "layout"), [(0.97, "torch"), (0.85, "ort")])
def test_more_memory_must_save_time(seconds: float, layout: str) -> None:
    faster = ("ort", "ort", 0.94, {1: seconds, 256: 60.0 * seconds})
    (choice,) = choose_kernels(times(NATIVE, faster))
    assert choice.layout == layout


def test_a_layout_that_was_not_measured_for_all_rows_is_not_chosen() -> None:
    (choice,) = choose_kernels(times(NATIVE, ("ort", "ort", 0.5, {1: 0.1})))
    assert choice.layout == "torch"


def test_a_disturbed_measurement_is_outvoted_by_the_other_shapes() -> None:
    disturbed = times(("torch", "torch", 0.625, {1: 9.0, 256: 60.0}), PACKED, shape=(64, 64))
    quiet = [time for inputs in (128, 256, 512) for time in times(NATIVE, EXPAND, PACKED, shape=(64, inputs))]
    choices = choose_kernels([*disturbed, *quiet])
    assert [choice.layout for choice in choices] == ["torch"] * 4


@pytest.mark.parametrize(
    ("prompt", "decode", "layout"),
    [(20.0, 0.9, "ort"), (95.0, 0.9, "torch"), (40.0, 0.3, "ort")],  # the request of torch takes 128 + 240 s
)
def test_layout_is_the_one_with_the_faster_request(prompt: float, decode: float, layout: str) -> None:
    native = ("torch", "torch", 0.625, {1: 1.0, 4: 1.0, 256: 60.0})
    expand = ("torch", "expand", 0.625, {1: 10.0, 4: 9.0, 256: 30.0})
    other = ("ort", "ort", 0.625, {1: decode, 4: 2.0, 256: prompt})
    (choice,) = choose_kernels(times(native, expand, other))
    assert choice.layout == layout


@pytest.mark.parametrize(("short", "layout"), [(1.0, "plain"), (2.0, "packed")])
def test_texts_of_all_lengths_count_where_nothing_is_decoded(short: float, layout: str) -> None:
    plain = ("plain", "plain", 4.0, {16: short, 256: 12.0})  # 16 texts of 16 tokens, and one of 256
    packed = ("packed", "packed", 4.0, {16: 1.5, 256: 10.0})
    (choice,) = choose_kernels(times(plain, packed))
    assert choice.layout == layout


def test_nearest_shape_and_mean_memory() -> None:
    measured = times(NATIVE, shape=(4096, 1024)) + times(EXPAND, shape=(1024, 1024))
    choices = choose_kernels(measured)
    for shape, kernel in (((2500, 900), "torch"), ((64, 1024), "expand")):
        nearest = nearest_choice(choices, *shape)
        assert nearest.kernels[0] == kernel
    assert nearest_choice(choices, 0, 32) is nearest_choice((), 8, 8) is None
    larger = [time.model_copy(update={"bytes_per_weight": 0.9}) for time in measured[:2]]
    assert chosen_bytes_per_weight(larger + measured[2:], choices) == pytest.approx((4 * 0.9 + 0.625) / 5)
    assert chosen_bytes_per_weight((), ()) == 0
    assert choose_kernels(()) == ()
