"""The request to a planner of graphs."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.learning.measured_plans import MeasuredPlan
from hearth.plan.graph import CutOperator, Objective
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.parts import WireFormat
from hearth.plan.plan import GraphPlan

DEFAULT_TIME_LIMIT_SECONDS = 30.0  # of a search: as long as a user will wait for a plan that is used for days
POLICIES_FOLDER = "policies"  # of the coordinator's state: policies learnt for a graph and devices


@dataclass(frozen=True)
class GraphRequest:
    """A graph, the devices it may use, and what the user fixed."""

    spec: GraphSpec
    cluster: GraphCluster
    objective: Objective = "latency"
    strategy: str = "auto"
    congestion: bool = True
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS
    seed: int = 0
    wire: WireFormat = field(default_factory=WireFormat)
    model_hash: str = ""
    tiles: tuple[CutOperator, ...] = ()  # that `spec` has; the plan says so, so that they can be made again
    measured: tuple[MeasuredPlan, ...] = ()  # on these devices; the policy of `doppler` learns from them, too
    learn_seconds: float = 0.0  # for the policy of `doppler`, before the search: it learns on this graph and devices
    policies_dir: str = ""  # of policies that have learnt; empty: they are not kept
    held: GraphPlan | None = None  # the deployed plan, whose weights its devices need not get again
    recovering: bool = False  # requests wait for the plan, since the deployed one has lost a device


def objective_seconds(plan: GraphPlan) -> float:
    """The seconds by which plans are compared: the latency of one request, or the bottleneck of a full pipeline."""
    predicted = plan.predicted
    return predicted.latency_seconds if plan.body.objective == "latency" else predicted.bottleneck_seconds
