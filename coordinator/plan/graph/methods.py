"""The planners of graphs by name. Pure."""

from __future__ import annotations

from coordinator.plan.methods import Method, Methods

LOCAL = "local"  # the whole graph on one device; priced with every strategy

GRAPH_METHODS = Methods(
    (
        Method("moirai", "latency", "integer programming with contention (Moirai), with a bound"),
        Method("m-sct", "latency", "small communication times, rounded from a linear program (Baechi)"),
        Method("getf", "latency", "generalised earliest time first, over groups of devices from a linear program"),
        Method("heft", "latency", "heterogeneous earliest finish time"),
        Method(
            "critical-path", "latency", "the ready operator with the longest path to the end, where it starts first"
        ),
        Method("enumerative", "latency", "tiles of an operator spread evenly, close to their inputs", in_auto=False),
        Method(
            "doppler",
            "latency",
            "list schedules improved by annealing and integer programming; a policy only after --learn",
            auto_seconds=5.0,
            recovers=True,
        ),
        Method("placeto", "latency", "a policy learnt for this graph within the time limit (baseline)", in_auto=False),
        Method(LOCAL, "latency", "the whole graph on one device"),
        Method("pipeline-exact", "throughput", "the lowest bottleneck, proven where time allows", rebalances=True),
        Method("pipeline", "throughput", "partitions first, then paths of devices for them, as published"),
        Method("random", "throughput", "random cuts and devices (baseline)", in_auto=False),
        Method("joint", "throughput", "greedy choice of cuts and devices together (baseline)"),
        Method(LOCAL, "throughput", "the whole graph on one device"),
    )
)
