"""Human-readable sizes, times and rates."""

from __future__ import annotations

import re
from fractions import Fraction

_SUFFIXES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_SUFFIXES.update({f"{letter}i": 1024 ** (i + 1) for i, letter in enumerate("kmgt")})
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*$", re.IGNORECASE)

_TIME_UNITS = {"": 1, "s": 1, "min": 60, "h": 3600}
_TIME = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(|s|min|h)\s*$")


def parse_bytes(text: str) -> int:
    """Parse `"800M"`, `"2 GiB"` or `"1500000"`; M is 10^6, Mi is 2^20. Raises ValueError."""
    match = _SIZE.match(text)
    if match is None or match[2].lower() not in _SUFFIXES:
        raise ValueError(f"'{text}' is not a size such as 800M or 2GiB")
    return int(Fraction(match[1]) * _SUFFIXES[match[2].lower()])  # a Fraction, since a float could round or overflow


def parse_seconds(text: str) -> float:
    """Parse `"30s"`, `"1.5 min"`, `"2h"` or `"45"`, in seconds. Raises ValueError."""
    match = _TIME.match(text)
    if match is None:
        raise ValueError(f"'{text}' is not a time such as 30s or 5min")
    return float(match[1]) * _TIME_UNITS[match[2]]


def format_bytes(num_bytes: float) -> str:
    """Format with three significant figures and binary units: `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.{_decimals(num_bytes)}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.{_decimals(num_bytes)}f} TiB"


def format_seconds(seconds: float) -> str:
    """Format as `1.24 s`, `35.2 ms` or `180 µs`."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return f"{seconds * scale:.{_decimals(seconds * scale)}f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def format_age(seconds: float) -> str:
    """Format an elapsed time roughly: `12 s`, `3 min`, `5 h`, `2 days`."""
    for scale, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if seconds < (120 if unit == "s" else 7200 if unit == "min" else 172_800):
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def format_rate(bytes_per_second: float) -> str:
    """Format a link's rate in bits: `125 Mbit/s`."""
    mbit = bytes_per_second * 8 / 1e6
    return f"{mbit / 1000:.{_decimals(mbit / 1000)}f} Gbit/s" if mbit >= 1000 else f"{mbit:.{_decimals(mbit)}f} Mbit/s"


def _decimals(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
