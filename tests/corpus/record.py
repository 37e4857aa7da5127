"""`python -m corpus.record [PART ...]`: record the current tree. Parts: transformers, graphs, cli, outputs.

`messages_v1.json` is not recorded again: it is the golden file of version 1 of the protocol.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from corpus.cli import surface
from corpus.plans import PARTS, cases_of, run_case
from corpus.store import save


def record_plans(part: str) -> dict[str, Any]:
    records = {case.name: run_case(case) for case in cases_of(part)}
    print(part, dict(Counter("error" if "error" in each else each.get("ended", "plan") for each in records.values())))
    return records


def record_outputs() -> dict[str, Any]:
    from corpus.exactness import machine, names, outputs_of  # needs torch

    with tempfile.TemporaryDirectory() as folder:
        return {"machine": machine(), "cases": {name: outputs_of(name, Path(folder)) for name in names()}}


def main(parts: list[str]) -> None:
    for part in parts or [*PARTS, "cli", "outputs"]:
        if part in PARTS:
            size = save(f"{part}.json.gz", record_plans(part))
        elif part == "cli":
            size = save("cli.json", surface())
        elif part == "outputs":
            size = save("outputs.json.gz", record_outputs())
        else:
            raise SystemExit(f"{part} is no part of the corpus")
        print(f"{part}: {size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
