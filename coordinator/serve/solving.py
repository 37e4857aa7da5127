"""Planning in a process of its own: a solver that computes for a minute holds up nobody, and ends when it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster
from coordinator.plan.graph.request import Answer, Candidate, GraphRequest, Planned
from hearth.errors import DeadlineExceeded, InternalError, error_from_wire
from hearth.plan.graph import GraphPlan
from hearth.plan.graph_spec import GraphSpec, Operator, Parameter, Tensor
from hearth.plan.profile import WireCost
from hearth.plan.transformer import WireFormat
from hearth.platform.child import run_module

# Beside the time limit, which is for the search alone: the interpreter, the model of the problem, heuristics.
_GRACE_SECONDS = 300.0
_GRACE_FACTOR = 3.0


async def solve(request: GraphRequest, progress: Callable[[str], None] = lambda line: None) -> Planned:
    """As `plan_graph`, in a child process that is gone when this ends. Raises also DeadlineExceeded."""
    return await _child(encode_request(request), request.time_limit_seconds, progress)


async def solve_instance(
    path: str,
    strategy: str,
    congestion: bool,
    time_limit_seconds: float,
    progress: Callable[[str], None] = lambda line: None,
) -> Planned:
    """As `plan_instance`, for a placement instance in a file. Raises also BadGraph, DeadlineExceeded."""
    fields = {"path": path, "strategy": strategy, "congestion": congestion, "time_limit_seconds": time_limit_seconds}
    return await _child(fields, time_limit_seconds, progress)


async def _child(fields: dict[str, Any], time_limit_seconds: float, progress: Callable[[str], None]) -> Planned:
    def listen(line: str) -> None:
        if line.startswith(MARK):
            progress(line.removeprefix(MARK))

    seconds = _GRACE_FACTOR * time_limit_seconds + _GRACE_SECONDS
    try:
        ended = await run_module("coordinator.serve.solver", json.dumps(fields).encode(), seconds, listen)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(action="planning the graph", seconds=seconds) from None
    try:
        values = json.loads(ended.output)
    except ValueError:  # it died: out of memory, most likely
        reason = f"the planner's process {ended.cause}: {' '.join(ended.last_lines)}"
        raise InternalError(where="the coordinator", reason=reason[:1000]) from None
    if "error" in values:
        raise error_from_wire(values["error"], values["details"])
    return _planned(values)


MARK = "planning: "


# ---- what goes in and out ---------------------------------------------------------------------------------------------


def encode_request(request: GraphRequest) -> dict[str, Any]:
    spec, cluster = request.spec, request.cluster
    devices = [{**asdict(device), "wire": device.wire.model_dump()} for device in cluster.devices]
    return {
        "spec": [spec.name, spec.operators, spec.tensors, spec.parameters],
        "cluster": {
            "devices": devices,
            "seconds": cluster.seconds,
            "bytes_per_second": cluster.bytes_per_second,
            "latency_seconds": cluster.latency_seconds,
            "measured": cluster.measured,
        },
        "request": {
            "objective": request.objective,
            "strategy": request.strategy,
            "congestion": request.congestion,
            "time_limit_seconds": request.time_limit_seconds,
            "seed": request.seed,
            "model_hash": request.model_hash,
        },
        "wire": request.wire.model_dump(),
    }


def decode_request(fields: dict[str, Any]) -> GraphRequest:
    name, operators, tensors, parameters = fields["spec"]
    spec = GraphSpec(
        name,
        tuple(Operator(each[0], each[1], each[2], tuple(each[3])) for each in operators),
        tuple(Tensor(each[0], each[1], each[2], tuple(each[3]), each[4], tuple(each[5]), each[6]) for each in tensors),
        tuple(Parameter(*each) for each in parameters),
    )
    cluster = fields["cluster"]
    devices = tuple(ClusterDevice(**{**each, "wire": WireCost(**each["wire"])}) for each in cluster.pop("devices"))
    matrices = {name: tuple(map(tuple, cluster[name])) for name in ("seconds", "bytes_per_second", "latency_seconds")}
    return GraphRequest(
        spec=spec,
        cluster=GraphCluster(devices=devices, measured=cluster["measured"], **matrices),
        wire=WireFormat(**fields["wire"]),
        **fields["request"],
    )


def encode_planned(planned: Planned) -> dict[str, Any]:
    return {
        "chosen": planned.candidates.index(planned.chosen),
        "candidates": [_encode(each) for each in planned.candidates],
    }


def _encode(each: Candidate) -> dict[str, Any]:
    return {
        "label": each.label,
        "answer": each.answer._asdict() if each.answer else None,
        "plan": each.plan.model_dump(mode="json") if each.plan else None,
        "reason": each.reason,
    }


def _planned(values: dict[str, Any]) -> Planned:
    candidates = tuple(_decode(each) for each in values["candidates"])
    return Planned(candidates[values["chosen"]], candidates)


def _decode(values: dict[str, Any]) -> Candidate:
    answer, plan = values["answer"], values["plan"]
    if answer is not None:
        answer = Answer(**{**answer, "assignment": tuple(answer["assignment"]), "starts": tuple(answer["starts"])})
    return Candidate(values["label"], answer, GraphPlan.model_validate(plan) if plan else None, values["reason"])
