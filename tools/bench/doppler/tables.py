"""The main table of kind `doppler` for each home, beside the paper's, and what the rows show. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tools.bench.doppler.figures import paper_ms
from tools.bench.doppler.rows import HEADINGS, NOT_MEASURED, STAGE_III, CellRow, Setting, main_row, makespans
from tools.bench.doppler.studies import STUDIES
from tools.bench.results import Summary, Table
from tools.bench.tensor.graphs import GRAPHS, GraphName

_ROUNDING = 1e-9  # relative: sums of floats in another order
_NOTES = (
    "best list, moirai, doppler: this project's list schedules and planners. Placeto starts from the best list schedule",
    "two times: the best plan of training, and that of the final policy's most probable choices",
    "Doppler-sys has stage III, on devices, which a simulation has not. The paper halves the memory of its devices",
    f"{NOT_MEASURED}: not measured",
)


def summarise(rows: Sequence[CellRow]) -> Summary:
    """All tables for which there are rows, and the planner's gains. It fails where the planner loses to a list schedule."""
    by_setting: dict[Setting, list[CellRow]] = {}
    for row in rows:
        by_setting.setdefault(Setting.of(row), []).append(row)
    tables = [_main_table(setting, found) for setting, found in by_setting.items()]
    tables += [study(setting, found) for study in STUDIES for setting, found in by_setting.items()]
    tables.append(Table.of_columns("All rows", _COLUMNS, rows))
    worse = [f"{graph}, {setting}" for setting, found in by_setting.items() for graph in _worse(found)]
    return Summary(
        conclusions=tuple(line for setting, found in by_setting.items() for line in _gains(setting, found)),
        tables=tuple(table for table in tables if table.rows),
        failure=f"doppler is worse than a list schedule: {'; '.join(worse)}" if worse else "",
    )


def _main_table(setting: Setting, rows: Sequence[CellRow]) -> Table:
    lines: list[list[str]] = []
    for graph in GRAPHS:
        found = {method: main_row(rows, method, graph) for method in HEADINGS}
        if not any(found.values()):
            continue
        paper = paper_ms(graph, setting.devices, setting.memory)
        lines.append([f"{graph}, s", *map(makespans, found.values()), _bound(rows, graph)])
        lines.append(["over doppler", *_ratios({name: row.best for name, row in found.items() if row}, "doppler"), ""])
        if paper:
            lines.append(["paper, ms", *(f"{paper[name]:.1f}" if name in paper else "" for name in HEADINGS), ""])
            lines.append(["over Doppler-sys", *_ratios(paper, STAGE_III), ""])
    return Table.of(f"Makespans: {setting}", ["", *HEADINGS.values(), "bound"], lines, _NOTES)


def _ratios(times: Mapping[str, float | None], unit: str) -> list[str]:
    """The time of each method over that of one of them; empty where one is missing."""
    least = times.get(unit)
    return [f"{time / least:.2f}" if least and (time := times.get(name)) else "" for name in HEADINGS]


def _bound(rows: Sequence[CellRow], graph: GraphName) -> str:
    bounds = [row for row in rows if row.cell.graph == graph and row.bound]
    if not bounds:
        return NOT_MEASURED
    return f"{max(row.bound for row in bounds):.4f}" + (" proven" if any(row.proven for row in bounds) else "")


def _gains(setting: Setting, rows: Sequence[CellRow]) -> list[str]:
    """The factors of other methods over the planner, from the smallest to the largest of the graphs."""
    said = []
    for name in ("critical-path", "placeto", "enumerative", "doppler-sim", "moirai"):
        pairs = [(main_row(rows, name, graph), main_row(rows, "doppler", graph)) for graph in GRAPHS]
        factors = [theirs.best / ours.best for theirs, ours in pairs if theirs and ours and theirs.best and ours.best]
        if factors:
            said.append(f"{HEADINGS[name]} {min(factors):.2f} to {max(factors):.2f}")
    return [f"{setting}: makespans over those of doppler: {', '.join(said)}"] if said else []


def _worse(rows: Sequence[CellRow]) -> list[GraphName]:
    """The graphs on which the planner is worse than a list schedule, from which it starts."""
    found = []
    for graph in GRAPHS:
        ours = main_row(rows, "doppler", graph)
        lists = [main_row(rows, name, graph) for name in ("best-list", "critical-path", "enumerative", "local")]
        least = min((row.best for row in lists if row and row.best), default=None)
        if ours and ours.best and least and ours.best > least * (1 + _ROUNDING):
            found.append(graph)
    return found


def _budget(row: CellRow) -> str:
    cell = row.cell
    parts = [f"{cell.seconds:g} s"] if cell.seconds else []
    if cell.source:
        parts.append(f"{cell.imitation} + {cell.source_episodes} on {cell.source}, {cell.episodes}")
    elif cell.episodes or cell.imitation:
        parts.append(f"{cell.imitation} + {cell.episodes}, batches of {cell.batch}")
    return "; ".join(parts) or NOT_MEASURED


_COLUMNS: Mapping[str, Callable[[CellRow], object]] = {
    "setting": Setting.of,
    "graph": lambda row: row.cell.graph,
    "method": lambda row: row.cell.method,
    "seed": lambda row: row.cell.seed,
    "limits: processor time; episodes of stages I + II": _budget,
    "best / greedy (s)": makespans,
    "bound (s)": lambda row: f"{row.bound:.4f}{' proven' if row.proven else ''}" if row.bound else NOT_MEASURED,
    "episodes run": lambda row: row.num_episodes or NOT_MEASURED,
    "found at": lambda row: row.found_at or NOT_MEASURED,
    "processor seconds": lambda row: f"{row.processor_seconds:.1f}",
}
