"""Findings of a benchmark: measured figures and their targets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from tools.bench.results import Summary, Table

Format = Callable[[float], str]
COUNT: Format = "{:.0f}".format
BYTES: Format = "{:.0f} bytes".format  # exact, where two numbers of bytes must be equal
PERCENT: Format = "{:.1%}".format
RATIO: Format = "{:.2f} x".format


class Finding(BaseModel):
    """One measured figure. `holds`: whether it meets its target; None if there is none."""

    model_config = ConfigDict(frozen=True)

    figure: str
    measured: str
    value: float | None = None  # the figure itself, in the unit that `measured` names
    target: str = ""
    holds: bool | None = None


def without_target(figure: str, value: float, form: Format, detail: str = "") -> Finding:
    """`form` writes the value, `detail` follows in parentheses; so in all functions here."""
    return Finding(figure=figure, measured=f"{form(value)} ({detail})" if detail else form(value), value=value)


def at_most(figure: str, value: float, limit: float, form: Format, detail: str = "") -> Finding:
    """A figure with an upper limit as its target."""
    return _judged(without_target(figure, value, form, detail), f"at most {form(limit)}", value <= limit)


def at_least(figure: str, value: float, limit: float, form: Format, detail: str = "") -> Finding:
    """A figure with a lower limit as its target."""
    return _judged(without_target(figure, value, form, detail), f"at least {form(limit)}", value >= limit)


def equal(figure: str, value: float, expected: float, form: Format, detail: str = "") -> Finding:
    """A figure with an exact value as its target."""
    return _judged(without_target(figure, value, form, detail), form(expected), value == expected)


def within(figure: str, error: float, tolerance: float, detail: str = "") -> Finding:
    """A relative error, in either direction."""
    finding = without_target(figure, error, "{:+.1%}".format, detail)
    return _judged(finding, f"within {tolerance:.0%}", abs(error) <= tolerance)


def _judged(finding: Finding, target: str, holds: bool) -> Finding:
    return finding.model_copy(update={"target": target, "holds": holds})


def findings_table(title: str, findings: Sequence[Finding]) -> Table:
    """Table of figures: target, measured value, and whether the target is met."""
    holds = {None: "-", True: "yes", False: "**no**"}
    rows = [(each.figure, each.target or "-", each.measured, holds[each.holds]) for each in findings]
    return Table.of(title, ("figure", "target", "measured", "holds"), rows)


def summarise(title: str, findings: Sequence[Finding], *more: Table) -> Summary:
    """The table of findings, then more tables. The run fails if a figure misses its target."""
    missed = [each for each in findings if each.holds is False]
    targets = sum(each.holds is not None for each in findings)
    return Summary(
        conclusions=(
            f"{targets - len(missed)} of {targets} figures meet their targets",
            *(f"missed: {each.figure}: {each.measured}; target: {each.target}" for each in missed),
        ),
        tables=(findings_table(title, findings), *more),
        failure="" if all_hold(findings) else "a figure misses its target; see the table",
    )


def all_hold(findings: Iterable[Finding]) -> bool:
    """Whether no figure misses its target."""
    return all(each.holds is not False for each in findings)
