"""Planning of operator graphs (ONNX, or JSON without weights) for `hearth plan`: profiles, plans, output, timing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.cli.load_generator import random_inputs
from coordinator.cli.output import out, report
from coordinator.cli.plans.live import LiveDevices
from coordinator.cli.render import graph_tables
from coordinator.cli.render.picture import dot_graph
from coordinator.deploy.deployment import Weights
from coordinator.deploy.graph import GraphDeployment, SegmentChunks, segment_weights
from coordinator.devices.cluster_file import read_cluster
from coordinator.devices.fleet import Fleet
from coordinator.devices.graph_profiling import graph_cluster, graph_workload
from coordinator.devices.profile_file import SavedGraphProfile, read_graph_profile, saved_graph_profile
from coordinator.models.graph_file import GraphFile, read_graph_file
from coordinator.plan.graph.cluster import GraphCluster, graph_cluster_with_limits
from coordinator.plan.graph.predict import predict_plan, predicted_graph_timeline
from coordinator.plan.graph.request import GraphRequest, objective_seconds, stored_weights, with_stored
from coordinator.plan.redundancy import Loss
from coordinator.plan.solution import PlanningResult
from coordinator.plan.stores import lacking
from coordinator.serve.goal import allowed_devices, graph_request
from coordinator.serve.kinds.graph import MAX_RECOVERY_SECONDS
from coordinator.serve.kinds.tiled_graphs import check_can_tile, tiled_for
from coordinator.serve.opening import check_model
from coordinator.serve.planners.process import plans_or_errors, solve_graph
from coordinator.serve.state import GraphGoal
from hearth.errors import BadSetting, HearthError
from hearth.plan.common import PlannedDevice
from hearth.plan.plan import GraphPlan, Plan, is_graph_plan
from hearth.platform.asyncio_tools import all_or_first_error, loop_time
from hearth.platform.units import format_bytes, format_seconds
from hearth.wire.messages import DeviceTrace

NUM_ALTERNATIVES = 4  # candidates shown without --explain, so that plan and alternatives fit on one screen


@dataclass(frozen=True)
class PlannedGraph:
    """A plan with all candidates, and the request that it answers."""

    result: PlanningResult[GraphPlan]
    request: GraphRequest

    @property
    def plan(self) -> GraphPlan:
        return self.result.plan

    def timeline(self) -> Sequence[DeviceTrace]:
        return predicted_graph_timeline(self.request.spec, self.plan, self.request.cluster, self.request.congestion)

    def picture(self) -> str:
        """The placed graph in Graphviz's language."""
        plan, spec = self.plan, self.request.spec
        legend = [
            f"{device.name}: {sum(len(segment.operators) for segment in plan.body.segments_of(rank))} operators, "
            f"{format_seconds(device.compute_seconds)}, {format_bytes(device.memory.weights)} of weights"
            for rank, device in enumerate(plan.devices)
        ]
        rank_of = plan.body.ranks_of_operators()
        assignment = [rank_of[operator] for operator in range(spec.num_operators)]
        edges = [(a, b) for b in range(spec.num_operators) for a in spec.predecessors[b]]
        operators = [(operator.kind, operator.name) for operator in spec.operators]
        return dot_graph(graph_tables.picture_title(plan), legend, operators, assignment, edges)

    def as_json(self, explain: bool) -> dict[str, Any]:
        request = self.request
        return {
            **graph_tables.planned_as_json(
                self.result, request, [device.name for device in request.cluster.devices], "s"
            ),
            "predicted": self.plan.predicted.model_dump(mode="json"),
            "bottleneck": " to ".join(map(str, predict_plan(request, self.plan).bottleneck)),
            "plan": self.plan.model_dump(mode="json"),
        }

    def show(self, explain: bool) -> None:
        plan, spec, objective = self.plan, self.request.spec, self.request.objective
        out.print(*graph_tables.graph_plan_tables(plan), sep="\n")
        out.print(graph_tables.prediction_line(plan), soft_wrap=True)
        out.print(graph_tables.proof_line(self.result.chosen, "s"), soft_wrap=True)
        if line := graph_tables.one_device_line(self.result):
            out.print(line, soft_wrap=True)
        if explain:
            priced = predict_plan(self.request, plan)
            out.print(*graph_tables.explanation_lines(plan, spec, priced), sep="\n", markup=False, soft_wrap=True)
            out.print("segments:", *graph_tables.segment_lines(plan, spec), sep="\n", markup=False, soft_wrap=True)
            out.print(graph_tables.candidates_table(self.result, objective, "s"))
        elif self.result.others:
            out.print(graph_tables.candidates_table(self.result, objective, "s", NUM_ALTERNATIVES))

    async def losses(self) -> list[Loss]:
        """What the loss of each device of the plan would cost."""
        plan, request = self.plan, self.request
        ids = [device.device_id for device in request.cluster.devices]
        if len(ids) == 1:
            return [Loss(plan.devices[0].name, "there is no other device")]
        limit = min(request.time_limit_seconds, MAX_RECOVERY_SECONDS)
        stored = stored_weights(request.spec, plan)
        cluster = with_stored(request.cluster, stored)
        deployed = replace(request, cluster=cluster, held=plan, time_limit_seconds=limit, learn_seconds=0.0)
        after = await plans_or_errors(
            "graph",
            [
                replace(deployed, cluster=deployed.cluster.subset([each for each in ids if each != lost.device_id]))
                for lost in plan.devices
            ],
        )

        def loss(lost: PlannedDevice, made: Plan | HearthError) -> Loss:
            if isinstance(made, HearthError):
                return Loss(lost.name, made.explanation())
            assert is_graph_plan(made)
            return Loss(lost.name, lacking=lacking(stored_weights(request.spec, made), stored))

        return [loss(*each) for each in zip(plan.devices, after, strict=True)]

    async def best_of_each_strategy(self) -> list[GraphPlan]:
        """This plan, then the best one of each other strategy. Equal plans become one, whose `planner` names all strategies."""
        result = self.result
        if self.request.strategy != "auto":
            result = await solve_graph(replace(self.request, strategy="auto", learn_seconds=0.0), report_strategy)
        best = {self.plan.planner: self.plan}
        for candidate in result.candidates:  # the fastest first
            if candidate.plan is not None:
                best.setdefault(candidate.plan.planner, candidate.plan)
        merged: dict[object, GraphPlan] = {}
        for plan in best.values():
            first = merged.get((plan.body, plan.devices))
            name = f"{first.planner}, {plan.planner}" if first else plan.planner
            merged[plan.body, plan.devices] = (first or plan).model_copy(update={"planner": name})
        return list(merged.values())


class GraphPlanning:
    """Profiles, plans and times one graph. Raises BadModelFile, DynamicShape, BadSetting, CannotTile, ...

    The graph is cut into tiles, if the goal asks for them, once its devices are known; with `auto` the whole graph is planned
    too, and what is faster is taken. Policies that have learnt are in `policies_dir`; the one of `doppler` learns for
    `learn_seconds` first.
    """

    def __init__(self, goal: GraphGoal, policies_dir: str = "", learn_seconds: float = 0.0) -> None:
        self.goal = goal
        self._learn_seconds = learn_seconds
        self._policies_dir = policies_dir
        check_model(goal)
        self.graph = read_graph_file(Path(goal.model_file), goal.dims)
        check_can_tile(self.graph, goal.tiles)
        self._uncut: tuple[GraphFile, GraphCluster] | None = None  # the graph before it was cut, if it was

    def cluster_from_files(self, profile: Path | None = None, devices: Path | None = None) -> GraphCluster | None:
        """The cluster of a saved profile or a cluster file; None: measure live devices. Raises BadSetting."""
        if devices is not None:
            if profile is not None:
                raise BadSetting(setting="--load-profile", reason="--cluster already names the devices")
            cluster = read_cluster(devices, self.graph.spec)
            return read_cluster(devices, self.graph.spec) if self._cut(cluster) else cluster
        if profile is not None:
            return read_graph_profile(profile, self.graph)
        if self.graph.model is None:
            reason = f"{self.graph.path} has no weights to run on live devices; name a cluster file"
            raise BadSetting(setting="--cluster", reason=reason)
        self.graph.check_types()
        return None

    async def profile(self, live: LiveDevices) -> GraphCluster:
        """The cluster of live devices. Raises NoDevices, ..."""
        cluster = await graph_cluster(live.profiler, live.devices, self.graph, graph_workload(self.graph))
        if self._cut(cluster):
            return await graph_cluster(live.profiler, live.devices, self.graph, graph_workload(self.graph))
        return cluster

    def saved_profile(self, cluster: GraphCluster) -> SavedGraphProfile:
        return saved_graph_profile(self.graph, cluster)

    async def plan(self, cluster: GraphCluster) -> PlannedGraph:
        """The best plan under the user's limits. Raises ModelDoesNotFit, ..."""
        if self._uncut is None or self.goal.tiles != "auto":
            return await self._plan(self.graph, cluster)
        graph, devices = self._uncut
        tiled = await self._plan_or_error(self.graph, cluster)
        whole = await self._plan_or_error(graph, devices.subset([device.device_id for device in cluster.devices]))
        if isinstance(whole, HearthError):
            if isinstance(tiled, HearthError):
                raise whole
            return tiled
        if not isinstance(tiled, HearthError) and objective_seconds(tiled.plan) < objective_seconds(whole.plan):
            return tiled
        report("tiles are not faster: planned with whole operators")
        self.graph = graph
        return whole

    async def _plan_or_error(self, graph: GraphFile, cluster: GraphCluster) -> PlannedGraph | HearthError:
        """A plan, or why there is none: of tiles and whole operators, only one may fit the devices' memory."""
        try:
            return await self._plan(graph, cluster)
        except HearthError as error:
            return error

    async def _plan(self, graph: GraphFile, cluster: GraphCluster) -> PlannedGraph:
        request = graph_request(self.goal, graph, graph_cluster_with_limits(cluster, self.goal.limits))
        request = replace(request, learn_seconds=self._learn_seconds, policies_dir=self._policies_dir)
        return PlannedGraph(await solve_graph(request, report_strategy), request)

    def _cut(self, cluster: GraphCluster) -> bool:
        """Cut the graph for the devices that may be used. Returns whether it has changed."""
        ids = [device.device_id for device in allowed_devices(self.goal, cluster.devices)]
        allowed = graph_cluster_with_limits(cluster.subset(ids), self.goal.limits)
        tiled = tiled_for(self.graph, allowed, self.goal.tiles)
        if tiled is self.graph:
            return False
        report(f"cut {self.graph.spec.num_operators} operators into {tiled.spec.num_operators}")
        self._uncut = (self.graph, cluster)
        self.graph = tiled
        return True

    # ---- with --compare -------------------------------------------------------------------------------------------

    @cached_property
    def _chunks(self) -> SegmentChunks:
        return SegmentChunks(self.graph)

    def deployment(self, fleet: Fleet, plan: GraphPlan) -> GraphDeployment:
        return GraphDeployment(fleet, plan)

    async def weights(self, plan: GraphPlan, cache_dir: Path) -> Weights:
        return await segment_weights(self._chunks, plan)

    async def measure_seconds(self, deployment: GraphDeployment, rounds: int) -> tuple[float, ...]:
        """Seconds of sequential requests after one warm-up request; for throughput, see `_pipeline_seconds`."""
        inputs = random_inputs(self.graph.spec.inputs)
        if deployment.plan.body.objective == "throughput":
            return await _pipeline_seconds(deployment, inputs, rounds)
        seconds = [(await deployment.infer(inputs)).latency_seconds for _ in range(rounds + 1)]
        return tuple(seconds[1:])


async def _pipeline_seconds(
    deployment: GraphDeployment, inputs: Mapping[str, np.ndarray[Any, Any]], rounds: int
) -> tuple[float, ...]:
    """Seconds per request of a full pipeline, one value per round. A round has as many answers as requests in flight.

    A first round fills the pipeline and a last one drains it; both are not counted.
    """
    size = deployment.max_in_flight
    requests, completed_at = iter(range((rounds + 2) * size)), list[float]()

    async def ask() -> None:
        for _ in requests:
            await deployment.infer(inputs)
            completed_at.append(loop_time())

    await all_or_first_error(ask() for _ in range(size))
    marks = completed_at[size - 1 :: size]
    return tuple((after - before) / size for before, after in zip(marks[:-2], marks[1:-1], strict=True))


def report_strategy(strategy: str) -> None:
    """Report the strategy that is being planned."""
    report(f"planning: {strategy}")
