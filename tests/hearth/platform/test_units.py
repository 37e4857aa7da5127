"""Parsing and printing of byte sizes. Sizes are exact, however large."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.platform.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_seconds


@given(st.integers(0, 10**400))
def test_plain_number_is_bytes(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes


@given(st.integers(0, 10**15), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_suffixes_multiply_exactly(number: int, suffix: str) -> None:
    assert parse_bytes(f"{number} {suffix}") == number << 10 * (["KiB", "MiB", "GiB", "TiB"].index(suffix) + 1)


@pytest.mark.parametrize(
    ("text", "expected"), [("800M", 800_000_000), ("2GiB", 2 << 30), ("1.5 ki", 1536), ("12", 12), ("3 kb", 3000)]
)
def test_sizes_are_parsed(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "M", "-3", "2 bananas", "1e9", "2GiBi"])
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("1.5 min", 90), ("2h", 7200), ("45", 45)])
def test_times_are_parsed(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-3s", "3 days", "1e9", "3sec"])
def test_invalid_times_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not a time"):
        parse_seconds(text)


def test_sizes_are_formatted() -> None:
    assert [format_bytes(n) for n in (12, 1536, 5 << 20, 3 << 40)] == ["12 B", "1.50 KiB", "5.00 MiB", "3.00 TiB"]
    assert [format_seconds(s) for s in (2.5, 0.0352, 0.00018)] == ["2.50 s", "35.2 ms", "180 µs"]
    assert [format_rate(r) for r in (15.625e6, 1.25e8)] == ["125 Mbit/s", "1.00 Gbit/s"]
