"""Planning in a child process, so that a long search does not delay requests and ends with its caller.

The child runs `child.py`. One of each kind of model that is served is kept idle (`SparePlanners`): after the loss of a device,
the plan need not wait for a process to import its libraries. It is used once, and another one starts when the coordinator has
had time to serve again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.solution import PlanningResult
from coordinator.plan.transformer.request import PlanRequest
from coordinator.serve.planners import child as planner_module
from coordinator.serve.planners.child import STRATEGY_PREFIX, PlanKind, request_and_result
from coordinator.serve.state import GraphGoal
from hearth.errors import DeadlineExceeded, HearthError, InternalError, error_from_wire
from hearth.plan.plan import GraphPlan, Plan, TransformerPlan
from hearth.platform.asyncio_tools import cancel_all, with_timeout
from hearth.platform.child import Child, ChildResult, run_module
from hearth.platform.child_main import READY_LINE, SPARE

log = logging.getLogger(__name__)

# Timeout of the child: the factor times the time limits of search and learning, plus the seconds. The limits cover these
# alone, not starting the interpreter, building the problem and the heuristics. Generous: it only ends a child that hangs.
_GRACE_SECONDS = 300.0
_GRACE_FACTOR = 3.0
PlannerKind = Literal["transformer", "graph"]
# What a plan of each kind imports, the module with `main` first. With CP-SAT, which takes 0.3 s to import and which plans after
# a loss do without, an idle process would hold 100 MB (RSS) instead of 52 (transformer) or 64 (graph).
_MODULES: dict[PlannerKind, tuple[str, ...]] = {
    "transformer": ("coordinator.serve.planners.child", "coordinator.plan.transformer.choose"),
    "graph": ("coordinator.serve.planners.child", "coordinator.serve.planners.policies"),
}
# From the start of serving or the end of a plan until the next process starts: requests that waited go first.
_REST_SECONDS = 5.0
_START_SECONDS = 120.0  # until it is ready, with low priority on a busy Raspberry Pi; one that takes longer hangs
_ATTEMPTS = 3  # of a start: what fails for want of memory or threads may succeed later
ReportStrategy = Callable[[str], None]


async def solve_transformer(
    request: PlanRequest, spares: SparePlanners | None = None
) -> PlanningResult[TransformerPlan]:
    """`plan_transformer` in a child process, which is killed if this call is cancelled. Also raises DeadlineExceeded."""
    planned: PlanningResult[TransformerPlan] = _one(await _plan_in_child("transformer", [request], spares=spares))
    return planned


async def solve_graph(
    request: GraphRequest,
    report_strategy: ReportStrategy = lambda line: None,
    spares: SparePlanners | None = None,
    in_background: bool = False,
) -> PlanningResult[GraphPlan]:
    """`plan_graph` in a child process, with low priority if `in_background`; else `report_strategy` gets each strategy.

    Also raises DeadlineExceeded.
    """
    found = await _plan_in_child("graph", [request], report_strategy, spares, in_background)
    planned: PlanningResult[GraphPlan] = _one(found)
    return planned


async def solve_instance(goal: GraphGoal, report_strategy: ReportStrategy) -> PlanningResult[GraphPlan]:
    """`plan_instance` in a child process, for the placement problem in a file. Also raises DeadlineExceeded, BadGraph."""
    planned: PlanningResult[GraphPlan] = _one(await _plan_in_child("instance", [goal], report_strategy))
    return planned


async def plans_or_errors(
    kind: PlannerKind, requests: Sequence[PlanRequest | GraphRequest]
) -> list[Plan | HearthError]:
    """The plan for each request, or the error that it raised: all in one child with low priority.

    The child is killed if this call is cancelled. Raises DeadlineExceeded, InternalError.
    """
    if not requests:
        return []
    results = await _plan_in_child(kind, requests, in_background=True)
    return [result if isinstance(result, HearthError) else result.plan for result in results]


def _one(results: list[Any]) -> Any:
    """The only result. Raises it if it is an error."""
    (result,) = results
    if isinstance(result, HearthError):
        raise result
    return result


async def _plan_in_child(
    kind: PlanKind,
    requests: Sequence[Any],
    report_strategy: ReportStrategy = lambda line: None,
    spares: SparePlanners | None = None,
    in_background: bool = False,
) -> list[Any]:
    """For each request the `PlanningResult`, or the HearthError that it raised."""
    request_type, result_type = request_and_result(kind)
    limits = ("time_limit_seconds", "learn_seconds")
    search_seconds = sum(getattr(request, limit, 0.0) for request in requests for limit in limits)
    seconds = _GRACE_FACTOR * search_seconds + _GRACE_SECONDS
    dumped = [request_type.dump_python(request, mode="json") for request in requests]
    task = json.dumps({"kind": kind, "in_background": in_background, "requests": dumped}).encode()
    try:
        if in_background and kind != "instance":
            child = await (await start_planner(kind)).run(task, seconds, lambda line: None)
        else:
            child = await _run_child(kind, task, seconds, report_strategy, spares)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(action="planning", seconds=seconds) from None
    try:
        replies = json.loads(child.output)
    except ValueError:  # the child died, most likely out of memory
        reason = f"the planner process {child.cause}: {' '.join(child.stderr_tail)}"
        raise InternalError(where="the coordinator", reason=reason[:1000]) from None
    return [
        error_from_wire(reply["error"], reply["details"]) if "error" in reply else result_type.validate_python(reply)
        for reply in replies
    ]


async def _run_child(
    kind: PlanKind, task: bytes, seconds: float, report_strategy: ReportStrategy, spares: SparePlanners | None
) -> ChildResult:
    """Run the task in the idle process of this kind, or in a fresh one. Raises asyncio.TimeoutError."""

    def on_stderr_line(line: str) -> None:
        if line.startswith(STRATEGY_PREFIX):
            report_strategy(line.removeprefix(STRATEGY_PREFIX))

    if spares is None or kind == "instance":
        return await run_module(planner_module.__name__, task, seconds, on_stderr_line)
    try:
        spare = spares.take(kind)
        if spare is not None and (ended := await spare.run(task, seconds, on_stderr_line)).output:
            return ended  # one without an answer had died while it was idle
        return await run_module(planner_module.__name__, task, seconds, on_stderr_line)
    finally:
        spares.replace(kind)


# ---- idle processes ---------------------------------------------------------------------------------------------------


async def start_planner(kind: PlannerKind) -> Child:
    """Start a process that imports with low priority what a plan of this kind needs, and then waits for its task."""
    return await Child.start(SPARE, *_MODULES[kind], pipe_stderr=True)


class SparePlanners:
    """Keeps one idle process for each kind of which a plan may be needed soon."""

    def __init__(self) -> None:
        self.ready: dict[PlannerKind, Child] = {}  # that wait for a plan
        self._starting: dict[PlannerKind, asyncio.Task[None]] = {}
        self._kept: set[PlannerKind] = set()

    def keep(self, kind: PlannerKind, at_once: bool = False) -> None:
        """Keep a process of this kind from now on. `at_once`: start it now, since a plan is needed soon."""
        self._kept.add(kind)
        self.replace(kind, at_once)

    def replace(self, kind: PlannerKind, at_once: bool = False) -> None:
        """Start the next process in a while, if this kind is kept and has none that lives."""
        starting, ready = self._starting.get(kind), self.ready.get(kind)
        if kind in self._kept and (starting is None or starting.done()) and (ready is None or not ready.runs):
            self._starting[kind] = asyncio.create_task(self._start(kind, 0.0 if at_once else _REST_SECONDS))

    def take(self, kind: PlannerKind) -> Child | None:
        """The idle process of this kind, for one plan of the caller's; None if none is ready."""
        child = self.ready.pop(kind, None)
        return child if child is not None and child.runs else None

    async def close(self) -> None:
        """End all idle processes, and start no more."""
        self._kept.clear()
        await cancel_all(self._starting.values())
        children = list(self.ready.values())
        self.ready.clear()
        await asyncio.gather(*(child.kill() for child in children))

    async def _start(self, kind: PlannerKind, rest_seconds: float) -> None:
        for _ in range(_ATTEMPTS):
            await asyncio.sleep(rest_seconds)
            child = None
            try:
                child = await start_planner(kind)
                await with_timeout(_START_SECONDS, child.wait_for_line(READY_LINE))
                self.ready[kind], child = child, None
                return
            except (OSError, RuntimeError, asyncio.TimeoutError) as error:
                log.warning("no planner process is kept ready: %s", error or f"none was within {_START_SECONDS:g} s")
            finally:
                if child is not None:
                    await child.kill()
            rest_seconds = _REST_SECONDS
