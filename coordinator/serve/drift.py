"""Decides when to plan again: devices or links drifted, or a device joined. Pure: steps and `now` are arguments."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from hearth.plan.plan import Plan

BASELINE_STEPS = 5  # observed steps whose median is the baseline of this plan on these devices
SUSTAINED_STEPS = 5  # consecutive steps for which a drift must last: home devices are often busy for some seconds
COMPUTE_DRIFT = 1.25  # slowdown or speed-up of one device against its baseline that unbalances a plan
TOTAL_DRIFT = 1.30  # the same for a whole step; larger, because Wi-Fi makes it vary more
MIN_GAIN = 0.10  # least predicted gain, as a fraction: changing the plan costs seconds without service
REPLAN_SECONDS = 60.0  # least time between two attempts: measuring and planning disturb requests
STAY_SECONDS = 10.0  # a new device must be available this long before it is planned for ...
MAX_STAY_SECONDS = 640.0  # ... doubled for every recent loss after the first, up to this
LOST_LATELY_SECONDS = 3600.0  # a loss counts as recent for this long
LOOK_AGAIN_SECONDS = 600.0  # until a device that was left out because it is slow is measured again

_WORTH_SAYING = 1.1  # smaller factors are left out of the explanation
_WEIGHT = 0.3  # of the newest step in the moving average: it follows 88 % of a jump within six steps
_LARGEST_MOVE = math.log(2.0)  # change that one step may contribute: a single outlier stays below every threshold


@dataclass(frozen=True)
class Finding:
    """A sustained drift. `links_suspect`: whole steps drifted, but no single device did."""

    factors: Mapping[str, float] = field(default_factory=dict)  # by device id: current time / baseline time
    links_suspect: bool = False


class DriftMonitor:
    """Detects drift in the steps (or requests) of one deployed plan.

    Watches the change of measured/predicted time against the first steps, not the ratio itself, so that a systematic
    error of the simulator is not taken for drift.
    """

    def __init__(self, plan: Plan) -> None:
        self.finding: Finding | None = None  # after the latest step
        self._plan = plan
        self._is_first = True
        self.rebase()

    def rebase(self) -> None:
        """Start a new baseline from the next steps."""
        self.finding = None
        self._devices = {device.device_id: _Ratio() for device in self._plan.devices}
        self._total = _Ratio()
        self._compute_drifted = self._total_drifted = 0  # consecutive steps

    def observe(self, share: float, compute_seconds: Sequence[float], total_seconds: float | None) -> Finding | None:
        """Record one step or request: each rank's busy seconds, and the total seconds if it did not queue behind others.

        `share` is its size relative to the predicted one. Ignored are steps of less than half that size, the first step
        (a warm-up), and ranks that report no time. Returns the finding while there is one.
        """
        if share < 0.5:
            return self.finding
        if self._is_first:
            self._is_first = False
            return None
        for device, seconds in zip(self._plan.devices, compute_seconds, strict=True):
            self._devices[device.device_id].add(seconds, device.compute_seconds * share)
        self._compute_drifted = self._compute_drifted + 1 if self._has_compute_drifted() else 0
        if total_seconds is not None:
            self._total.add(total_seconds, self._plan.predicted.latency_seconds * share)
            self._total_drifted = self._total_drifted + 1 if abs(self._total.change) > math.log(TOTAL_DRIFT) else 0
        self.finding = self._judge()
        return self.finding

    def _has_compute_drifted(self) -> bool:
        """Whether any device changed in absolute terms or relative to the others; both unbalance the plan."""
        changes = [ratio.change for ratio in self._devices.values()]
        for rank, change in enumerate(changes):
            others = changes[:rank] + changes[rank + 1 :]
            against_others = change - median(others) if others else 0.0
            if max(abs(change), abs(against_others)) > math.log(COMPUTE_DRIFT):
                return True
        return False

    def _judge(self) -> Finding | None:
        if self._compute_drifted >= SUSTAINED_STEPS:
            return Finding(factors={name: math.exp(ratio.settled) for name, ratio in self._devices.items()})
        # A beginning compute drift may explain the drift of the whole step.
        if self._total_drifted >= SUSTAINED_STEPS and not self._compute_drifted and self._plan.num_ranks > 1:
            return Finding(links_suspect=True)
        return None


class _Ratio:
    """log(measured / predicted) relative to its baseline. In logarithms a doubling and a halving weigh the same."""

    def __init__(self) -> None:
        self.change = 0.0  # exponentially weighted moving average
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=SUSTAINED_STEPS)

    @property
    def settled(self) -> float:
        """The median change of the latest steps; unlike `change` it does not lag behind a jump."""
        return median(self._recent) if self._recent else 0.0

    def add(self, measured_seconds: float, predicted_seconds: float) -> None:
        if measured_seconds <= 0 or predicted_seconds <= 0:
            return
        ratio = math.log(measured_seconds / predicted_seconds)
        if len(self._first) < BASELINE_STEPS:
            self._first.append(ratio)
            return
        change = ratio - median(self._first)
        self._recent.append(change)
        self.change += _WEIGHT * max(-_LARGEST_MOVE, min(change - self.change, _LARGEST_MOVE))


# ---- when to plan again ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reasons:
    """Why a new plan should be made now."""

    joined: frozenset[str] = frozenset()  # device ids that the newest plan did not consider
    finding: Finding | None = None


class Watch:
    """Decides when to plan again in the background. One per served model; it outlives deployments."""

    def __init__(self) -> None:
        self._last_replan = -math.inf
        self._known: set[str] = set()  # devices that the newest plan considered
        self._since: dict[str, float] = {}  # other usable devices, and since when they are usable
        self._losses: dict[str, list[float]] = {}

    def planned(self, device_ids: Collection[str], now: float, slow: Collection[str] = ()) -> None:
        """Record that a plan was made from these devices. `slow`: those it left out because they had become slow."""
        self._known = set(device_ids) - set(slow)
        self._since = dict.fromkeys(slow, now + LOOK_AGAIN_SECONDS)

    def lost(self, device_id: str, now: float) -> None:
        """Record the loss of a device that was in use."""
        recent = [then for then in self._losses.get(device_id, []) if now - then < LOST_LATELY_SECONDS]
        self._losses[device_id] = [*recent, now]

    def due(self, usable: Collection[str], finding: Finding | None, now: float) -> Reasons | None:
        """The reasons to plan again now, or None. An answer other than None starts the pause of `REPLAN_SECONDS`."""
        self._known &= set(usable)  # a device that leaves and returns counts as new
        self._since = {name: self._since.get(name, now) for name in usable if name not in self._known}
        joined = frozenset(name for name, since in self._since.items() if now - since >= self._stay_seconds(name, now))
        if now - self._last_replan < REPLAN_SECONDS or not (joined or finding):
            return None
        self._last_replan = now
        return Reasons(joined, finding)

    def _stay_seconds(self, device_id: str, now: float) -> float:
        losses = sum(now - then < LOST_LATELY_SECONDS for then in self._losses.get(device_id, ()))
        return min(STAY_SECONDS * 2.0 ** max(losses - 1, 0), MAX_STAY_SECONDS)


def explain(reasons: Reasons, names: Mapping[str, str]) -> str:
    """The reasons as text. `names`: device names by id."""
    parts = [f"{names.get(device_id, device_id)} can join" for device_id in sorted(reasons.joined)]
    if reasons.finding is not None:
        if reasons.finding.links_suspect:
            parts.append("the links have changed")
        for device_id, factor in reasons.finding.factors.items():
            if not 1 / _WORTH_SAYING < factor < _WORTH_SAYING:
                parts.append(f"{names.get(device_id, device_id)} takes {factor:.2f}x its time")
    return ", ".join(parts) or "the relative speeds of the devices have changed"


def pays(new_seconds: float, old_seconds: float) -> bool:
    """Whether the new plan is faster by at least `MIN_GAIN`. Both times must be priced under the same profile."""
    return new_seconds <= (1 - MIN_GAIN) * old_seconds
