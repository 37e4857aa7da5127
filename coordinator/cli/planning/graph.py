"""Plans for graphs of operators (ONNX, or JSON without weights), as `hearth plan` makes and shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.cli.output import err, out
from coordinator.cli.planning.flow import Source
from coordinator.cli.planning.live import Live
from coordinator.cli.render.graph_tables import (
    candidates_table,
    explanation_lines,
    graph_plan_tables,
    one_device_line,
    planned_as_json,
    prediction_line,
    proof_line,
    segment_lines,
    title_of,
)
from coordinator.cli.render.picture import Drawing, drawing_of
from coordinator.devices.cluster_file import read_cluster
from coordinator.devices.graph_profiling import graph_cluster, graph_workload
from coordinator.devices.profile_file import SavedGraphProfile, read_graph_profile, saved_graph_profile
from coordinator.models.graph_file import open_graph
from coordinator.plan.graph.cluster import GraphCluster, with_limits
from coordinator.plan.graph.price import Price, predicted_timeline, price_of
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.solution import Planned
from coordinator.serve.goal import graph_request
from coordinator.serve.planner_process import solve
from coordinator.serve.state import GraphGoal
from hearth.errors import BadSetting
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_bytes, format_seconds
from hearth.wire.messages import DeviceTrace

NUM_OTHERS = 4  # candidates that are shown without --explain


@dataclass(frozen=True)
class PlannedGraph:
    """A `Planned`."""

    found: Planned[GraphPlan]
    request: GraphRequest

    @property
    def plan(self) -> GraphPlan:
        return self.found.plan

    @property
    def price(self) -> Price:
        return price_of(self.request, self.plan)

    def timeline(self) -> Sequence[DeviceTrace]:
        return predicted_timeline(self.request.spec, self.plan, self.request.cluster, self.request.congestion)

    def drawing(self) -> Drawing:
        plan, spec = self.plan, self.request.spec
        legend = [
            f"{device.name}: {sum(len(segment.operators) for segment in plan.body.segments_of(rank))} operators, "
            f"{format_seconds(device.compute_seconds)}, {format_bytes(device.memory.weights)} of weights"
            for rank, device in enumerate(plan.devices)
        ]
        rank_of = {operator: segment.rank for segment in plan.body.segments for operator in segment.operators}
        assignment = [rank_of[operator] for operator in range(spec.num_operators)]
        edges = [(a, b) for b in range(spec.num_operators) for a in spec.predecessors[b]]
        names, kinds = zip(*((operator.name, operator.kind) for operator in spec.operators), strict=True)
        return drawing_of(title_of(plan), legend, names, kinds, assignment, edges)

    def as_json(self, explain: bool) -> dict[str, Any]:
        asked = self.request
        return {
            **planned_as_json(self.found, asked, [device.name for device in asked.cluster.devices], "s"),
            "predicted": self.plan.predicted.model_dump(mode="json"),
            "bottleneck": " to ".join(map(str, self.price.bottleneck)),
            "plan": self.plan.model_dump(mode="json"),
        }

    def show(self, explain: bool) -> None:
        plan, spec, objective = self.plan, self.request.spec, self.request.objective
        out.print(*graph_plan_tables(plan), sep="\n")
        out.print(prediction_line(plan), soft_wrap=True)
        out.print(proof_line(self.found.chosen, "s"), soft_wrap=True)
        if line := one_device_line(self.found):
            out.print(line, soft_wrap=True)
        if explain:
            out.print(*explanation_lines(plan, spec, self.price), sep="\n", markup=False, soft_wrap=True)
            out.print("segments:", *segment_lines(plan, spec), sep="\n", markup=False, soft_wrap=True)
            out.print(candidates_table(self.found, objective, "s"))
        elif self.found.others:
            out.print(candidates_table(self.found, objective, "s", NUM_OTHERS))

    async def best_of_each_strategy(self) -> list[GraphPlan]:
        """This plan first. Strategies that found the same plan share one, whose `planner` names them all."""
        found = self.found
        if self.request.strategy != "auto":
            found = await solve(replace(self.request, strategy="auto"), report_strategy)
        plans = {self.plan.planner: self.plan}
        for candidate in found.candidates:  # the fastest first
            if candidate.plan is not None:
                plans.setdefault(candidate.plan.planner, candidate.plan)
        merged: list[GraphPlan] = []
        for plan in plans.values():
            for index, other in enumerate(merged):
                if (other.body, other.devices) == (plan.body, plan.devices):
                    merged[index] = other.model_copy(update={"planner": f"{other.planner}, {plan.planner}"})
                    break
            else:
                merged.append(plan)
        return merged


class GraphPlanning:
    """A `Planning`. Raises BadModelFile, DynamicShape, BadSetting, ..."""

    def __init__(self, goal: GraphGoal) -> None:
        self.goal = goal
        self.graph = open_graph(Path(goal.model_file), goal.dims)

    def read(self, source: Source) -> GraphCluster | None:
        if source.cluster is not None:
            if source.profile is not None:
                raise BadSetting(setting="--load-profile", reason="the devices are those of --cluster")
            return read_cluster(source.cluster, self.graph.spec)
        if source.profile is not None:
            return read_graph_profile(source.profile, self.graph)
        if self.graph.model is None:
            reason = f"{self.graph.path} has no weights to run anywhere; name a cluster"
            raise BadSetting(setting="--cluster", reason=reason)
        self.graph.check_types()
        return None

    async def measure(self, live: Live) -> GraphCluster:
        return await graph_cluster(live.profiler, live.devices, self.graph, graph_workload(self.graph))

    def saved(self, cluster: GraphCluster) -> SavedGraphProfile:
        return saved_graph_profile(self.graph, cluster)

    async def plan(self, cluster: GraphCluster) -> PlannedGraph:
        asked = graph_request(self.goal, self.graph, with_limits(cluster, self.goal.limits))
        return PlannedGraph(await solve(asked, report_strategy), asked)


def report_strategy(strategy: str) -> None:
    """Planning has come to this strategy."""
    err.print(f"planning: {strategy}")
