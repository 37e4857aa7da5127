"""Results of experiments: raw rows, the tables, figures and conclusions made of them, and their files in `docs/results`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from hearth.errors import BadSetting
from hearth.files import write_atomically
from hearth.validation import first_error

T = TypeVar("T")
REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "docs" / "results"


class Record(BaseModel):
    """A part of a result, such as a raw row."""

    model_config = ConfigDict(frozen=True)


class Table(Record):
    """A table of text cells. `notes` are numbered from 1; cells refer to them by number."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], notes: Sequence[str] = ()
    ) -> Table:
        cells = tuple(tuple(map(str, row)) for row in rows)
        return cls(title=title, columns=tuple(columns), rows=cells, notes=tuple(notes))

    @classmethod
    def of_columns(
        cls, title: str, columns: Mapping[str, Callable[[T], object]], rows: Iterable[T], notes: Sequence[str] = ()
    ) -> Table:
        """`columns`: the cell of a row, by heading."""
        return cls.of(title, list(columns), ([cell(row) for cell in columns.values()] for row in rows), notes)

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        table = ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
        notes = ["", *(f"{number}. {note}" for number, note in enumerate(self.notes, 1))] if self.notes else []
        return "\n".join([f"**{self.title}**", "", *table, *notes])


class Summary(Record):
    """What the rows of an experiment show. `failure`: why the run does not hold, for instance a wrong output."""

    conclusions: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    failure: str = ""


class Result(BaseModel):
    """One run of an experiment. Its page is made of the raw rows."""

    experiment: str
    title: str
    command: str
    commit: str  # of the measured code
    date: str
    machine: str
    settings: dict[str, Any] = {}
    raw: tuple[dict[str, Any], ...] = ()

    def save(self, path: Path) -> None:
        """Write the file atomically, so that an interrupt leaves the old one. Numbers get six significant digits."""
        fields = json.loads(self.model_dump_json(), parse_float=lambda text: float(f"{float(text):.6g}"))
        write_atomically(path, (json.dumps(fields, separators=(",", ":"), ensure_ascii=False) + "\n").encode())

    def markdown(self, summary: Summary) -> str:
        """The section of its page."""
        parts = [f"## {self.title}", f"`{self.command}`, commit {self.commit}, {self.date}. {self.machine}."]
        if summary.conclusions:
            parts.append("\n".join(f"- {line}" for line in summary.conclusions))
        return "\n\n".join([*parts, *(table.markdown() for table in summary.tables)]) + "\n"


def load_result(path: Path) -> Result:
    """Read a result file. Raises BadSetting."""
    try:
        return Result.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadSetting(setting="the result", reason=f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise BadSetting(setting=f"the result {path}", reason=first_error(error, "file")) from None


def check_writable(setting: str, path: Path) -> None:
    """Raise BadSetting if a file cannot be written. Call it before measuring."""
    if path.is_dir() or not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise BadSetting(setting=setting, reason=f"{path} cannot be written: its folder must exist and be writable")


class Age(NamedTuple):
    """How long ago a result was measured, in words. `fault`: why nobody can tell."""

    text: str
    fault: str = ""


def measured_ago(commits: str) -> Age:
    """The number of commits since the oldest of `commits`, which are separated by commas as `Result.commit` has them."""
    shallow = _git("rev-parse", "--is-shallow-repository")
    if shallow != "false":
        return Age("this clone is shallow: its history is not known" if shallow else "this is no git repository")
    counts = []
    for name in (each.removesuffix(" with changes") for each in commits.split(", ")):
        count = _git("rev-list", "--count", f"{name}..HEAD")
        if not count:
            return Age("", f"the repository has no commit {name}")
        counts.append(int(count))
    return Age(f"{max(counts)} commits ago ({commits})")


def commit() -> str:
    """The checked-out commit; marked if files differ from it."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.toml")
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def _git(*arguments: str) -> str:
    """The output of git; empty if it fails."""
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def machine() -> str:
    """The processor, its cores as this machine sees them, and the versions that matter for speed."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processors = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {found.name: found.version for found in distributions()}
    libraries = ", ".join(f"{name} {versions.get(name, 'missing')}" for name in ("torch", "onnxruntime"))
    processor = processors[0] if processors else platform.machine()
    return f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}, {libraries}"


Format = Callable[[float], str]
COUNT: Format = "{:.0f}".format
PERCENT: Format = "{:.1%}".format
RATIO: Format = "{:.2f} x".format


class Finding(Record):
    """One measured figure. `holds`: whether it meets its target; None if there is none."""

    figure: str
    measured: str
    target: str = ""
    holds: bool | None = None


def without_target(figure: str, value: float, form: Format, detail: str = "") -> Finding:
    """`form` writes the value, `detail` follows in parentheses; so in all functions here."""
    return Finding(figure=figure, measured=f"{form(value)} ({detail})" if detail else form(value))


def at_most(figure: str, value: float, limit: float, form: Format, detail: str = "") -> Finding:
    """A figure with an upper limit as its target."""
    return _judged(without_target(figure, value, form, detail), f"at most {form(limit)}", value <= limit)


def at_least(figure: str, value: float, limit: float, form: Format, detail: str = "") -> Finding:
    """A figure with a lower limit as its target."""
    return _judged(without_target(figure, value, form, detail), f"at least {form(limit)}", value >= limit)


def _judged(finding: Finding, target: str, holds: bool) -> Finding:
    return finding.model_copy(update={"target": target, "holds": holds})


def summarise(title: str, findings: Sequence[Finding], *more: Table) -> Summary:
    """The table of findings, then more tables. The run fails if a figure misses its target."""
    holds = {None: "-", True: "yes", False: "**no**"}
    rows = [(each.figure, each.target or "-", each.measured, holds[each.holds]) for each in findings]
    missed = [each for each in findings if each.holds is False]
    targets = sum(each.holds is not None for each in findings)
    return Summary(
        conclusions=(
            f"{targets - len(missed)} of {targets} figures meet their targets",
            *(f"missed: {each.figure}: {each.measured}; target: {each.target}" for each in missed),
        ),
        tables=(Table.of(title, ("figure", "target", "measured", "holds"), rows), *more),
        failure="a figure misses its target; see the table" if missed else "",
    )
