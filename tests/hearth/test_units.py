"""Sizes are exact, however large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.units import parse_bytes


@given(st.integers(0, 10**400))
def test_a_plain_number_is_that_many_bytes(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes


@given(st.integers(0, 10**15), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_a_suffix_multiplies_exactly(number: int, suffix: str) -> None:
    assert parse_bytes(f"{number} {suffix}") == number << 10 * (["KiB", "MiB", "GiB", "TiB"].index(suffix) + 1)
