"""Kind `doppler-policy`: plans of a learnt policy alone, and the planner with it, with random weights and with none.

Needs no devices: all plans are simulated, with contention of transfers. Seconds are processor seconds on one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from random import Random
from statistics import geometric_mean
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy
from coordinator.plan.graph.latency.doppler.policy import Policy, random_policy
from coordinator.plan.graph.latency.doppler.samples import policy_samples
from coordinator.plan.graph.latency.list_scheduling import critical_path
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from coordinator.plan.solution import SearchOptions, Solution
from coordinator.serve.planners.policies import SHIPPED_POLICY, usable_policy
from hearth.errors import BadSetting
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.results import Summary, Table
from tools.bench.tensor.graphs import GRAPHS, GraphName, tensor_graph
from tools.bench.tensor.homes import HOMES
from tools.learn.home.instances import random_instance

FOUR_DEVICES = ("gigabit", "wifi", "unequal", "unequal-wifi")  # homes; the first three for the comparison at equal time
_SEED = 0
_FITTING_SECONDS = 10.0  # for an assignment that fits, where memory is tight
_ROUNDING = 1e-9  # relative: sums of floats in another order


class ZeroShotRow(BaseModel):
    """Makespans of one instance, in seconds: baselines, and the policy without any search."""

    model_config = ConfigDict(frozen=True)

    part: Literal["zero-shot"] = "zero-shot"
    instance: str
    num_operators: int
    num_devices: int
    critical_path: float
    best_list: float
    greedy: float
    sampled: float  # the best of all rounds of samples, which begin with the best list schedule
    planning_seconds: float  # of `sampled` and the list schedules, processor time

    @property
    def over_list(self) -> float:
        return self.sampled / self.best_list

    @property
    def beats_critical_path(self) -> bool:
        return self.sampled <= self.critical_path * (1 + _ROUNDING)


class ShareRow(BaseModel):
    """Makespans of the planner within equal processor time, in seconds."""

    model_config = ConfigDict(frozen=True)

    part: Literal["share"] = "share"
    instance: str
    time_limit: float
    bound: float
    learnt: float
    random: float  # with a policy of random weights
    none: float  # without a policy

    @property
    def over_random(self) -> float:
        return self.learnt / self.random

    @property
    def over_none(self) -> float:
        return self.learnt / self.none


class DopplerPolicy(Experiment):
    """The policy on graphs and homes that training has not seen, and its share of the planner's plans."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(ZeroShotRow | ShareRow)
    PAGE = "doppler"
    NAMED: ClassVar[Named] = {
        "doppler-policy": {
            "title": "What the learnt policy adds to the planner doppler", "source": "Doppler, arXiv 2505.23131",
            # Random graphs on random homes that training has not seen, besides the paper's graphs on four homes.
            "random_instances": 24, "random_seed": 1000000,
            # Seconds of processor time of each plan. The planner runs with the policy, with random weights, and with none.
            "time_limits": [5, 30],
        }
    }  # fmt: skip

    policy: Path | None = None  # a policy's file; default: the one that ships with Hearth
    random_instances: int = Field(24, ge=0)
    random_seed: int = 1_000_000  # training draws its instances with small seeds
    time_limits: tuple[float, ...] = (5.0, 30.0)  # processor seconds of each plan
    share_graphs: tuple[GraphName, ...] = GRAPHS  # for the comparison at equal time

    def measure(self, context: Context) -> Iterator[ZeroShotRow | ShareRow]:
        path = self.policy or SHIPPED_POLICY
        policy = usable_policy(path)
        if policy is None:
            raise BadSetting(setting="policy", reason=f"{path} cannot be used; `python -m tools.learn home` makes one")
        rng = np.random.default_rng(self.random_seed)
        problems = {f"{graph}, {home}": _problem(graph, home) for graph, home in product(GRAPHS, FOUR_DEVICES)}
        for index in range(self.random_instances):
            problem = random_instance(rng)
            problems[f"random {index} ({problem.name})"] = problem
        for name, problem in problems.items():
            context.report(f"{name}: zero-shot")
            yield zero_shot(name, problem, policy)
        untrained = random_policy(np.random.default_rng(_SEED))
        for limit, home, graph in product(self.time_limits, FOUR_DEVICES[:3], self.share_graphs):
            name, problem = f"{graph}, {home}", _problem(graph, home)
            context.report(f"{name}: {limit:g} s of planning")
            plans = [solve_with(problem, each, limit) for each in (policy, untrained, None)]
            learnt, random, none = (each.value for each in plans)
            bound = max(each.bound for each in plans)
            yield ShareRow(instance=name, time_limit=limit, bound=bound, learnt=learnt, random=random, none=none)

    def summary(self, rows: Sequence[ZeroShotRow | ShareRow]) -> Summary:
        zero_shots = [row for row in rows if isinstance(row, ZeroShotRow)]
        shares = [row for row in rows if isinstance(row, ShareRow)]
        said = []
        if zero_shots:
            share = sum(row.beats_critical_path for row in zero_shots) / len(zero_shots)
            ratio = geometric_mean(row.over_list for row in zero_shots)
            said = [
                f"zero-shot, never longer than Critical Path on {share:.0%} of {len(zero_shots)} instances (asked: 95%)",
                f"zero-shot, {ratio:.3f} of the best list schedule (geometric mean; asked: 0.93)",
                f"zero-shot plans take at most {max(row.planning_seconds for row in zero_shots):.1f} processor seconds",
            ]
        for limit in self.time_limits:
            of_limit = [row for row in shares if row.time_limit == limit]
            if of_limit:
                random, none = (
                    geometric_mean(ratios)
                    for ratios in zip(*((row.over_random, row.over_none) for row in of_limit), strict=True)
                )
                said.append(
                    f"{limit:g} s of planning: {none:.3f} of the makespan without a policy, {random:.3f} of that with "
                    f"random weights (geometric means of {len(of_limit)}; asked: 0.97)"
                )
        zero_shot_title = "The policy without search, on instances that training has not seen"
        share_title = "The planner within equal processor time: with the policy, with random weights, with none"
        tables = (
            Table.of_columns(zero_shot_title, _ZERO_SHOT_COLUMNS, zero_shots),
            Table.of_columns(share_title, _SHARE_COLUMNS, shares),
        )
        return Summary(conclusions=tuple(said), tables=tables)


def solve_with(problem: PlacementProblem, policy: Policy | None, time_limit: float) -> Solution[Schedule]:
    """The planner's schedule within a limit of processor time, which includes that of sampling starts."""
    return HomePolicy(policy).solve(problem, SearchOptions(time_limit, _SEED, time.process_time))


def zero_shot(name: str, problem: PlacementProblem, policy: Policy) -> ZeroShotRow:
    """Plan with the list schedules, and with samples of the policy."""
    began = time.process_time()
    incumbent = min(list_schedules(problem, _FITTING_SECONDS, "doppler"), key=lambda each: each.makespan)
    samples = policy_samples(problem, policy, incumbent, _SEED)
    seconds = time.process_time() - began
    return ZeroShotRow(
        instance=name,
        num_operators=problem.num_operators,
        num_devices=problem.num_devices,
        critical_path=critical_path(problem, Random(_SEED)).makespan,
        best_list=incumbent.makespan,
        greedy=policy_samples(problem, policy, incumbent, _SEED, num_samples=0, num_rounds=1)[0].makespan,
        sampled=samples[0].makespan,
        planning_seconds=seconds,
    )


def _problem(graph: GraphName, home: str) -> PlacementProblem:
    return HOMES[home].problem(tensor_graph(graph))


def _seconds(attribute: str) -> Callable[[BaseModel], object]:
    return lambda row: f"{getattr(row, attribute):.4f}"


_ZERO_SHOT_COLUMNS: Mapping[str, Callable[[ZeroShotRow], object]] = {
    "instance": lambda row: row.instance,
    "operators": lambda row: row.num_operators,
    "devices": lambda row: row.num_devices,
    "Critical Path (s)": _seconds("critical_path"),
    "best list (s)": _seconds("best_list"),
    "greedy (s)": _seconds("greedy"),
    "best sample (s)": _seconds("sampled"),
    "of the best list": lambda row: f"{row.over_list:.3f}",
    "planned in (s)": lambda row: f"{row.planning_seconds:.2f}",
}
_SHARE_COLUMNS: Mapping[str, Callable[[ShareRow], object]] = {
    "instance": lambda row: row.instance,
    "limit (s)": lambda row: f"{row.time_limit:g}",
    "bound (s)": _seconds("bound"),
    "learnt (s)": _seconds("learnt"),
    "random weights (s)": _seconds("random"),
    "no policy (s)": _seconds("none"),
    "of random weights": lambda row: f"{row.over_random:.3f}",
    "of no policy": lambda row: f"{row.over_none:.3f}",
}
