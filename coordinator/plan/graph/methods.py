"""The planners of graphs by name. Pure.

Planners are imported when they are asked: their solvers take half a second, and planning runs in a process of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from coordinator.plan.methods import Method, Methods

LOCAL = "local"  # the whole graph on one device, which is always priced as well


def _moirai(problem: Any, options: Any) -> Any:
    from coordinator.plan.graph.latency import moirai

    return moirai.solve(problem, options.time_limit_seconds, options.clock)


def _baseline(name: str, problem: Any, options: Any) -> Any:
    from coordinator.plan.graph.latency.baselines import solve

    return solve(name, problem, options)


def _pipeline(name: str, problem: Any, options: Any) -> Any:
    from coordinator.plan.graph.throughput.planners import PLANNERS

    return PLANNERS[name](problem, options)


def _latency(name: str, summary: str) -> Method:
    return Method(name, "latency", summary, partial(_baseline, name))


def _throughput(name: str, summary: str, in_auto: bool = True, rebalances: bool = False) -> Method:
    return Method(name, "throughput", summary, partial(_pipeline, name), in_auto, rebalances)


GRAPH_METHODS = Methods(
    (
        Method("moirai", "latency", "integer programming with contention (Moirai), with a bound", _moirai),
        _latency("m-sct", "small communication times, rounded from a linear program (Baechi)"),
        _latency("getf", "generalised earliest time first, over groups of devices from a linear program"),
        _latency("heft", "heterogeneous earliest finish time"),
        _latency("critical-path", "the critical path on the fastest device, the rest where it ends first"),
        _latency(LOCAL, "the whole graph on one device"),
        _throughput("pipeline-exact", "the lowest bottleneck, proven where time allows", rebalances=True),
        _throughput("pipeline", "partitions first, then paths of devices for them, as published"),
        _throughput("random", "random cuts and devices (baseline)", in_auto=False),
        _throughput("joint", "greedy choice of cuts and devices together (baseline)"),
        _throughput(LOCAL, "the whole graph on one device"),
    )
)
