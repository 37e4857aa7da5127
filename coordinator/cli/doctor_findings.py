"""One line of the report of `hearth doctor`."""

from __future__ import annotations

from typing import Literal, NamedTuple


class CheckResult(NamedTuple):
    """One line of the report. `do` is the advice, empty if nothing needs to be done."""

    check: str
    status: Literal["ok", "warning", "problem"]
    what: str
    do: str = ""
