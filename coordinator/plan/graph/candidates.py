"""Candidate plans of a graph: each device alone, and the plan of each strategy, within the devices' memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.plan.graph.build import build_plan
from coordinator.plan.graph.memory import MAX_GRAPH_CHUNK_BYTES, reserved_bytes
from coordinator.plan.graph.methods import LOCAL
from coordinator.plan.graph.placing import place_operators
from coordinator.plan.graph.request import GraphRequest, objective_seconds
from coordinator.plan.graph.tasks import tensor_transfers
from coordinator.plan.methods import Method
from coordinator.plan.solution import Candidate, OperatorAssignment, SearchOptions, Solution
from hearth.errors import ModelDoesNotFit, NoPlacement
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_bytes
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES

if TYPE_CHECKING:
    from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy

# Per strategy: memory other than weights is known only once the operators are placed. Each attempt is a whole search.
_MAX_ATTEMPTS = 4
GraphCandidate = Candidate[GraphPlan]


def local_candidates(request: GraphRequest) -> Iterator[GraphCandidate]:
    """One candidate per device: the whole graph on that device."""
    for index, device in enumerate(request.cluster.devices):
        label = f"{LOCAL} on {device.name}"
        seconds = sum(row[index] for row in request.cluster.seconds)
        solution = Solution(OperatorAssignment((index,) * request.spec.num_operators), seconds)
        plan = build_plan(request, solution, LOCAL)
        missing_bytes = plan.devices[0].memory.total - device.budget_bytes
        yield (
            GraphCandidate.too_large(label, LOCAL, missing_bytes)
            if missing_bytes > 0
            else _make_candidate(label, LOCAL, plan, solution)
        )


def try_method(
    request: GraphRequest, method: Method, options: SearchOptions, policy: HomePolicy | None
) -> GraphCandidate:
    """Run one strategy; if nothing fits with the first estimate of memory other than weights, with the least one."""
    try:
        return _fitted_candidate(request, with_reserved_bytes(request), method, options, policy)
    except (ModelDoesNotFit, NoPlacement) as error:
        if not request.cluster.measured:
            return without_plan(method.name, error)
    try:
        return _fitted_candidate(request, _with_least_reserved(request), method, options, policy)
    except (ModelDoesNotFit, NoPlacement) as error:
        return without_plan(method.name, error)


def _fitted_candidate(
    request: GraphRequest, searched: GraphRequest, method: Method, options: SearchOptions, policy: HomePolicy | None
) -> GraphCandidate:
    """The plan of a strategy for the request as `searched`. If it exceeds a device's budget, reserve the excess and repeat.

    Strategies budget for weights alone; activations and other memory are known only once the plan is built. Each attempt
    has half the time of the one before, so that all of them take at most twice the time limit. Raises ModelDoesNotFit and
    NoPlacement.
    """
    name = method.name
    for attempt in range(_MAX_ATTEMPTS):
        limited = options._replace(time_limit_seconds=options.time_limit_seconds * 0.5**attempt)
        solution = place_operators(searched, method, limited, policy)
        plan = build_plan(request, solution, name)
        if reason := _why_not_sendable(request, plan):
            return Candidate(name, name, reason=reason)
        over = {device.device_id: device.memory.total - device.budget_bytes for device in plan.devices}
        if max(over.values()) <= 0:
            return _make_candidate(name, name, plan, solution)
        devices = searched.cluster.devices
        reserved = [each.reserved_bytes + max(over.get(each.device_id, 0), 0) for each in devices]
        searched = replace(searched, cluster=searched.cluster.with_reserved_bytes(reserved))
    return Candidate(name, name, reason="does not fit: no room for the memory it needs besides the weights")


def _why_not_sendable(request: GraphRequest, plan: GraphPlan) -> str:
    """Why live devices cannot run the plan: a tensor must fit in one message. Empty if they can."""
    if not request.cluster.measured:
        return ""
    largest = max(tensor_transfers(request.spec, plan.body.segments), key=lambda each: each.num_bytes, default=None)
    if largest is None or largest.num_bytes <= MAX_PAYLOAD_FRAME_BYTES:
        return ""
    return f"would send {largest.tensor}, whose {format_bytes(largest.num_bytes)} exceed the size limit of a message"


def without_plan(name: str, error: ModelDoesNotFit | NoPlacement) -> GraphCandidate:
    """The candidate of a strategy that raised this error."""
    if isinstance(error, ModelDoesNotFit) and error.missing_bytes:
        return GraphCandidate.too_large(name, name, error.missing_bytes)
    return Candidate(name, name, reason="found no placement within the devices' memory")


def with_reserved_bytes(request: GraphRequest) -> GraphRequest:
    """The request with a first estimate of the memory of each device that is not for weights."""
    reserved = reserved_bytes(request.spec, request.cluster)
    return replace(request, cluster=request.cluster.with_reserved_bytes(reserved))


def _with_least_reserved(request: GraphRequest) -> GraphRequest:
    """The request with weights in place, each once per device, and nothing reserved for activations."""
    cluster = request.cluster
    devices = tuple(
        replace(each, reserved_bytes=each.process_bytes + MAX_GRAPH_CHUNK_BYTES, load_bytes=0, loading_bytes=0)
        for each in cluster.devices
    )
    return replace(request, cluster=replace(cluster, devices=devices))


def _make_candidate(
    label: str, strategy: str, plan: GraphPlan, solution: Solution[OperatorAssignment]
) -> GraphCandidate:
    names = tuple(device.name for device in plan.devices)
    return Candidate(label, strategy, names, objective_seconds(plan), plan, solution)
