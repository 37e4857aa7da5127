"""Successive halving over plans that are tried on the devices, each in turns with the deployed one. Pure.

In each round every remaining plan gets twice as many requests as in the round before, and the better half remains
(Jamieson and Talwalkar, arXiv 1502.07943). A plan that is clearly slow leaves after three requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

FIRST_REQUESTS = 10  # of each plan in the first round
MAX_REQUESTS = 40  # of one plan: a gain that is not certain by then is not worth a change
MIN_GAIN = 0.03  # least measured gain, as a fraction, for which the plan is changed for good
MIN_STANDARD_ERRORS = 2.0  # by which the gain must exceed zero
_EARLY_REQUESTS = 3  # whose median may end a trial
_EARLY_FACTOR = 1.25  # times the median of the deployed plan


@dataclass
class Arm:
    """The measured seconds of one plan, and those of the deployed plan in between."""

    seconds: list[float] = field(default_factory=list)
    incumbent_seconds: list[float] = field(default_factory=list)
    has_failed: bool = False

    @property
    def num_requests(self) -> int:
        return len(self.seconds)

    @property
    def log_ratio(self) -> float:
        """The mean of log(seconds / seconds of the deployed plan); infinite without requests."""
        return fmean(self._log_ratios()) if self.seconds else math.inf

    @property
    def standard_error(self) -> float:
        """Of `log_ratio`; infinite for fewer than two requests."""
        if self.num_requests < 2:
            return math.inf
        return stdev(self._log_ratios()) / math.sqrt(self.num_requests)

    @property
    def gain(self) -> float:
        """The share of time that the plan saves; negative if it is slower."""
        return 1 - math.exp(self.log_ratio)

    @property
    def is_slow(self) -> bool:
        """Whether the trial should end early."""
        latest = self.seconds[-_EARLY_REQUESTS:]
        return len(latest) == _EARLY_REQUESTS and median(latest) > _EARLY_FACTOR * median(self.incumbent_seconds)

    @property
    def is_better(self) -> bool:
        """Whether the plan should be deployed for good."""
        is_certain = self.log_ratio <= -MIN_STANDARD_ERRORS * self.standard_error
        return self.num_requests >= FIRST_REQUESTS and self.gain >= MIN_GAIN and is_certain

    @property
    def may_turn_out_better(self) -> bool:
        """Whether more requests may prove a gain that is not certain yet."""
        return not self.is_better and self.gain >= MIN_GAIN and self.num_requests < MAX_REQUESTS

    def _log_ratios(self) -> list[float]:
        return [math.log(own / other) for own, other in zip(self.seconds, self.incumbent_seconds, strict=True)]


class SuccessiveHalving:
    """Which plan is tried next, and which one wins. Plans are numbered from 0."""

    def __init__(self, num_plans: int) -> None:
        self.arms = [Arm() for _ in range(num_plans)]
        self._remaining = list(range(num_plans))
        self._quota = FIRST_REQUESTS  # of each remaining plan, at the end of this round

    @property
    def num_requests(self) -> int:
        """Requests that have run on plans under trial."""
        return sum(arm.num_requests for arm in self.arms)

    def next(self) -> int | None:
        """The plan that the next request tries; None once all is decided. Stays with a plan to the end of its round."""
        while self._remaining:
            waiting = [each for each in self._remaining if self.arms[each].num_requests < self._quota]
            if waiting:
                return waiting[0]
            if len(self._remaining) == 1 and not self.arms[self._remaining[0]].may_turn_out_better:
                return None
            by_time = sorted(self._remaining, key=lambda each: self.arms[each].log_ratio)
            self._remaining = by_time[: math.ceil(len(by_time) / 2)]
            self._quota = min(2 * self._quota, MAX_REQUESTS)
        return None

    def observe(self, plan: int, seconds: float, incumbent_seconds: float) -> None:
        """Record a request on this plan and one on the deployed plan, which ran next to each other."""
        arm = self.arms[plan]
        arm.seconds.append(seconds)
        arm.incumbent_seconds.append(incumbent_seconds)
        if arm.is_slow:
            self._drop(plan)

    def fail(self, plan: int) -> None:
        """A request on this plan has failed, or it could not be loaded: nothing is learnt from it, and its trial ends."""
        self.arms[plan].has_failed = True
        self._drop(plan)

    def winner(self) -> int | None:
        """The plan that replaces the deployed one, if one does."""
        better = [each for each, arm in enumerate(self.arms) if arm.is_better and not arm.has_failed]
        return min(better, key=lambda each: self.arms[each].log_ratio, default=None)

    def _drop(self, plan: int) -> None:
        if plan in self._remaining:
            self._remaining.remove(plan)
