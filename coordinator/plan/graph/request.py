"""What a planner of graphs is asked and answers; the strategies by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from coordinator.plan.graph.cluster import GraphCluster
from hearth.errors import BadSetting
from hearth.plan.graph import Objective
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.parts import WireFormat
from hearth.plan.plan import GraphPlan

LATENCY: tuple[str, ...] = ("moirai", "m-sct", "getf", "heft", "critical-path", "local")
THROUGHPUT: tuple[str, ...] = ("pipeline-exact", "pipeline", "random", "joint", "local")
STRATEGIES: tuple[str, ...] = tuple(dict.fromkeys((*LATENCY, *THROUGHPUT)))
# What `auto` asks: all, but for the baseline that throws dice.
AUTO: dict[Objective, tuple[str, ...]] = {
    "latency": LATENCY,
    "throughput": tuple(strategy for strategy in THROUGHPUT if strategy != "random"),
}
DEFAULT_SECONDS = 30.0


class Answer(NamedTuple):
    """What a strategy said. `assignment` [n] are devices of the cluster; `bound` 0 where none is known.

    `objective_value` is in seconds, or in the unit of a file that names none. `starts` [n] of operators, where a strategy
    makes a schedule.
    """

    strategy: str
    assignment: tuple[int, ...]
    objective_value: float
    bound: float = 0.0
    proven_optimal: bool = False
    planning_seconds: float = 0.0
    starts: tuple[float, ...] = ()


class Candidate(NamedTuple):
    """A strategy's answer and its plan; or why there is none. Of a problem without a graph there is no plan."""

    label: str
    answer: Answer | None = None
    plan: GraphPlan | None = None
    reason: str = ""

    def seconds(self, objective: Objective) -> float:
        """What candidates are compared by."""
        if self.plan is not None:
            return seconds_of(self.plan)
        return self.answer.objective_value if self.answer is not None else float("inf")

    @property
    def num_devices(self) -> int:
        return len(set(self.answer.assignment)) if self.answer else 0


class Planned(NamedTuple):
    """The chosen candidate, and all that were looked at in the order of their seconds."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class GraphRequest:
    """A graph, the devices it may use, and what the user fixed."""

    spec: GraphSpec
    cluster: GraphCluster
    objective: Objective = "latency"
    strategy: str = "auto"
    congestion: bool = True
    time_limit_seconds: float = DEFAULT_SECONDS
    seed: int = 0
    wire: WireFormat = field(default_factory=WireFormat)
    model_hash: str = ""


def check_strategy(strategy: str, objective: str) -> None:
    """Raises BadSetting for one that does not exist, or is not for this objective."""
    if objective not in get_args(Objective):
        raise BadSetting(setting="--objective", reason=f"'{objective}' is none of {', '.join(get_args(Objective))}")
    allowed = LATENCY if objective == "latency" else THROUGHPUT
    if strategy not in ("auto", *STRATEGIES):
        raise BadSetting(setting="--strategy", reason=f"'{strategy}' is none of auto, {', '.join(STRATEGIES)}")
    if strategy not in ("auto", *allowed):
        raise BadSetting(
            setting="--strategy", reason=f"{strategy} is not for {objective}; that takes auto, {', '.join(allowed)}"
        )


def seconds_of(plan: GraphPlan) -> float:
    """What plans are compared by: one request, or a full pipeline's share of one."""
    predicted = plan.predicted
    return predicted.latency_seconds if plan.body.objective == "latency" else predicted.bottleneck_seconds
