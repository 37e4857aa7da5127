"""Cells and rows of Doppler's tables: a method on one graph and home with its limits, and what it found. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from coordinator.plan.graph.latency.problem import PlacementProblem
from tools.bench.tensor.graphs import GraphName, tensor_graph
from tools.bench.tensor.homes import HOMES

# `rollout` runs episodes without training; `doppler` and `moirai` are this project's planners, the others the paper's.
LearntMethod = Literal["doppler-sim", "sel-only", "plc-only", "per-step", "rollout"]
Method = Literal["local", "critical-path", "best-list", "enumerative", "placeto", LearntMethod, "doppler", "moirai"]
LEARNT = frozenset(get_args(LearntMethod))
STAGE_III = "doppler-sys"  # of the paper only
HEADINGS = {
    "local": "1 device", "critical-path": "Critical Path", "placeto": "Placeto", "enumerative": "EnumOpt",
    "doppler-sim": "Doppler-sim", STAGE_III: "Doppler-sys", "sel-only": "SEL only", "plc-only": "PLC only",
    "best-list": "best list", "moirai": "moirai", "doppler": "doppler",
}  # fmt: skip
BATCH = 16  # episodes of one message passing and one gradient step, where a table does not name another number
NOT_MEASURED = "-"


def _known_home(name: str) -> str:
    if name not in HOMES:
        raise ValueError(f"'{name}' is none of: {', '.join(HOMES)}")
    return name


HomeName = Annotated[str, AfterValidator(_known_home)]


class Cell(BaseModel):
    """A method, its problem and its limits.

    With a `source`, the policy was trained on that graph first: there it had the episodes of imitation and
    `source_episodes`, and on the cell's graph it has `episodes` alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Method
    graph: GraphName
    home: HomeName
    devices: Literal[4, 8] = 4
    memory: float = Field(1.0, gt=0)  # of each device, as a share of all weights
    seconds: float = Field(0.0, ge=0)  # processor time of a search or of training, at most
    imitation: int = Field(0, ge=0)  # episodes of stage I
    episodes: int = Field(0, ge=0)  # of stage II, or of a rollout
    batch: int = Field(BATCH, ge=1)
    seed: int = 0
    source: GraphName | None = None
    source_episodes: int = Field(0, ge=0)

    @property
    def is_learnt(self) -> bool:
        """Whether the method trains a policy, which has a greedy plan."""
        return self.method in LEARNT or self.method == "placeto"

    def problem(self, graph: GraphName | None = None) -> PlacementProblem:
        """The problem of the cell's graph, or of another one, on the cell's home."""
        home = HOMES[self.home] if self.devices == 4 else HOMES[self.home].doubled()
        return home.problem(tensor_graph(graph or self.graph, devices=self.devices), self.memory)


class CellRow(BaseModel):
    """What a method found: makespans in seconds, priced by one simulator. `failure`: why there is none."""

    model_config = ConfigDict(frozen=True)

    cell: Cell
    makespan: float | None = None  # of the best plan; of a learned method, the best one of training
    greedy: float | None = None  # of the most probable choices of the final policy
    bound: float = 0.0  # lower bound of any makespan; 0: unknown
    proven: bool = False
    num_episodes: int = 0  # run in all, imitation included
    found_at: int = 0  # number of the episode that found the best plan; 0: unknown
    processor_seconds: float = 0.0
    failure: str = ""

    @property
    def best(self) -> float | None:
        """The shorter one of both makespans."""
        return min((each for each in (self.makespan, self.greedy) if each is not None), default=None)


class Setting(NamedTuple):
    """What the problems of a table share."""

    home: str
    devices: int
    memory: float

    @classmethod
    def of(cls, row: CellRow) -> Setting:
        return cls(row.cell.home, row.cell.devices, row.cell.memory)

    def __str__(self) -> str:
        memory = "" if self.memory >= 1 else f", each with memory for {self.memory:.0%} of the weights"
        return f"{self.home}, {self.devices} devices{memory}"


def main_row(rows: Iterable[CellRow], method: str, graph: GraphName) -> CellRow | None:
    """A method's row of the main table: of its first seed, and with its longest training or search."""
    found = [row for row in rows if row.cell.method == method and row.cell.graph == graph and _is_main(row.cell)]
    return max(found, key=lambda row: (row.cell.episodes, row.cell.seconds), default=None)


def _is_main(cell: Cell) -> bool:
    trained_here = cell.imitation > 0 and cell.episodes > 0 and cell.batch == BATCH and cell.source is None
    return cell.seed == 0 and (trained_here or cell.method not in LEARNT)


def makespans(row: CellRow | None) -> str:
    """The table cell of a row: "best / greedy" for learned methods, one makespan for the others."""
    if row is None or row.failure:
        return NOT_MEASURED if row is None else row.failure
    texts = [NOT_MEASURED if each is None else f"{each:.4f}" for each in (row.makespan, row.greedy)]
    return " / ".join(texts) if row.cell.is_learnt else texts[0]
