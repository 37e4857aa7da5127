"""Results of planners, and the choice of one plan among candidates, for both kinds of model. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from hearth.plan.common import Alternative
from hearth.plan.plan import Plan
from hearth.platform.units import format_bytes

A = TypeVar("A", covariant=True)
B = TypeVar("B")
P = TypeVar("P", bound=Plan)

Stop = Callable[[], bool]  # whether the time of a search is over
IDLE_SHARE = 0.01  # of the work: a device with less is left out where that costs nothing


@dataclass(frozen=True)
class Solution(Generic[A]):
    """An assignment and its `value` under the planner's objective; `bound` is a lower bound on it (0: unknown)."""

    assignment: A
    value: float
    bound: float = 0.0
    proven: bool = False  # to be optimal
    seconds: float = 0.0  # duration of the search
    notes: tuple[str, ...] = ()  # what the user should know of the search

    @property
    def gap(self) -> float:
        """How far the value is above the bound, as a fraction of the bound; infinite without a bound."""
        if self.value <= self.bound:
            return 0.0
        return self.value / self.bound - 1 if self.bound > 0 else math.inf

    def with_assignment(self, assignment: B) -> Solution[B]:
        """The same figures for another form of the assignment."""
        return Solution(assignment, self.value, self.bound, self.proven, self.seconds, self.notes)


class OperatorAssignment(NamedTuple):
    """The device index of each operator of a graph, and the start of each if the planner makes a schedule."""

    devices: tuple[int, ...]
    starts: tuple[float, ...] = ()


class SearchOptions(NamedTuple):
    """`clock` returns seconds; the search ends when `time_limit_seconds` have passed. `seed` is that of random choices."""

    time_limit_seconds: float
    seed: int
    clock: Callable[[], float]


@dataclass(frozen=True)
class Candidate(Generic[P]):
    """A plan with its predicted time, or the reason why there is none."""

    label: str  # as in `Plan.alternatives`
    strategy: str
    devices: tuple[str, ...] = ()  # names, by rank
    seconds: float = math.inf  # predicted; candidates are compared by this
    plan: P | None = None  # None: the strategy found none, or the problem has no graph
    solution: Solution[OperatorAssignment] | None = None  # for graphs
    missing_bytes: int = 0
    reason: str = ""  # why it was not chosen

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @classmethod
    def too_large(cls, label: str, strategy: str, missing_bytes: int) -> Candidate[P]:
        """A candidate without a plan, because `missing_bytes` of memory are missing."""
        reason = f"does not fit: {format_bytes(missing_bytes)} are missing"
        return cls(label, strategy, missing_bytes=missing_bytes, reason=reason)


@dataclass(frozen=True)
class PlanningResult(Generic[P]):
    """The chosen candidate, and the others by increasing seconds. `notes`: what the user should know about the plan."""

    chosen: Candidate[P]
    others: tuple[Candidate[P], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> P:
        assert self.chosen.plan is not None
        return self.chosen.plan

    @property
    def candidates(self) -> tuple[Candidate[P], ...]:
        return (self.chosen, *self.others)


def choose_candidate(
    candidates: Sequence[Candidate[P]], is_eligible: Callable[[Candidate[P]], bool], tolerance: float
) -> Candidate[P] | None:
    """The candidate on the fewest devices among those within `tolerance` times the seconds of the fastest one.

    Only candidates for which `is_eligible` holds are considered.
    """
    ordered = sorted(filter(is_eligible, candidates), key=lambda each: each.seconds)
    if not ordered:
        return None
    close = (each for each in ordered if each.seconds <= tolerance * ordered[0].seconds)
    return min(close, key=lambda each: (each.num_devices, each.seconds))


def with_reasons(chosen: Candidate[P], others: Iterable[Candidate[P]], requested: str) -> PlanningResult[P]:
    """Add to each of the others the reason why it was not chosen; the chosen plan keeps them as its alternatives.

    `requested` is the strategy that the user named, or auto.
    """
    ordered = sorted(others, key=lambda each: each.seconds)
    ordered = [replace(each, reason=_why_not(each, chosen, requested)) for each in ordered]
    if chosen.plan is not None:
        alternatives = tuple(
            Alternative(
                strategy=each.label,
                predicted_seconds=each.seconds if math.isfinite(each.seconds) else None,
                reason=each.reason,
            )
            for each in ordered
        )
        chosen = replace(chosen, plan=chosen.plan.model_copy(update={"alternatives": alternatives}))
    return PlanningResult(chosen, tuple(ordered), chosen.solution.notes if chosen.solution else ())


def _why_not(other: Candidate[P], chosen: Candidate[P], requested: str) -> str:
    if not math.isfinite(other.seconds):
        return other.reason
    if requested != "auto" and other.seconds < chosen.seconds:
        return f"faster, but '{requested}' was asked for"
    if other.seconds > chosen.seconds:
        return f"slower by {other.seconds / chosen.seconds:.2f}x" if chosen.seconds > 0 else "slower"
    if other.num_devices == chosen.num_devices:
        return "equally fast"
    return "not meaningfully faster, and uses more devices"
