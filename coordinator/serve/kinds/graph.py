"""Serving ONNX graphs: as many concurrent requests as their pipeline has slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.deploy.deployment import Weights
from coordinator.deploy.graph import GraphDeployment, segment_weights
from coordinator.devices.registry import Device
from coordinator.models.graph_file import GraphFile
from coordinator.models.onnx.cutting import check_segments
from coordinator.plan.graph.cluster import GraphCluster, graph_cluster_with_limits
from coordinator.plan.graph.predict import current_objective_seconds
from coordinator.plan.graph.request import POLICIES_FOLDER, GraphRequest, objective_seconds
from coordinator.plan.methods import GRAPH_METHODS
from coordinator.plan.solution import PlanningResult
from coordinator.serve.goal import graph_request
from coordinator.serve.kinds.kind import RequestHandler, SharedServices
from coordinator.serve.kinds.measurements import Measurements
from coordinator.serve.kinds.tiled_graphs import MeasuredGraphs, ServedGraph, TiledGraphs
from coordinator.serve.planners.process import PlannerKind, plans_or_errors, solve_graph
from coordinator.serve.requests.runner import ComputedReply, Requests
from coordinator.serve.state import GraphGoal
from hearth.errors import BadPlan, BadRequest, BadSetting, HearthError, ModelDoesNotFit, NoPlacement
from hearth.plan.graph_spec import Tensor
from hearth.plan.plan import GraphPlan, Plan, is_graph_plan
from hearth.platform.units import format_seconds
from hearth.wire.codec import Array
from hearth.wire.framing import pack_arrays, unpack_arrays
from hearth.wire.messages import AnswerKind, ArrayInfo, GetModelInfo, Infer, Inferred, Message, ModelInfo
from hearth.wire.rpc import Reply

# Upper limit of the plan search while clients wait for a recovery: enough for the heuristics, and
# short against the timeouts of clients.
MAX_RECOVERY_SECONDS = 3.0


class GraphKind:
    """A `ModelKind`. Raises BadModelFile, BadSetting."""

    usage = "the model is a graph of operators; ask it with `hearth infer` or home.infer()"
    answers: AnswerKind = "arrays"
    takes_tools = False
    context_tokens = 0
    planner: PlannerKind = "graph"

    def __init__(
        self, goal: GraphGoal, graph: GraphFile, services: SharedServices, requests: Requests[GraphDeployment]
    ) -> None:
        GRAPH_METHODS.check(goal.strategy, goal.objective)
        self.graph = graph
        if self.graph.model is None:
            raise BadSetting(setting="MODEL", reason=f"{goal.model_file} has no weights to run; serve an ONNX file")
        self.spec = self.graph.spec
        self.graph.check_types()
        self._graphs = TiledGraphs(goal, graph, services.profiler, services.settings.state_dir, services.taken)
        self.workload = self._graphs.whole.workload
        self.handlers: Mapping[type[Message], RequestHandler] = {GetModelInfo: self.info, Infer: self.infer}
        self._goal = goal
        self._policies_dir = services.settings.state_dir / POLICIES_FOLDER
        self._services = services
        self._requests = requests

    # ---- plans ----------------------------------------------------------------------------------------------------

    @property
    def files(self) -> Sequence[Path]:
        return self.graph.model.file.paths() if self.graph.model is not None else ()

    def check(self, plan: Plan) -> None:
        if not is_graph_plan(plan):
            raise BadPlan(reason=f"it is for a transformer, and {self._goal.model_file} is a graph of operators")
        served = self._graphs.of(plan)
        if plan.body.objective != self._goal.objective:
            raise BadPlan(reason=f"it was made for --objective {plan.body.objective}, not {self._goal.objective}")
        check_segments(served.graph.spec, plan.body.segments)

    async def profile(
        self, devices: Sequence[Device], deployed: Plan | None = None, joined: bool = False
    ) -> MeasuredGraphs:
        return await self._graphs.measure(devices, deployed if is_graph_plan(deployed) else None, joined)

    async def plan(
        self, cluster: MeasuredGraphs, recovering: bool, held: Plan | None = None, in_background: bool = False
    ) -> GraphPlan:
        spares = None if in_background else self._services.spare_planners
        found: list[PlanningResult[GraphPlan]] = []
        for number, option in enumerate(cluster.options, 1):
            request = replace(self._request(option, recovering, held), recovering=recovering)
            try:
                found.append(await solve_graph(request, spares=spares, in_background=in_background))
            except (ModelDoesNotFit, NoPlacement):  # of whole operators and tiles, only one may fit
                if number == len(cluster.options) and not found:
                    raise
        return self._services.chosen(min(found, key=lambda each: objective_seconds(each.plan)))

    async def plans_ahead(self, clusters: Sequence[MeasuredGraphs], held: Plan) -> list[Plan | HearthError]:
        return await plans_or_errors("graph", [self._request(each.options[0], True, held) for each in clusters])

    def _request(self, option: tuple[ServedGraph, GraphCluster], recovering: bool, held: Plan | None) -> GraphRequest:
        goal, (served, cluster) = self._goal, option
        if recovering:
            goal = goal.model_copy(update={"time_limit_seconds": min(goal.time_limit_seconds, MAX_RECOVERY_SECONDS)})
        held = self._services.held(held) if held is not None else None
        deployed = held if held is not None and is_graph_plan(held) else None
        request = graph_request(goal, served.graph, graph_cluster_with_limits(cluster, goal.limits, held), deployed)
        # Samples of a policy take longer than a recovery may.
        return request if recovering else replace(request, policies_dir=str(self._policies_dir))

    def summary(self, plan: Plan) -> str:
        assert is_graph_plan(plan)
        unit = "for one request" if plan.body.objective == "latency" else "per request of a full pipeline"
        tiled = f", {len(plan.model.tiles)} operators in tiles" if plan.model.tiles else ""
        return f"planned by {plan.planner}{tiled}: {format_seconds(objective_seconds(plan))} {unit}"

    async def revise(
        self, cluster: MeasuredGraphs, deployment: GraphDeployment, in_background: bool = False
    ) -> tuple[GraphPlan, float, float]:
        deployed = deployment.plan
        new = await self.plan(cluster, False, deployed, in_background)
        current = current_objective_seconds(self._request(cluster.options[0], False, deployed), deployed)
        return new, objective_seconds(new), current

    def measurements(self, plan: GraphPlan | None = None) -> Measurements | None:
        """The measured times of the graph that a plan divides (default: the whole one); None without calibration."""
        return (self._graphs.whole if plan is None else self._graphs.of(plan)).measurements

    # ---- deployments ----------------------------------------------------------------------------------------------

    async def weights(self, plan: Plan) -> Weights:
        assert is_graph_plan(plan)
        return await segment_weights(self._graphs.of(plan).chunks, plan)

    def deployment(self, plan: Plan, name: str) -> GraphDeployment:
        assert is_graph_plan(plan)
        return GraphDeployment(self._services.fleet, plan, name)

    def capacity(self, deployment: GraphDeployment) -> int:
        return deployment.max_in_flight

    async def probe(self, deployment: GraphDeployment) -> None:
        await deployment.infer({each.name: np.zeros(each.shape, each.dtype) for each in self.spec.inputs})

    async def tune(self, deployment: GraphDeployment) -> None:
        """Nothing to choose: graph outputs have no common accuracy measure, so there is no accuracy budget."""

    # ---- requests -------------------------------------------------------------------------------------------------

    async def info(self, request: GetModelInfo, payload: Sequence[Any]) -> ModelInfo:
        """Names, dtypes and shapes of the model's inputs and outputs."""
        return ModelInfo(
            name=self.spec.name[:256], inputs=_array_infos(self.spec.inputs), outputs=_array_infos(self.spec.outputs)
        )

    async def infer(self, request: Infer, payload: Sequence[Any]) -> Reply:
        """Run one request. Raises BadRequest naming the input, QueueFull, NotServing, DeadlineExceeded, DeviceLost, ..."""
        inputs = arrays_by_name(request.names, payload)
        check_inputs(self.spec.inputs, inputs)
        admission = self._requests.admission

        async def compute(deployment: GraphDeployment) -> ComputedReply:
            before, alone = admission.num_admitted, admission.num_running == 1
            measured = self.measurements(deployment.plan)
            result = await deployment.infer(inputs, request.trace or (measured is not None and measured.wants_trace))
            # In a pipeline, requests wait for earlier ones; only the total time of one that ran alone shows the links.
            total = result.latency_seconds if alone and admission.num_admitted == before else None
            self._requests.observe(deployment, 1.0, result.compute_seconds, total)
            if measured is not None:
                measured.observe(deployment.plan, result, total)
            names, traces = tuple(result.outputs), result.traces if request.trace else ()
            reply = Inferred(names=names, latency_seconds=result.latency_seconds, traces=traces)
            return reply, pack_arrays(result.outputs)

        return await self._requests.run(compute, self._requests.arrive(request.timeout_seconds))


# ---- arrays -----------------------------------------------------------------------------------------------------------


def arrays_by_name(names: Sequence[str], payload: Sequence[Any]) -> dict[str, Array]:
    """The arrays of a payload by name, two frames each. Raises BadRequest, BadMessage."""
    if len(payload) != 2 * len(names):
        raise BadRequest(reason=f"{len(names)} inputs came in {len(payload)} frames; each needs two")
    if len(set(names)) < len(names):
        raise BadRequest(reason="an input is given twice")
    return unpack_arrays(names, payload)


def check_inputs(expected: Sequence[Tensor], given: dict[str, Array]) -> None:
    """Raise BadRequest naming the first input that is unknown, missing, or has a wrong dtype or shape."""
    names = [tensor.name for tensor in expected]
    for name in given:
        if name not in names:
            raise BadRequest(reason=f"the model has no input '{name}'; it takes {', '.join(names)}")
    for tensor in expected:
        if tensor.name not in given:
            raise BadRequest(reason=f"the input '{tensor.name}' is missing")
        array = given[tensor.name]
        if str(array.dtype) != tensor.dtype:
            raise BadRequest(reason=f"the input '{tensor.name}' must be {tensor.dtype}, not {array.dtype}")
        if array.shape != tensor.shape:
            reason = f"the input '{tensor.name}' must have the shape {list(tensor.shape)}, not {list(array.shape)}"
            raise BadRequest(reason=reason)


def _array_infos(tensors: Sequence[Tensor]) -> tuple[ArrayInfo, ...]:
    return tuple(ArrayInfo.model_validate(each, from_attributes=True) for each in tensors)
