"""The smaller tables of kind `doppler`: transfer, seeds, message passing, stages and seconds per episode. Pure.

Each takes the rows of one home and is empty where it needs rows that are not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tools.bench.doppler.figures import (
    EPISODE_SECONDS,
    PER_EPISODE,
    PER_STEP,
    SEEDS_MS,
    TRANSFER_MS,
    paper_ms,
)
from tools.bench.doppler.rows import (
    BATCH,
    HEADINGS,
    NOT_MEASURED,
    STAGE_III,
    Cell,
    CellRow,
    Setting,
    main_row,
    makespans,
)
from tools.bench.results import Table
from tools.bench.tensor.graphs import GRAPHS, tensor_graph

Study = Callable[[Setting, Sequence[CellRow]], Table]


def transfer(setting: Setting, rows: Sequence[CellRow]) -> Table:
    """Policies that were trained on another graph first, by episodes on the graph."""
    here = [row for row in rows if row.cell.source is not None]
    counts = sorted({row.cell.episodes for row in here})
    lines = []
    for (source, target), paper in TRANSFER_MS.items():
        found = {row.cell.episodes: row for row in here if (row.cell.source, row.cell.graph) == (source, target)}
        if found:
            theirs = (*paper, paper_ms(target, 4, 1.0)[STAGE_III])
            scratch = main_row(rows, "doppler-sim", target)
            ours = [*(makespans(found.get(count)) for count in counts), makespans(scratch)]
            ours[-1] += f" ({scratch.cell.episodes} episodes)" if scratch else ""
            lines.append([f"{source} to {target}", *ours, " / ".join(map(str, theirs))])
    columns = [
        "policy", *(f"{count} episodes, s" for count in counts), "from scratch, s", "paper, ms: 0 / 2k / 4k / scratch"
    ]  # fmt: skip
    return Table.of(f"Transfer: {setting}", columns, lines)


def seeds(setting: Setting, rows: Sequence[CellRow]) -> Table:
    """The best plans of ChainMM by seed, and by how much the worst is above the best."""
    lines: list[tuple[object, ...]] = []
    for method in ("doppler-sim", "sel-only", "plc-only", "placeto"):
        here = [row for row in rows if row.cell.method == method and row.cell.graph == "chain-mm" and row.best]
        alike = [[row for row in here if _first_seed(row.cell) == cell] for cell in {_first_seed(r.cell) for r in here}]
        largest = max(alike, key=len, default=[])
        if len(largest) > 1:
            bests = [row.best for row in largest if row.best]
            lines.append((HEADINGS[method], largest[0].cell.episodes, *_spread(bests, ".4f")))
    if lines:
        lines.append(("paper's Doppler, ms", 4000, *_spread(SEEDS_MS, ".1f")))
    return Table.of(f"Seeds, chain-mm: {setting}", ["method", "episodes", "best plans, s", "spread"], lines)


def _first_seed(cell: Cell) -> Cell:
    return cell.model_copy(update={"seed": 0})


def _spread(values: Sequence[float], form: str) -> tuple[str, str]:
    return " ".join(format(each, form) for each in values), f"{max(values) / min(values) - 1:.1%}"


def message_passing(setting: Setting, rows: Sequence[CellRow]) -> Table:
    """Message passing for each operator of each episode, against once for each batch, with as many episodes."""
    lines = []
    for step in (row for row in rows if row.cell.method == "per-step"):
        num_steps = len(tensor_graph(step.cell.graph, devices=step.cell.devices).vertices)
        once = step.cell.model_copy(update={"method": "doppler-sim"})
        for row, name, passes, paper in (
            (
                next((row for row in rows if row.cell == once), None),
                f"per batch of {once.batch}",
                1 / BATCH,
                PER_EPISODE,
            ),
            (step, "per step", num_steps, PER_STEP),
        ):
            if row is not None:
                lines.append([
                    name, row.cell.seed, row.num_episodes, makespans(row), row.found_at, math.ceil(passes * row.found_at),
                    _rate(row), paper.milliseconds, paper.num_passes,
                ])  # fmt: skip
    columns = [
        "messages", "seed", "episodes", "best / greedy, s", "found at", "passes until then", "episodes a second",
        "paper (there once per episode), ms", "its passes",
    ]  # fmt: skip
    return Table.of(f"Message passing: {setting}", columns, lines)


def stages(setting: Setting, rows: Sequence[CellRow]) -> Table:
    """Llama-layer with stage I or II alone. Imitation prices no plan: it has a greedy one only."""
    here = [
        row for row in rows if (row.cell.method, row.cell.graph, row.cell.source) == ("doppler-sim", "llama-layer", None)
        and row.cell.batch == BATCH
    ]  # fmt: skip
    alone = [row for row in here if 0 in (row.cell.imitation, row.cell.episodes)]
    counts = {row.cell.episodes for row in alone}
    both = [row for row in here if row.cell.imitation and row.cell.episodes in counts - {0}]
    lines = [
        (
            _stage_names(row),
            row.cell.seed,
            row.cell.imitation,
            row.cell.episodes,
            makespans(row),
            row.found_at or NOT_MEASURED,
        )
        for row in [*alone, *both]
    ]
    columns = ["stages", "seed", "imitation, episodes", "policy gradient, episodes", "best / greedy, s", "found at"]
    return Table.of(f"Stages, llama-layer: {setting}", columns, lines)


def _stage_names(row: CellRow) -> str:
    return " + ".join(name for name, count in (("I", row.cell.imitation), ("II", row.cell.episodes)) if count)


def episode_seconds(setting: Setting, rows: Sequence[CellRow]) -> Table:
    """Processor seconds of an episode of stage II, beside the seconds of the paper's machine with GPUs."""
    lines = []
    for graph in GRAPHS:
        here = [row for row in rows if row.cell.graph == graph]
        rollouts = {row.cell.batch: row for row in here if row.cell.method == "rollout"}
        single = [row for row in here if row.cell.method == "doppler-sim" and row.cell.batch == 1]
        if rollouts:
            paper = EPISODE_SECONDS[graph]
            lines.append([
                graph, _seconds(rollouts.get(1)), _seconds(rollouts.get(BATCH)), paper.rollout,
                _seconds(single[0] if single else None), _seconds(main_row(here, "doppler-sim", graph)), paper.training,
                _seconds(main_row(here, "placeto", graph)), paper.placeto_training,
            ])  # fmt: skip
    columns = [
        "graph", "rollout", f"in batches of {BATCH}", "paper", "with training", f"in batches of {BATCH}", "paper",
        "Placeto with training", "paper",
    ]  # fmt: skip
    return Table.of(f"Seconds per episode: {setting}", columns, lines)


def _seconds(row: CellRow | None) -> str:
    return f"{row.processor_seconds / row.num_episodes:.4f}" if row and row.num_episodes else NOT_MEASURED


def _rate(row: CellRow) -> str:
    return f"{row.num_episodes / row.processor_seconds:.1f}" if row.processor_seconds else NOT_MEASURED


STUDIES: tuple[Study, ...] = (transfer, seeds, message_passing, stages, episode_seconds)
