"""Parameters of tests of which the normal run takes some and `make test-slow` all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], is_normal: Callable[..., bool]) -> list[Any]:
    """The cases for `parametrize`: tuples, or single values. Those that are not normal are marked `slow`."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=[] if is_normal(*values) else pytest.mark.slow))
    return found
