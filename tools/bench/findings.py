"""Findings of a benchmark: measured figures and their targets, as Markdown tables and JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict


class Finding(BaseModel):
    """One measured figure. `holds`: whether it meets its target; None if there is none."""

    model_config = ConfigDict(frozen=True)

    what: str
    measured: str
    value: float | None = None  # the figure itself, in the unit that `measured` names
    asked: str = ""
    holds: bool | None = None


def at_most(what: str, value: float, limit: float, measured: str, asked: str) -> Finding:
    return Finding(what=what, measured=measured, value=value, asked=asked, holds=value <= limit)


def at_least(what: str, value: float, limit: float, measured: str, asked: str) -> Finding:
    return Finding(what=what, measured=measured, value=value, asked=asked, holds=value >= limit)


def equal(what: str, value: float, expected: float, measured: str, asked: str) -> Finding:
    return Finding(what=what, measured=measured, value=value, asked=asked, holds=value == expected)


def findings_table(findings: Sequence[Finding]) -> str:
    """Markdown table of findings."""
    rows = [
        (each.what, each.asked or "-", each.measured, {None: "-", True: "yes", False: "**no**"}[each.holds])
        for each in findings
    ]
    return table(("what", "asked", "measured", "holds"), rows)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def as_json(findings: Sequence[BaseModel]) -> str:
    return json.dumps([each.model_dump(mode="json") for each in findings], indent=1) + "\n"


def all_hold(findings: Iterable[Finding]) -> bool:
    return all(each.holds is not False for each in findings)
