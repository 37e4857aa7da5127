"""Experiment `exactness`: tokens and logits of every strategy against `transformers`, at the widths of published models.

Runs the slow tests of `test_published_widths.py`, which hold the families, the plans and the comparison, and keeps what they
record of each plan.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from xml.etree import ElementTree

from hearth.errors import BadSetting, InternalError
from tools.bench.experiment import Context, Experiment
from tools.bench.results import REPOSITORY, Record, Summary, Table

_TEST = "tests/agent/worker/transformer/generation/test_published_widths.py"
_NO_TESTS = 5  # exit status of pytest


class ExactnessRow(Record):
    """One plan of one family."""

    family: str
    case: str
    num_tokens: int
    num_equal: int  # tokens before the first one that differs
    largest_difference: float  # of a logit


class Exactness(Experiment[ExactnessRow]):
    """Every strategy of every family. Does not hold if a token differs, or a logit by more than the tests allow."""

    families: tuple[str, ...] = (
        "gpt2-124m", "opt-125m", "llama2-7b", "llama3.2-1b", "qwen2-0.5b", "qwen3-0.6b", "mistral-7b"
    )  # fmt: skip

    def measure(self, context: Context) -> Iterator[ExactnessRow]:
        for family in self.families:
            if known := [row for row in context.known if row.family == family]:
                yield from known
                continue
            context.report(f"{family}: comparing")
            report = context.folder / f"{family}.xml"  # one each: a run that is killed leaves none
            command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-k", family, f"--junitxml={report}", _TEST]
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
            if done.returncode == _NO_TESTS:
                raise BadSetting(setting="families", reason=f"'{family}' is no family of {_TEST}")
            if not report.exists():
                raise InternalError(where="pytest", reason=done.stdout[-500:])
            for test in ElementTree.parse(report).iter("testcase"):
                if (found := test.find("properties")) is not None:
                    yield ExactnessRow.model_validate({each.get("name"): each.get("value") for each in found})

    def summary(self, rows: Sequence[ExactnessRow]) -> Summary:
        tokens, equal = sum(row.num_tokens for row in rows), sum(row.num_equal for row in rows)
        largest = max(row.largest_difference for row in rows)
        columns: Mapping[str, Callable[[Sequence[ExactnessRow]], object]] = {
            "family, widths of": lambda found: found[0].family,
            "plans": len,
            "tokens equal": lambda found: (
                f"{sum(row.num_equal for row in found)} of {sum(row.num_tokens for row in found)}"
            ),
            "largest logit difference": lambda found: f"{max(row.largest_difference for row in found):.1e}",
        }
        by_family = [[row for row in rows if row.family == name] for name in dict.fromkeys(row.family for row in rows)]
        return Summary(
            conclusions=(
                f"{equal} of {tokens} tokens of {len(rows)} plans are those of transformers",
                f"the largest difference of a logit is {largest:.1e}",
            ),
            tables=(Table.of_columns("Every strategy against transformers", columns, by_family),),
            failure="" if equal == tokens else "tokens differ from those of transformers",
        )
