"""Bottlenecks of the throughput planners in random clusters: the data of the paper's Figures 7 to 10.

Every run of a setting draws its own communication graph, seeded by the seed and the setting, and gives it to all planners.
So a single run can be repeated, and an interrupted benchmark can continue from its results file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from coordinator.plan.graph.throughput.baselines import joint_stages, joint_stages_from, random_stages
from coordinator.plan.graph.throughput.exact import best_stages
from coordinator.plan.graph.throughput.partitions import Partitioning
from coordinator.plan.graph.throughput.points import Chain, candidate_chain, candidate_points, fine_chain
from coordinator.plan.graph.throughput.problem import PipelineProblem
from coordinator.plan.graph.throughput.published import NUM_CLASSES, equal_partitions, published_stages
from hearth.errors import BadSetting, ModelDoesNotFit
from hearth.files import write_atomically
from hearth.plan.graph_spec import GraphSpec
from tools.bench.partition_setup import Accounting, draw_links, problem_of
from tools.bench.partition_theory import nearest_stages, published_points, theorem_bound

MODELS = ("MobileNetV2", "EfficientNetB1", "ResNet50", "InceptionResNetV2")
NODES = (5, 10, 15, 20, 50)
MEMORY_MIB = (64, 128, 256, 512)
CLASSES = (2, 5, 8, 11, 14, 17, NUM_CLASSES)  # numbers of transfer classes
RATIO_NODES, RATIO_MEMORY_MIB = 50, 64  # of Figure 10
_SAVE_EVERY = 100  # runs between two writes of the results file
T = TypeVar("T")

PIPELINE, EXACT, RANDOM, JOINT, ONE_START = "pipeline", "pipeline-exact", "random", "joint", "joint, one start"
SAME_CUTS = "joint, same partitions"  # with the partitions of `pipeline`
THEOREM, BOUND = "Theorem 1", "bound"


class Setting(NamedTuple):
    accounting: str
    model: str
    num_nodes: int
    memory_mib: int
    seed: int


class Bottlenecks(BaseModel):
    """Results of one setting. `seconds[column][run]`: bottleneck or bound; `planning[planner][run]`: planning time."""

    model_config = ConfigDict(validate_assignment=False)

    accounting: str
    model: str
    num_nodes: int = Field(ge=1)
    memory_mib: int = Field(ge=1)
    seed: int
    outcome: Literal["measured", "fits on one node", "does not fit"]
    num_stages: int = Field(ge=0)  # of the published planner
    seconds: dict[str, list[float]] = {}
    planning: dict[str, list[float]] = {}

    @property
    def setting(self) -> Setting:
        return Setting(self.accounting, self.model, self.num_nodes, self.memory_mib, self.seed)

    @property
    def num_runs(self) -> int:
        return len(self.seconds.get(PIPELINE, ()))

    @property
    def num_unproven(self) -> int:
        pairs = zip(self.seconds.get(EXACT, ()), self.seconds.get(BOUND, ()), strict=True)
        return sum(bound < exact for exact, bound in pairs)

    def mean(self, column: str) -> float:
        return sum(self.seconds[column]) / len(self.seconds[column])

    def ratios(self, over: str, under: str) -> list[float]:
        """Ratio of two columns, by run."""
        return [a / b for a, b in zip(self.seconds[over], self.seconds[under], strict=True)]

    def mean_ratio(self, over: str, under: str) -> float:
        found = self.ratios(over, under)
        return sum(found) / len(found)


class Points(BaseModel):
    """Candidate partition points of one graph. `by_paper`: by the paper's rule; None for a graph of several sources."""

    model_config = ConfigDict(frozen=True)

    model: str
    num_operators: int
    num_points: int  # without the source, with the sink
    by_paper: int | None
    same: bool | None
    largest_block: int  # operators
    largest_block_bytes: int  # of weights
    most_beside: int = 0  # most tensors that cross one cut, not counting the output of its point
    most_beside_bytes: int = 0
    half_at_points: float = 1.0  # fraction of the FLOPs in the larger half of the most even cut in two
    half_at_cuts: float = 1.0  # the same, if several tensors may cross the cut

    @property
    def usable(self) -> bool:
        """Whether no block has more than half of the operators, so that cuts can distribute the graph."""
        return 2 * self.largest_block <= self.num_operators


class Plans(NamedTuple):
    """The planner variants measured in every run."""

    classes: Sequence[int]
    time_limit: float


# ---- measuring --------------------------------------------------------------------------------------------------------


def points_of(spec: GraphSpec) -> Points:
    points = candidate_points(spec)
    one_source = sum(not before for before in spec.predecessors) == 1
    paper = published_points(spec) if one_source else None
    chain = candidate_chain(spec)
    beside = [_beside(spec, point, crossing) for point, crossing in zip(points, chain.crossing, strict=False)]
    return Points(
        model=spec.name,
        num_operators=spec.num_operators,
        num_points=len(points) - 1,
        by_paper=None if paper is None else len(paper) - 1,
        same=None if paper is None else paper == points,
        largest_block=max(map(len, chain.blocks)),
        largest_block_bytes=max(map(spec.parameter_bytes, chain.blocks)),
        most_beside=max(map(len, beside), default=0),
        most_beside_bytes=max(map(sum, beside), default=0),
        half_at_points=_larger_half(spec, chain),
        half_at_cuts=_larger_half(spec, fine_chain(spec)),
    )


def _larger_half(spec: GraphSpec, chain: Chain) -> float:
    """Fraction of the FLOPs in the larger half when the chain is cut in two as evenly as possible."""
    flops = [sum(spec.operators[operator].flops for operator in block) for block in chain.blocks]
    before = [0.0, *accumulate(flops)]
    return min(max(each, before[-1] - each) for each in before) / before[-1] if before[-1] else 1.0


def _beside(spec: GraphSpec, point: int, crossing: Sequence[int]) -> list[int]:
    """Bytes of each tensor that crosses a cut but is not the output of its point (side inputs that are carried along)."""
    return [spec.tensors[index].num_bytes for index in crossing if spec.tensors[index].source != point]


def measure(
    spec: GraphSpec,
    accounting: Accounting,
    setting: Setting,
    known: Bottlenecks | None,
    num_runs: int,
    plans: Plans,
) -> Iterator[Bottlenecks]:
    """Continue a setting after its known runs; yields it with more and more runs."""
    problem = problem_of(spec, accounting, setting.memory_mib << 20, setting.num_nodes)
    try:
        partitioning, _ = equal_partitions(problem)
    except ModelDoesNotFit:
        yield Bottlenecks(**setting._asdict(), outcome="does not fit", num_stages=0)
        return
    found = known or Bottlenecks(
        **setting._asdict(),
        outcome="measured" if partitioning.transfers else "fits on one node",
        num_stages=len(partitioning.last),
    )
    if not partitioning.transfers:
        yield found
        return
    for run in range(found.num_runs, num_runs):
        chance = Random(f"{setting.seed} {setting.model} {setting.num_nodes} {setting.memory_mib} {run}")
        drawn = draw_links(problem, accounting, chance)
        _one_run(drawn, partitioning, chance, plans, found)
        found.seconds.setdefault(THEOREM, []).append(theorem_bound(drawn, partitioning))
        if run % _SAVE_EVERY == _SAVE_EVERY - 1:
            yield found
    yield found


def _one_run(problem: PipelineProblem, cuts: Partitioning, chance: Random, plans: Plans, found: Bottlenecks) -> None:
    def note(column: str, seconds: float) -> None:
        found.seconds.setdefault(column, []).append(seconds)

    *fewer, most = sorted(plans.classes)
    for num_classes in fewer:
        note(with_classes(num_classes), problem.bottleneck_seconds(published_stages(problem, chance, num_classes)))
    published, seconds = timed(lambda: published_stages(problem, chance, most))
    note(PIPELINE, problem.bottleneck_seconds(published))
    found.planning.setdefault(PIPELINE, []).append(seconds)
    deadline = time.perf_counter() + plans.time_limit
    answer, seconds = timed(lambda: best_stages(problem, chance, lambda: time.perf_counter() > deadline, [published]))
    exact = problem.bottleneck_seconds(answer.assignment)
    note(EXACT, exact)
    note(BOUND, min(answer.bound, exact))
    found.planning.setdefault(EXACT, []).append(seconds)
    note(RANDOM, problem.bottleneck_seconds(random_stages(problem, chance)))
    note(JOINT, problem.bottleneck_seconds(joint_stages(problem)))
    note(SAME_CUTS, problem.bottleneck_seconds(nearest_stages(problem, cuts, range(problem.num_devices))))
    start = chance.randrange(problem.num_devices)
    note(ONE_START, problem.bottleneck_seconds(joint_stages_from(problem, start) or joint_stages(problem)))


def with_classes(num_classes: int) -> str:
    return f"pipeline, {num_classes} classes"


def timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


# ---- files ------------------------------------------------------------------------------------------------------------

_ROWS = TypeAdapter(list[Bottlenecks])


def load_rows(path: Path | None) -> dict[Setting, Bottlenecks]:
    """Load the results of an earlier run. Raises BadSetting."""
    if path is None or not path.exists() or path.stat().st_size == 0:
        return {}
    try:
        return {row.setting: row for row in _ROWS.validate_json(path.read_bytes())}
    except (OSError, ValidationError) as error:
        reason = f"it does not contain results of this benchmark ({str(error).splitlines()[0]})"
        raise BadSetting(setting="--json", reason=reason) from None


def save_rows(path: Path, rows: Sequence[Bottlenecks]) -> None:
    """Write the results atomically, so that an interrupt leaves the old file."""
    write_atomically(path, _ROWS.dump_json(list(rows)))
