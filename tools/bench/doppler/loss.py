"""Kind `doppler-loss`: the plan after the loss of a device, beside one that is searched for as long as a user would wait.

Each task graph is planned for each home. Then each device is lost in turn, and `auto` plans for the others as it does while
requests wait. A longer search for the same devices is the reference; those of an earlier run can be taken over, so that what
was changed is measured in minutes. All time limits count processor time, so that other programs matter less; that of starting
a planner process is measured apart.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from coordinator.plan.graph.auto import plan_graph
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.request import GraphRequest, objective_seconds
from coordinator.plan.solution import PlanningResult
from coordinator.serve.planners.policies import plan_with_policy
from coordinator.serve.planners.spare import start_planner
from hearth.plan.plan import GraphPlan
from hearth.platform.child_main import READY_LINE
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.results import Summary, Table, load_result
from tools.bench.stats import percentile
from tools.bench.tensor.graphs import GRAPHS, GraphName, tensor_graph
from tools.bench.tensor.homes import HOMES

# Of each device, as a share of all weights: segments of one device hold the weights that they share once each.
_BUDGET_SHARE = 4.0
MOST_SECONDS = 1.0  # of processor time, from the start of the planner process to the plan
MOST_MEDIAN_LOSS, MOST_LOSS = 0.05, 0.15  # of the plan against the reference


class LossRow(BaseModel):
    """The loss of one device. Makespans are those of the placements; the cut into segments adds to the plan's latency."""

    model_config = ConfigDict(frozen=True)

    graph: str
    home: str
    lost: str
    num_operators: int
    planner: str
    latency_seconds: float  # predicted
    makespan_seconds: float
    reference_seconds: float  # makespan of the reference
    start_seconds: float  # processor time of starting a planner process, with its imports
    planning_seconds: float  # processor time of the plan

    @property
    def behind(self) -> float:
        """How far the plan is behind the reference, as a fraction."""
        return self.makespan_seconds / self.reference_seconds - 1

    @property
    def seconds(self) -> float:
        """From the start of the process to the plan, on one core."""
        return self.start_seconds + self.planning_seconds


class DopplerLoss(Experiment):
    """Every single-device loss of every pair of graph and home. Does not hold if a limit above is exceeded."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(LossRow)
    PAGE = "doppler"
    NAMED: ClassVar[Named] = {
        "doppler-loss": {"title": "Plans of task graphs after the loss of a device", "reference_limit": 60}
    }

    graphs: tuple[GraphName, ...] = GRAPHS
    homes: tuple[str, ...] = ("gigabit", "wifi", "unequal")
    home_limit: float = Field(10.0, gt=0)  # seconds of processor time, of the search for the plan that loses a device
    reference_limit: float = Field(60.0, gt=0)  # the same, of the reference
    references: tuple[Path, ...] = ()  # result files, whose references are taken over; the others are searched for

    def measure(self, context: Context) -> Iterator[LossRow]:
        yield from context.known
        done = {(row.graph, row.home, row.lost) for row in context.known}
        earlier = [self.ROW.validate_python(row) for path in self.references for row in load_result(path).raw]
        known = {(row.graph, row.home, row.lost): row.reference_seconds for row in earlier}
        for name in self.graphs:
            for home in self.homes:
                graph = tensor_graph(name)
                cluster = HOMES[home].cluster(graph, _BUDGET_SHARE)
                if all((name, home, device.name) in done for device in cluster.devices):
                    continue
                context.report(f"{name}, {home}: planning")
                request = GraphRequest(graph.spec(), cluster, time_limit_seconds=self.home_limit)
                deployed = _search(request).plan
                references: dict[GraphCluster, float] = {}  # the loss of one of two equal devices leaves equal ones
                for lost in cluster.devices:
                    if (name, home, lost.name) in done:
                        continue
                    context.report(f"{name}, {home}: losing {lost.name}")
                    left = cluster.subset([each.device_id for each in cluster.devices if each != lost])
                    key = replace(left, devices=())
                    if key not in references:
                        reference = replace(request, cluster=left, time_limit_seconds=self.reference_limit)
                        found_earlier = known.get((name, home, lost.name))
                        references[key] = found_earlier or _makespan_seconds(_search(reference))
                    recovery = replace(request, cluster=left, held=deployed, recovering=True)
                    began = time.process_time()
                    found = plan_with_policy(recovery, time.process_time, lambda strategy: None)
                    planning_seconds = time.process_time() - began
                    yield LossRow(
                        graph=name, home=home, lost=lost.name, num_operators=request.spec.num_operators,
                        planner=found.plan.planner, latency_seconds=objective_seconds(found.plan),
                        makespan_seconds=_makespan_seconds(found), reference_seconds=references[key],
                        start_seconds=asyncio.run(_start_seconds()), planning_seconds=planning_seconds,
                    )  # fmt: skip

    def summary(self, rows: Sequence[LossRow]) -> Summary:
        behind = [row.behind for row in rows]
        median, worst = statistics.median(behind), max(behind)
        longest = max(row.seconds for row in rows)
        problems = len({(row.graph, row.home) for row in rows})
        said = (
            f"{len(rows)} losses of {problems} problems: the plan is behind the reference by {median:.1%} in the median,"
            f" {percentile(behind, 0.9):.1%} in the 90th percentile, {worst:.1%} at most",
            f"from the start of the planner process to the plan, at most {longest:.2f} s of processor time",
        )
        holds = median <= MOST_MEDIAN_LOSS and worst <= MOST_LOSS and longest <= MOST_SECONDS
        failure = "" if holds else (
            f"more than {MOST_SECONDS:g} s, or further behind than {MOST_MEDIAN_LOSS:.0%} in the median or {MOST_LOSS:.0%}"
        )  # fmt: skip
        title = f"Plans after a loss, against {self.reference_limit:g} s of processor time"
        return Summary(conclusions=said, tables=(Table.of_columns(title, _COLUMNS, rows),), failure=failure)


def _search(request: GraphRequest) -> PlanningResult[GraphPlan]:
    """The plan of doppler; its time limit counts processor time, so that other programs do not matter."""
    return plan_graph(replace(request, strategy="doppler"), time.process_time)


def _makespan_seconds(found: PlanningResult[GraphPlan]) -> float:
    assert found.chosen.solution is not None
    return found.chosen.solution.value


async def _start_seconds() -> float:
    """Processor time of a planner process until it is ready."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = await start_planner("graph")
    await child.wait_for_line(READY_LINE)
    await child.kill()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


_COLUMNS: Mapping[str, Callable[[LossRow], object]] = {
    "graph": lambda row: row.graph,
    "operators": lambda row: row.num_operators,
    "home": lambda row: row.home,
    "lost": lambda row: row.lost,
    "latency (s)": lambda row: f"{row.latency_seconds:.4f}",
    "makespan (s)": lambda row: f"{row.makespan_seconds:.4f}",
    "reference (s)": lambda row: f"{row.reference_seconds:.4f}",
    "behind": lambda row: f"{row.behind:.1%}",
    "start of the process (s)": lambda row: f"{row.start_seconds:.2f}",
    "planning (s)": lambda row: f"{row.planning_seconds:.2f}",
}
