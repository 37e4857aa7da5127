"""Kind `doppler`: the tables of Doppler's paper (arXiv 2505.23131, section 6) on simulated homes, beside the paper's figures.

A row is one cell: a method on a graph and a home, with its limits, measured in a process of its own. Limits are processor
seconds, so that a busy machine changes no row but the times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from tools.bench.doppler.cells import measure_in_child
from tools.bench.doppler.rows import Cell, CellRow, HomeName, Method
from tools.bench.doppler.tables import summarise
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.results import Summary
from tools.bench.tensor.graphs import GRAPHS, GraphName

_MAIN: tuple[Method, ...] = (
    "local", "critical-path", "best-list", "enumerative", "doppler", "moirai", "doppler-sim", "placeto", "sel-only",
    "plc-only",
)  # fmt: skip
_TRAINED: tuple[Method, ...] = ("doppler-sim", "sel-only", "plc-only", "per-step")
_SEEDED: tuple[Method, ...] = ("doppler-sim", "sel-only", "plc-only", "placeto")
_SEARCHES: tuple[Method, ...] = ("doppler", "moirai")
_TRANSFERS: tuple[tuple[GraphName, GraphName], ...] = (
    ("ffnn", "llama-block"), ("chain-mm", "llama-block"), ("ffnn", "llama-layer"), ("chain-mm", "llama-layer"),
)  # fmt: skip
_TIMED_EPISODES = 32
# Episodes without training, and training with a message passing and a gradient step for each episode, as the paper's. The
# main table has training in batches.
_TIMED: tuple[tuple[Method, int], ...] = (("rollout", 1), ("rollout", 16), ("doppler-sim", 1))


class Doppler(Experiment):
    """The main table on each home; further tables on the first home."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(CellRow)
    # `python -m tools.bench doppler --help` lists options for the settings.
    PAGE = "doppler"
    NAMED: ClassVar[Named] = {
        "doppler": {
            "title": "Doppler's tables: placements of its four task graphs, simulated", "source": "Doppler, arXiv 2505.23131",
            "homes": ["gigabit"],
        }
    }  # fmt: skip
    ROWS_NAME_SETTINGS: ClassVar[bool] = True

    graphs: tuple[GraphName, ...] = GRAPHS
    homes: tuple[HomeName, ...] = ("gigabit",)
    devices: Literal[4, 8] = 4
    memory: tuple[float, ...] = (1.0, 0.3)  # of each device, as shares of all weights; the paper halves it
    methods: tuple[Method, ...] = _MAIN  # of the main table
    seconds: float = Field(60.0, gt=0)  # processor time of a search
    training_seconds: float = Field(150.0, gt=0)  # processor time of a training, Placeto's included, at most
    imitation: int = Field(400, ge=0)
    episodes: int = Field(4000, ge=0)
    per_step_episodes: int = Field(200, ge=1)  # message passing once for each operator of each episode
    seeds: int = Field(1, ge=1)  # of ChainMM; of ablation and stages two at most
    transfer: bool = False
    ablation: bool = False  # message passing per step
    stages: bool = False  # on Llama-layer
    timing: bool = True  # seconds per episode

    def measure(self, context: Context) -> Iterator[CellRow]:
        """Keep all known rows; measure the cells that are not among them."""
        yield from context.known
        known = {row.cell for row in context.known}
        missing = [cell for cell in self.cells() if cell not in known]
        for number, cell in enumerate(missing, 1):
            context.report(f"{number} of {len(missing)}: {cell.method} on {cell.graph}, {cell.home}")
            yield measure_in_child(cell, context.folder)

    def cells(self) -> list[Cell]:
        """All cells of the settings, each once."""
        found = [
            self._cell(method, graph, home, memory=memory)
            for memory in self.memory
            for home in self.homes
            for graph in self.graphs
            for method in self.methods
        ]
        home = self.homes[0]
        found += [
            self._cell(method, "chain-mm", home, seed=seed) for method in _SEEDED for seed in range(1, self.seeds)
        ]
        if self.ablation:
            found += [
                self._cell(method, "chain-mm", home, imitation=0, episodes=self.per_step_episodes, seed=seed)
                for seed in range(min(self.seeds, _STUDY_SEEDS))
                for method in ("doppler-sim", "per-step")
            ]
        if self.stages:
            found += [
                self._cell("doppler-sim", "llama-layer", home, seed=seed, **change)
                for seed in range(min(self.seeds, _STUDY_SEEDS))
                for change in _STAGES
            ]
        if self.transfer:
            found += [
                self._cell("doppler-sim", target, home, source=source, source_episodes=self.episodes, episodes=count)
                for source, target in _TRANSFERS
                for count in (0, self.episodes // 2, self.episodes)
            ]
        if self.timing:
            found += [
                self._cell(method, graph, home, imitation=0, episodes=_TIMED_EPISODES, batch=batch)
                for graph in self.graphs
                for method, batch in _TIMED
            ]
        return list(dict.fromkeys(found))

    def _cell(self, method: Method, graph: GraphName, home: HomeName, **changes: Any) -> Cell:
        fields: dict[str, Any] = {"method": method, "graph": graph, "home": home, "devices": self.devices}
        if method in _SEARCHES:
            fields["seconds"] = self.seconds
        elif method == "placeto":
            fields |= {"seconds": self.training_seconds, "episodes": self.episodes}
        elif method in _TRAINED:
            fields |= {"seconds": self.training_seconds, "imitation": self.imitation, "episodes": self.episodes}
        return Cell(**{**fields, **changes})

    def summary(self, rows: Sequence[CellRow]) -> Summary:
        return summarise(rows)


_STUDY_SEEDS = 2
_STAGES: tuple[dict[str, int], ...] = ({"episodes": 0}, {"imitation": 0}, {})  # I, II, and both
