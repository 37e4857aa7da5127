"""Experiment `doppler`: the main tables of Doppler's paper (arXiv 2505.23131, section 6) on simulated homes, and its figures.

A row is a method on a graph and a home. All plans are priced by one simulator, and limits are processor seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from numpy.random import default_rng
from pydantic import Field

from coordinator.plan.graph.latency.baselines import solve_baseline
from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import best_schedule
from coordinator.plan.graph.latency.search import solve_doppler, solve_moirai
from coordinator.plan.solution import SearchOptions, Stop
from coordinator.serve.planners.policies import usable_policy
from hearth.errors import ModelDoesNotFit, NoPlacement
from tools.bench.experiment import Context, Experiment
from tools.bench.results import Record, Summary, Table
from tools.research.graphs import GRAPHS, HOMES, GraphName, HomeName, tensor_graph
from tools.research.moirai import best_list_schedule

# `doppler`, with a policy that learns at home (`policy`), and `moirai` are planners of Hearth, the others the paper's.
Method = Literal[
    "local", "critical-path", "best-list", "enumerative", "placeto", "doppler-sim", "sel-only", "plc-only", "doppler", "policy",
    "moirai",
]  # fmt: skip
_STAGE_III = "doppler-sys"  # Doppler with stage III, of the paper only
HEADINGS = {
    "local": "1 device", "critical-path": "Critical Path", "placeto": "Placeto", "enumerative": "EnumOpt",
    "doppler-sim": "Doppler-sim", _STAGE_III: "Doppler-sys", "sel-only": "SEL only", "plc-only": "PLC only",
    "best-list": "best list", "moirai": "moirai", "policy": "doppler --learn", "doppler": "doppler",
}  # fmt: skip
_FITTING_SECONDS = 10.0  # for list schedules that run out of memory: to find an assignment that fits, which takes less
_ROUNDING = 1e-9  # relative: sums of floats in another order


class Setting(NamedTuple):
    """What the problems of a table share."""

    home: HomeName
    memory: float

    def __str__(self) -> str:
        memory = "" if self.memory >= 1 else f", each with memory for {self.memory:.0%} of the weights"
        return f"{self.home}, 4 devices{memory}"


class DopplerRow(Record):
    """What a method found: makespans in seconds, None without a plan that fits."""

    method: Method
    graph: GraphName
    home: HomeName
    memory: float  # of each device, as a share of all weights
    makespan: float | None = None  # of the best plan; of a learnt method, the best one of training
    greedy: float | None = None  # of the most probable choices of a learnt method's final policy
    bound: float = 0.0  # lower bound of any makespan; 0: unknown
    proven: bool = False
    num_episodes: int = 0  # run in all, imitation included
    processor_seconds: float = 0.0

    @property
    def setting(self) -> Setting:
        return Setting(self.home, self.memory)

    @property
    def key(self) -> tuple[object, ...]:
        return self.method, self.graph, self.setting

    @property
    def best(self) -> float | None:
        """The shorter one of both makespans."""
        return min((each for each in (self.makespan, self.greedy) if each is not None), default=None)

    def problem(self) -> PlacementProblem:
        return HOMES[self.home].problem(tensor_graph(self.graph), self.memory)


class Doppler(Experiment[DopplerRow]):
    """Every method on every graph and home."""

    graphs: tuple[GraphName, ...] = GRAPHS
    homes: tuple[HomeName, ...] = ("gigabit",)
    memory: tuple[float, ...] = (1.0, 0.3)  # of each device, as shares of all weights; the paper halves it
    methods: tuple[Method, ...] = get_args(Method)
    seconds: float = Field(60.0, gt=0)  # processor time of a search
    training_seconds: float = Field(150.0, gt=0)  # processor time of a training, Placeto's included, at most
    imitation: int = Field(400, ge=0)  # episodes of stage I
    episodes: int = Field(4000, ge=0)  # of stage II, and of Placeto
    seed: int = 0

    def measure(self, context: Context) -> Iterator[DopplerRow]:
        known = {row.key: row for row in context.known}
        for memory, home, graph, method in product(self.memory, self.homes, self.graphs, self.methods):
            row = DopplerRow(method=method, graph=graph, home=home, memory=memory)
            context.report(f"{method} on {graph}, {row.setting}")
            yield known.get(row.key) or row.model_copy(update=self._found(method, row.problem()))

    def summary(self, rows: Sequence[DopplerRow]) -> Summary:
        by_setting: dict[Setting, list[DopplerRow]] = {}
        for row in rows:
            by_setting.setdefault(row.setting, []).append(row)
        worse = [f"{graph}, {setting}" for setting, found in by_setting.items() for graph in _worse(found)]
        return Summary(
            tables=tuple(_main_table(setting, found) for setting, found in by_setting.items()),
            failure=f"doppler is worse than a list schedule: {'; '.join(worse)}" if worse else "",
        )

    def _found(self, method: Method, problem: PlacementProblem) -> dict[str, Any]:
        """The fields of a row that are measured."""
        began = time.process_time()
        try:
            found = self._plan(method, problem)
        except (NoPlacement, ModelDoesNotFit):
            found = {}
        return {**found, "processor_seconds": time.process_time() - began}

    def _plan(self, method: Method, problem: PlacementProblem) -> dict[str, Any]:
        options = SearchOptions(self.seconds, self.seed, time.process_time)
        match method:
            case "placeto":
                return self._placeto(problem)
            case "doppler-sim" | "sel-only" | "plc-only":
                return self._train(method, problem)
            case "best-list":
                return {"makespan": best_list_schedule(problem, _FITTING_SECONDS).makespan}
            case "moirai":
                found = solve_moirai(problem, options)
            case "doppler":
                found = solve_doppler(problem, options)
            case "policy":
                found = HomePolicy(usable_policy(), self.training_seconds).solve(problem, options)
            case _:
                found = solve_baseline(method, problem, options._replace(time_limit_seconds=_FITTING_SECONDS))
        return {"makespan": found.value, "bound": found.bound, "proven": found.proven}

    def _placeto(self, problem: PlacementProblem) -> dict[str, Any]:
        """Placeto, from the best list schedule on."""
        from tools.research.placeto import Placeto  # imports torch, which planners do not

        start = best_list_schedule(problem, _FITTING_SECONDS)
        found = Placeto(problem, start, default_rng(self.seed)).run(self.episodes, self._training_limit())
        greedy = found.greedy and found.greedy.makespan
        return {"makespan": found.best.makespan, "greedy": greedy, "num_episodes": found.num_episodes}

    def _train(self, method: Method, problem: PlacementProblem) -> dict[str, Any]:
        """Train Doppler's policy; its ablations learn only operators or only devices."""
        from tools.research.learner import Rules, Shape, Trainer

        rules = Rules(learns_operators=method != "plc-only", learns_devices=method != "sel-only")
        trainer = Trainer(problem, self.seed, rules, Shape())
        stop = self._training_limit()
        trainer.imitate(self.imitation)
        trainer.reinforce(self.episodes, stop)
        greedy = trainer.greedy()
        placements = {"makespan": trainer.best, "greedy": greedy.placements()[0] if greedy.fits_B.all() else None}
        makespans = {name: each and best_schedule(problem, *each).makespan for name, each in placements.items()}
        return {**makespans, "num_episodes": trainer.num_episodes}

    def _training_limit(self) -> Stop:
        deadline = time.process_time() + self.training_seconds
        return lambda: time.process_time() >= deadline


# ---- tables -----------------------------------------------------------------------------------------------------------

_NOTES = (
    "best list, moirai, doppler: list schedules and planners of Hearth. Placeto starts from the best list schedule",
    "two times: the best plan of training, and that of the final policy's most probable choices",
    "Doppler-sys has stage III, on devices, which a simulation has not. The paper halves the memory of its devices",
)


def _main_table(setting: Setting, rows: Sequence[DopplerRow]) -> Table:
    lines: list[list[str]] = []
    paper = _FOUR if setting.memory >= 1 else _HALVED
    for graph in dict.fromkeys(row.graph for row in rows):
        found = {row.method: row for row in rows if row.graph == graph}
        bound = max(row.bound for row in found.values())
        cells = [_makespans(found[name]) if name in found else "" for name in HEADINGS]
        lines.append([f"{graph}, s", *cells, f"{bound:.4f}" if bound else ""])
        ours = {name: row.best for name, row in found.items()}
        lines.append(["over doppler", *_ratios(ours, "doppler"), ""])
        theirs = paper[graph]
        lines.append(["paper, ms", *(f"{theirs[name]:.1f}" if name in theirs else "" for name in HEADINGS), ""])
        lines.append(["over Doppler-sys", *_ratios(theirs, _STAGE_III), ""])
    return Table.of(f"Makespans: {setting}", ["", *HEADINGS.values(), "bound"], lines, _NOTES)


def _makespans(row: DopplerRow) -> str:
    texts = ["-" if each is None else f"{each:.4f}" for each in (row.makespan, row.greedy)]
    return " / ".join(texts) if row.num_episodes else texts[0]


def _ratios(times: Mapping[Any, float | None], unit: str) -> list[str]:
    """The time of each method over that of one of them; empty where one is missing."""
    least = times.get(unit)
    return [f"{theirs / least:.2f}" if least and (theirs := times.get(name)) else "" for name in HEADINGS]


def _worse(rows: Sequence[DopplerRow]) -> list[GraphName]:
    """The graphs on which the planner is worse than a list schedule, from which it starts."""
    lists = ("best-list", "critical-path", "enumerative", "local")
    found = []
    for ours in (row for row in rows if row.method == "doppler"):
        theirs = [row.best for row in rows if row.graph == ours.graph and row.method in lists and row.best]
        if ours.best and theirs and ours.best > min(theirs) * (1 + _ROUNDING):
            found.append(ours.graph)
    return found


# ---- the paper's figures: milliseconds, the mean of ten runs of the best assignment that each method found --------------

_Figures = Mapping[GraphName, Mapping[str, float]]
_PAPERS_METHODS = (
    "local", "critical-path", "placeto", "enumerative", _STAGE_III, "doppler-sim", "sel-only", "plc-only",
)  # fmt: skip


def _figures(by_graph: Mapping[GraphName, Sequence[float]]) -> _Figures:
    return {graph: dict(zip(_PAPERS_METHODS, figures, strict=False)) for graph, figures in by_graph.items()}


# Four P100 with 16 GB each.
_FOUR = _figures({
    "chain-mm": (439.9, 230.4, 137.1, 139.0, 123.4, 122.5, 127.0, 121.6),
    "ffnn": (148.5, 217.8, 126.3, 50.2, 47.4, 49.9, 59.1, 63.2),
    "llama-block": (462.8, 230.9, 411.5, 172.7, 160.3, 191.5, 175.6, 172.9),
    "llama-layer": (483.2, 292.6, 295.1, 174.8, 150.6, 167.0, 161.7, 159.5),
})  # fmt: skip
# The same with 8 GB each, without the last three methods.
_HALVED = _figures({
    "chain-mm": (439.8, 310.0, 243.5, 133.5, 122.6),
    "ffnn": (148.2, 225.8, 126.8, 49.2, 46.0),
    "llama-block": (465.1, 216.8, 433.5, 233.8, 190.2),
    "llama-layer": (482.6, 292.5, 302.1, 172.8, 154.0),
})  # fmt: skip
