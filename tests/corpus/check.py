"""`python -m corpus.check [PART ...]`: compare the corpus with the current tree; exit code 1 if they differ.

Pytest runs the same comparisons (test_corpus.py): `make test` for about two fifths of the plans, `make test-slow` for all. If
all parts are checked, entries of `intended.json` that cover no difference are reported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
from corpus.cli import ROOT, surface
from corpus.compare import NOTHING, Difference, Intended, differences, not_intended
from corpus.plans import PARTS, cases_of, check_case
from corpus.store import load, load_intended

ALL = (*PARTS, "cli", "messages", "outputs")
GOLDEN = ROOT / "tests" / "hearth" / "wire" / "golden_messages.json"

# Pairs of a case's name and its differences.
Found = Iterator[tuple[str, list[Difference]]]


def check_plans(part: str) -> Found:
    recorded = load(f"{part}.json.gz")
    cases = {case.name: case for case in cases_of(part)}
    for name in sorted(recorded.keys() ^ cases.keys()):
        yield name, [Difference("case", name if name in recorded else NOTHING, name if name in cases else NOTHING)]
    for name in (name for name in cases if name in recorded):
        yield name, check_case(cases[name], recorded[name])


def check_cli() -> Found:
    recorded, found = by_option(load("cli.json")), by_option(surface())
    for name in sorted(recorded.keys() | found.keys()):
        yield name, differences(recorded.get(name, NOTHING), found.get(name, NOTHING))


def by_option(described: Any) -> Any:
    """Lists of parameters become options by name, so that each differs for itself, and arguments in their order."""
    if isinstance(described, dict):
        return {name: by_option(value) for name, value in described.items()}
    if isinstance(described, list) and all(isinstance(each, dict) and "names" in each for each in described):
        options = {each["names"][0]: each for each in described if each["names"][0].startswith("-")}
        return {"arguments": [each for each in described if each["names"][0] not in options], **options}
    return described


def check_messages() -> Found:
    """Compare the current golden file, which tests check against the code, with that of version 1, field by field."""
    recorded, found = ({name: _fields(each) for name, each in golden.items()} for golden in _golden_files())
    for name in sorted(recorded.keys() | found.keys()):
        yield name, differences(recorded.get(name, NOTHING), found.get(name, NOTHING))


def _golden_files() -> tuple[dict[str, str], dict[str, str]]:
    return load("messages_v1.json"), json.loads(GOLDEN.read_text())


def _fields(message: str) -> Any:
    return msgpack.unpackb(bytes.fromhex(message))


def check_outputs() -> Found:
    from corpus.exactness import compare_outputs, machine, names, outputs_of  # needs torch

    recorded = load("outputs.json.gz")
    same = recorded["machine"] == machine()
    if not same:
        print("outputs: recorded on another processor or with other libraries; compared within a tolerance")
    with tempfile.TemporaryDirectory() as folder:
        for name in names():
            yield name, compare_outputs(name, recorded["cases"][name], outputs_of(name, Path(folder)), same)


def check(part: str) -> Found:
    if part in PARTS:
        return check_plans(part)
    checks = {"cli": check_cli, "messages": check_messages, "outputs": check_outputs}
    if part not in checks:
        raise SystemExit(f"{part} is no part of the corpus")
    return checks[part]()


def main(parts: list[str]) -> int:
    intended = load_intended()
    used: set[Intended] = set()
    failed = 0
    for part in parts or ALL:
        count = wrong = 0
        for case, found in check(part):
            left = not_intended(part, case, found, intended, used)
            count, wrong = count + 1, wrong + bool(left)
            for difference in left:
                print(f"{part} {case}: {difference}")
        print(f"{part}: {count} compared, {wrong} differ")
        failed += wrong
    if not parts:
        for entry in (each for each in intended if each not in used):
            failed += 1
            print(f"intended.json: nothing differs where this is intended: {entry}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
