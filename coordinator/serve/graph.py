"""Serves one graph, which `upkeep` keeps deployed: as many requests at once as its pipeline has room for, others wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from coordinator.deploy.distribution import Progress
from coordinator.deploy.graph import GraphDeployment, Inference
from coordinator.deploy.graph_chunks import Pieces
from coordinator.devices.fleet import Fleet
from coordinator.devices.graph_profiling import GraphProfiler
from coordinator.devices.registry import Device
from coordinator.models.graph_file import Graph, open_graph
from coordinator.models.onnx.cutting import check_segments
from coordinator.plan.graph.cluster import with_limits
from coordinator.plan.graph.request import check_strategy, seconds_of
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.goal import graph_request
from coordinator.serve.replanning import failure_of
from coordinator.serve.solving import solve
from coordinator.serve.state import GraphGoal
from coordinator.serve.upkeep import Upkeep
from hearth.errors import (
    BadModelFile,
    BadPlan,
    BadRequest,
    BadSetting,
    DeadlineExceeded,
    NotServing,
    QueueFull,
    StepFailed,
)
from hearth.plan.graph_spec import Tensor
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_bytes, format_seconds
from hearth.wire.framing import unpack_arrays
from hearth.wire.messages import ArrayInfo, ElementType, Infer, ModelInfo

if TYPE_CHECKING:
    import numpy as np

# While nothing is served, a plan is wanted soon: the search for a better one ends here, whatever its limit.
_RECOVERY_SECONDS = 3.0


class Window:
    """At most `size` at once, in the order in which they came; at most `most_waiting` wait."""

    def __init__(self, most_waiting: int) -> None:
        self.size = 0
        self.running = 0
        self._most_waiting = most_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def resize(self, size: int) -> None:
        self.size = size
        self._let_in()

    async def enter(self) -> None:
        """Wait for room. Raises QueueFull at once where too many wait."""
        if self.running < self.size and not self._waiting:
            self.running += 1
            return
        if len(self._waiting) >= self._most_waiting:
            raise QueueFull(limit=self._most_waiting)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # let in and given up in the same moment
                self.leave()
            else:
                self._waiting.remove(turn)
            raise

    def leave(self) -> None:
        self.running -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.running < self.size:
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)


class GraphServer(Upkeep[GraphGoal, GraphPlan, GraphDeployment]):
    """Requests run side by side; what is lost with a device is a typed error for those in flight."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        fleet: Fleet,
        report: Callable[[str], None],
        progress: Progress = lambda name, done, total: None,
    ) -> None:
        super().__init__(settings, fleet, report, progress)
        self._graph: Graph | None = None
        self._pieces: Pieces | None = None
        self._profiles = GraphProfiler(fleet, self.profiler, settings.state_dir / "profiles", report)
        self._window = Window(settings.queue_limit)
        self._runs: set[asyncio.Task[Inference]] = set()
        self._probe: asyncio.Task[None] | None = None

    @property
    def queued(self) -> int:
        return self._window.num_waiting

    async def run(self) -> None:
        await self._deploy_loop()

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*self._runs, *([self._probe] if self._probe else []), return_exceptions=True)

    # ---- requests -------------------------------------------------------------------------------------------------

    def info(self) -> ModelInfo:
        """What the model takes and gives. Raises NotServing."""
        spec = self._require_graph().spec
        return ModelInfo(name=spec.name[:256], inputs=_infos(spec.inputs), outputs=_infos(spec.outputs))

    async def infer(self, request: Infer, payload: Sequence[Any]) -> Inference:
        """One request. Raises BadRequest that names the input, QueueFull, NotServing, DeadlineExceeded, DeviceLost, ..."""
        inputs = arrays_of(request.names, payload)
        check_inputs(self._require_graph().spec.inputs, inputs)
        deadline = time.monotonic() + request.timeout_seconds
        try:
            await asyncio.wait_for(self._window.enter(), request.timeout_seconds)
        except asyncio.TimeoutError:
            raise self._too_late(request) from None
        # Once it is on the devices it keeps its place until it has ended there, whether or not its client waits.
        running = asyncio.create_task(self._run(inputs, deadline, request.trace))
        self._runs.add(running)
        running.add_done_callback(self._ended)
        done, _ = await asyncio.wait({running}, timeout=max(deadline - time.monotonic(), 0.001))
        if not done:
            raise self._too_late(request)
        return running.result()

    def _ended(self, running: asyncio.Task[Inference]) -> None:
        self._runs.discard(running)
        self._window.leave()
        if not running.cancelled():
            running.exception()  # looked at, though its client may be gone

    async def _run(self, inputs: dict[str, np.ndarray[Any, Any]], deadline: float, trace: bool) -> Inference:
        deployment: GraphDeployment | None = None
        try:
            deployment = await self.deployed(deadline - time.monotonic())
            result = await deployment.infer(inputs, trace)
        except Exception as error:
            failure = failure_of(error)
            if deployment is not None and isinstance(failure, StepFailed):
                self._failed_request(failure, None)
                self._doubt(deployment)
            else:
                self._failed_request(failure, deployment)
            raise failure from None
        self.served += 1
        self.last_latency_seconds = result.latency_seconds
        return result

    def _doubt(self, deployment: GraphDeployment) -> None:
        """A request failed in the middle: its values may be to blame, or the plan. One that is known to run tells."""

        async def probe() -> None:
            try:
                await deployment.infer(_zeros(self._require_graph().spec.inputs))
            except Exception as error:
                self.failed_on(deployment, failure_of(error))

        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(probe())

    def _too_late(self, request: Infer) -> NotServing | DeadlineExceeded:
        if not self.ready:
            return NotServing(state=self.state)
        return DeadlineExceeded(action="the request", seconds=request.timeout_seconds)

    def _require_graph(self) -> Graph:
        if self._graph is None:
            raise NotServing(state=self.state)
        return self._graph

    # ---- deployment -----------------------------------------------------------------------------------------------

    def start(self, goal: GraphGoal, plan: GraphPlan | None = None) -> None:
        """As `Upkeep.start`. Raises BadPlan for a plan that the user gave and that is for another graph."""
        if plan is not None and goal.keep_plan:
            graph = open_graph(Path(goal.model_file), goal.dims)
            if plan.model.sha256 != graph.fingerprint:
                raise BadPlan(reason=f"it was made for another graph than {goal.model_file}")
            check_segments(graph.spec, plan.body.segments)
        super().start(goal, plan)

    def _open(self, goal: GraphGoal) -> None:
        check_strategy(goal.strategy, goal.objective)
        graph = open_graph(Path(goal.model_file), goal.dims)
        if graph.model is None:
            raise BadSetting(setting="MODEL", reason=f"{goal.model_file} has no weights to run; serve an ONNX file")
        for tensor in (*graph.spec.inputs, *graph.spec.outputs):
            if tensor.dtype not in get_args(ElementType) or tensor.dtype == "bfloat16":
                reason = f"its tensor {tensor.name} is of {tensor.dtype}, which has no place in numpy"
                raise BadModelFile(path=goal.model_file, reason=reason)
        self._graph, self._pieces = graph, Pieces(graph)

    def _suits(self, plan: GraphPlan) -> bool:
        graph, goal = self._require_graph(), self.goal
        if plan.model.sha256 != graph.fingerprint or goal is None or plan.body.objective != goal.objective:
            return False
        try:
            check_segments(graph.spec, plan.body.segments)
        except BadPlan:
            return False
        return True

    async def _make_plan(self, goal: GraphGoal, devices: Sequence[Device]) -> GraphPlan:
        graph = self._require_graph()
        self._set_state(f"profiling {len(devices)} devices")
        cluster = with_limits(await self._profiles.cluster(devices, graph), goal.limits)
        self._set_state("planning")
        if self.plan is not None:
            goal = goal.model_copy(update={"time_limit_seconds": min(goal.time_limit_seconds, _RECOVERY_SECONDS)})
        plan = (await solve(graph_request(goal, graph, cluster))).chosen.plan
        assert plan is not None
        self._report(
            f"planned by {plan.planner}: {format_seconds(seconds_of(plan))} "
            f"{'for one request' if plan.body.objective == 'latency' else 'per request of a full pipeline'}"
        )
        return plan

    def _deploying(self, plan: GraphPlan) -> GraphDeployment:
        return GraphDeployment(self._fleet, plan)

    async def _bring_up(self, deployment: GraphDeployment) -> None:
        assert self._pieces is not None
        names = ", ".join(device.name for device in deployment.devices)
        self._set_state(f"pushing segments to {names}")
        files = await deployment.push(self._pieces, self._progress)
        self._report(
            f"pushed {format_bytes(deployment.sent_bytes)}, devices passed on "
            f"{format_bytes(deployment.passed_bytes)}; what was there already was not sent again"
        )
        self._set_state(f"loading on {names}")
        await deployment.load(files, self.profiler.links, self._settings.encrypt_data_plane)
        self._set_state("warming up")
        await deployment.infer(_zeros(self._require_graph().spec.inputs))
        self._window.resize(deployment.max_in_flight)

    def _serving(self, plan: GraphPlan) -> str:
        names = ", ".join(device.name for device in plan.devices)
        return f"serving {plan.model.name} on {names} ({plan.planner}, for {plan.body.objective})"


# ---- arrays -----------------------------------------------------------------------------------------------------------


def arrays_of(names: Sequence[str], payload: Sequence[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays in two frames each, by name. Raises BadRequest, BadMessage."""
    if len(payload) != 2 * len(names):
        raise BadRequest(reason=f"{len(names)} inputs came in {len(payload)} frames; each takes two")
    if len(set(names)) < len(names):
        raise BadRequest(reason="an input is given twice")
    return unpack_arrays(names, payload)


def check_inputs(wanted: Sequence[Tensor], given: dict[str, np.ndarray[Any, Any]]) -> None:
    """Raises BadRequest that names the first input that is unknown, missing, or of another dtype or shape."""
    names = [tensor.name for tensor in wanted]
    for name in given:
        if name not in names:
            raise BadRequest(reason=f"the model has no input '{name}'; it takes {', '.join(names)}")
    for tensor in wanted:
        if tensor.name not in given:
            raise BadRequest(reason=f"the input '{tensor.name}' is missing")
        array = given[tensor.name]
        if str(array.dtype) != tensor.dtype:
            raise BadRequest(reason=f"the input '{tensor.name}' must be {tensor.dtype}, not {array.dtype}")
        if array.shape != tensor.shape:
            raise BadRequest(
                reason=f"the input '{tensor.name}' must have the shape {list(tensor.shape)}, not {list(array.shape)}"
            )


def _infos(tensors: Sequence[Tensor]) -> tuple[ArrayInfo, ...]:
    return tuple(
        ArrayInfo.model_validate({"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape})
        for tensor in tensors
    )


def _zeros(tensors: Sequence[Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    import numpy as np

    return {tensor.name: np.zeros(tensor.shape, tensor.dtype) for tensor in tensors}
