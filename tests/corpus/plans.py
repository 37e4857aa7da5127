"""Plans of `hearth plan` for every case: run, converted to the normal form, and compared with the record."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from corpus.cases import Case, Writer
from corpus.cli import run_hearth
from corpus.compare import Difference, differences
from corpus.graph_cases import graph_cases
from corpus.normal import normalise, seconds_that_count
from corpus.transformer_cases import transformer_cases
from support.graphs import save_two_branch_model
from support.onnx_models import HANDMADE_MODELS, branches
from support.planning import in_process_planning

# A part of a search may end by the clock at half of the time limit; above this share of it, results may not repeat.
_CLOCK_SHARE = 0.4
_TRIES = 3  # attempts if the clock ended the search: a busy machine does less in the same time
_WORSE = 1.01  # such a plan may be slower than recorded by this factor
_ENVELOPE = {"digest", "version", "ended"}  # fields of a record that are not compared
PARTS = ("transformers", "graphs")


def _onnx_models() -> list[tuple[str, Writer, int]]:
    two_branches = partial(save_two_branch_model, channels=16, depth=3)
    by_hand = HANDMADE_MODELS[HANDMADE_MODELS.index(branches)]
    return [("two-branches.onnx", two_branches, 60_000), ("by-hand.onnx", by_hand, 60_000)]


def cases_of(part: str) -> Iterator[Case]:
    return transformer_cases() if part == "transformers" else graph_cases(_onnx_models())


def subset_of(part: str) -> Iterator[Case]:
    """About two fifths: of each profile or cluster two named strategies, and of every other one `auto`, which takes longer.

    There are no cases that end by the clock.
    """
    groups: dict[str, list[Case]] = {}
    for case in cases_of(part):
        groups.setdefault(case.name.partition("-")[0], []).append(case)
    for number, (auto, *named) in enumerate(groups.values()):
        chosen = [named[(2 * number + i) % len(named)] for i in range(2)]
        yield from (case for case in (*([auto] if number % 2 == 0 else []), *chosen) if not case.ends_by_clock)


def run_case(case: Case) -> dict[str, Any]:
    """The case's record: the normal form of the printed plan, or the error."""
    with tempfile.TemporaryDirectory() as folder, in_process_planning():
        _, printed = run_hearth(["plan", *case.write(Path(folder))])
        printed = json.loads(json.dumps(printed).replace(folder, "@"))
    record: dict[str, Any] = {"digest": case.digest}
    if "error" in printed:
        return {**record, "error": {name: printed[name] for name in ("error", "message", "details")}}
    record |= normalise(case.kind, printed)
    if case.kind != "transformer":
        record["ended"] = _ended(printed, record["answer"]["proven_optimal"], case.time_limit)
    return record


def _ended(printed: dict[str, Any], proven: bool, time_limit: float) -> str:
    """What ended the search: a proof (`proven`), its own limit of work (`count`), or the clock."""
    seconds = [each.get("planning_seconds") or 0.0 for each in (printed, *printed.get("candidates", ()))]
    if max(seconds) > _CLOCK_SHARE * time_limit:
        return "clock"
    return "proven" if proven else "count"


def check_case(case: Case, recorded: dict[str, Any]) -> list[Difference]:
    """Run the case and compare; if the clock ended the search, the best of several attempts counts."""
    for _ in range(_TRIES):
        found = run_case(case)
        wrong = compare_case(recorded, found)
        if not wrong or found.get("ended") != "clock":
            break
    return wrong


def compare_case(recorded: dict[str, Any], found: dict[str, Any]) -> list[Difference]:
    """Empty if the plans are equal or, if the clock ended a search, if the new plan is not worse."""
    if recorded["digest"] != found["digest"]:
        return [Difference("digest", recorded["digest"], found["digest"])]  # the case has changed: record again
    if "clock" in (recorded.get("ended"), found.get("ended")):
        before, after = seconds_that_count(recorded), seconds_that_count(found)
        return [Difference("seconds", before, after)] if after > _WORSE * before else []
    return differences(*({name: each[name] for name in each.keys() - _ENVELOPE} for each in (recorded, found)))
