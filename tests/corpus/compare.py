"""Differences between JSON values, and which of them are intended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

# Relative tolerance of fractions: the order of sums and the vector units of other processors change their last bits.
_RELATIVE = 1e-9
NOTHING = "(nothing)"


class Difference(NamedTuple):
    """A difference at a path of names and indices, joined by dots."""

    path: str
    recorded: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.path}: {_short(self.recorded)} was recorded, {_short(self.found)} is found"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:160]}..."


def differences(recorded: Any, found: Any) -> list[Difference]:
    return list(_walk(recorded, found, ""))


def _walk(recorded: Any, found: Any, path: str) -> Iterator[Difference]:
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in sorted(recorded.keys() | found.keys()):
            yield from _walk(recorded.get(name, NOTHING), found.get(name, NOTHING), f"{path}.{name}".lstrip("."))
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for index, (before, after) in enumerate(zip(recorded, found, strict=True)):
            yield from _walk(before, after, f"{path}.{index}".lstrip("."))
    elif not _same(recorded, found):
        yield Difference(path, recorded, found)


def _same(recorded: Any, found: Any) -> bool:
    if isinstance(recorded, float) and isinstance(found, (int, float)):
        return math.isclose(recorded, found, rel_tol=_RELATIVE, abs_tol=0.0)
    return type(recorded) is type(found) and bool(recorded == found)


class Intended(NamedTuple):
    """An intended difference: patterns for the part of the corpus, its cases and their paths, and the reason."""

    part: str
    case: str
    path: str
    why: str

    def covers(self, part: str, case: str, difference: Difference) -> bool:
        pairs = ((part, self.part), (case, self.case), (difference.path, self.path))
        return all(fnmatchcase(value, pattern) for value, pattern in pairs)


def not_intended(
    part: str, case: str, found: Iterable[Difference], intended: Iterable[Intended], used: set[Intended] | None = None
) -> list[Difference]:
    """The differences that no entry covers. Entries that cover one are added to `used`."""
    entries = list(intended)
    left = []
    for difference in found:
        covering = [each for each in entries if each.covers(part, case, difference)]
        if used is not None:
            used.update(covering)
        if not covering:
            left.append(difference)
    return left
