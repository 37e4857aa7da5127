"""A case of the corpus: files in a folder, and the arguments of `hearth plan` that name them. Created by generators."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Writes a file at a path: a model that is not JSON.
Writer = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """One command. An argument `@name` stands for a file, or for the folder of the files `name/...`.

    `time_limit` is for the search for a graph's plan, in seconds; 0 without a search. `ends_by_clock`: the limit is
    known to be too short.
    """

    name: str
    kind: Literal["transformer", "graph", "instance"]
    arguments: tuple[str, ...]
    files: Mapping[str, Any]  # by name: a JSON value, or a Writer
    time_limit: float = 0.0
    ends_by_clock: bool = False

    def write(self, folder: Path) -> list[str]:
        """Write the files, and return the arguments with their paths."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_text(json.dumps(content))
        return [str(folder / each[1:]) if each.startswith("@") else each for each in self.arguments]

    @property
    def digest(self) -> str:
        """Hash of the command and its files. If it differs from the recorded one, a generator has changed."""
        files = {name: "written" if callable(content) else content for name, content in self.files.items()}
        asked = json.dumps([self.arguments, files], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()[:16]


def rounded(value: float, digits: int = 5) -> float:
    """Rounded to significant digits, so that results do not depend on the last bits of a platform's arithmetic."""
    return float(f"{value:.{digits}g}")
