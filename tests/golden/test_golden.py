"""Plans and options equal the golden files. `test_messages.py` compares the golden messages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden.current import OPTIONS, PLANS, load, options, plans

# The order of sums and the vector units of other processors change the last bits of a fraction.
RELATIVE = 1e-9
CASES = sorted(PLANS.glob("*.json"))


def differences(golden: Any, found: Any, path: str = "") -> Iterator[str]:
    if isinstance(golden, dict) and isinstance(found, dict) and golden.keys() == found.keys():
        for name in golden:
            yield from differences(golden[name], found[name], f"{path}.{name}")
    elif isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        for index, (before, after) in enumerate(zip(golden, found, strict=True)):
            yield from differences(before, after, f"{path}.{index}")
    elif isinstance(golden, float) and isinstance(found, float):
        if not math.isclose(golden, found, rel_tol=RELATIVE, abs_tol=0.0):
            yield f"{path}: {golden} was recorded, {found} is found"
    elif type(golden) is not type(found) or golden != found:
        yield f"{path}: {golden!r:.160} was recorded, {found!r:.160} is found"


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_plans_equal_the_golden_files(path: Path) -> None:
    case = load(path)
    assert not list(differences(case["plans"], plans(case)))


def test_options_equal_the_golden_file() -> None:
    assert options() == load(OPTIONS)


def test_differences_have_paths() -> None:
    golden = {"a": [1, {"b": 2.0}], "c": None, "same": 1.0}
    found = {"a": [1, {"b": 2.0000001}], "c": 0, "same": 1.0 + 1e-15}
    assert [each.partition(":")[0] for each in differences(golden, found)] == [".a.1.b", ".c"]
    for golden_part, found_part in (([1, 2], [1, 2, 3]), (1, True), ({"a": None}, {})):
        assert list(differences(golden_part, found_part))
