"""Decides when to plan again: devices or links drifted, were measured, or joined. Pure: steps and `now` are arguments."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from coordinator.plan.speed_ratio import SpeedRatio
from hearth.plan.plan import Plan

BASELINE_STEPS = 5  # steps whose median is the baseline of this plan: two outliers do not change it much
SUSTAINED_STEPS = 5  # consecutive steps for which a drift must last: home devices are often busy for some seconds
COMPUTE_DRIFT = 1.25  # slowdown or speed-up of one device against its baseline: above noise, and worth other shares
TOTAL_DRIFT = 1.30  # the same for a whole step; larger, because Wi-Fi makes it vary more
MIN_PREDICTED_GAIN = 0.10  # least predicted gain, as a fraction: changing the plan costs seconds without service
REPLAN_SECONDS = 60.0  # least time between two attempts: measuring and planning disturb requests
# A new device must be usable for this long before it is planned for, since a change of plan costs seconds. Doubled for
# every recent loss after the first, up to the maximum (six doublings), so that an unstable device changes few plans.
MIN_PRESENCE_SECONDS = 10.0
MAX_PRESENCE_SECONDS = 640.0
RECENT_LOSS_SECONDS = 3600.0  # a loss counts as recent for this long: an unstable device is lost several times an hour
REMEASURE_SLOW_SECONDS = 600.0  # until a device left out as slow is measured again: measuring takes it some seconds

_MIN_REPORTED_FACTOR = 1.1  # smaller factors are noise; the explanation leaves them out
_WINDOW = 10 / 3  # steps that the moving average remembers: it follows 88 % of a jump within six steps


@dataclass(frozen=True)
class SustainedDrift:
    """A sustained drift. `links_suspect`: whole steps drifted, but no single device did."""

    factors: Mapping[str, float] = field(default_factory=dict)  # by device id: current time / baseline time
    links_suspect: bool = False


class DriftMonitor:
    """Detects drift in the steps (or requests) of one deployed plan.

    Watches the change of measured/predicted time against the first steps, not the ratio itself, so that a systematic
    error of the simulator is not taken for drift.
    """

    def __init__(self, plan: Plan) -> None:
        self.drift: SustainedDrift | None = None  # after the latest step
        self._plan = plan
        self._skip_next = True
        self.reset_baseline()

    def reset_baseline(self) -> None:
        """Start a new baseline from the next steps."""
        self.drift = None
        self._devices = {device.device_id: _Change() for device in self._plan.devices}
        self._total = _Change()
        self._compute_drifted = self._total_drifted = 0  # consecutive steps

    def observe(self, relative_size: float, compute_seconds: Sequence[float], total_seconds: float | None) -> None:
        """Record one step or request: each rank's busy seconds, and the total seconds if it did not queue behind others.

        `relative_size` is its size divided by the predicted one. Ignored are steps of less than half that size, the first step
        (a warm-up), and ranks that report no time.
        """
        if relative_size < 0.5:
            return
        if self._skip_next:
            self._skip_next = False
            return
        for device, seconds in zip(self._plan.devices, compute_seconds, strict=True):
            self._devices[device.device_id].add(seconds, device.compute_seconds * relative_size)
        self._compute_drifted = self._compute_drifted + 1 if self._has_compute_drifted() else 0
        if total_seconds is not None:
            self._total.add(total_seconds, self._plan.predicted.latency_seconds * relative_size)
            has_drifted = abs(self._total.average_change) > math.log(TOTAL_DRIFT)
            self._total_drifted = self._total_drifted + 1 if has_drifted else 0
        self.drift = self._sustained_drift()

    def _has_compute_drifted(self) -> bool:
        """Whether any device changed in absolute terms or relative to the others; both unbalance the plan."""
        changes = [ratio.average_change for ratio in self._devices.values()]
        for rank, change in enumerate(changes):
            others = changes[:rank] + changes[rank + 1 :]
            against_others = change - median(others) if others else 0.0
            if max(abs(change), abs(against_others)) > math.log(COMPUTE_DRIFT):
                return True
        return False

    def _sustained_drift(self) -> SustainedDrift | None:
        if self._compute_drifted >= SUSTAINED_STEPS:
            factors = {name: math.exp(ratio.recent_median) for name, ratio in self._devices.items()}
            return SustainedDrift(factors=factors)
        # A beginning compute drift may explain the drift of the whole step.
        if self._total_drifted >= SUSTAINED_STEPS and not self._compute_drifted and self._plan.num_ranks > 1:
            return SustainedDrift(links_suspect=True)
        return None


class _Change:
    """log(measured / predicted) relative to its baseline."""

    def __init__(self) -> None:
        self._average = SpeedRatio.steady(_WINDOW)
        self._baseline: list[float] = []
        self._recent: deque[float] = deque(maxlen=SUSTAINED_STEPS)

    @property
    def average_change(self) -> float:
        """The moving average, in which a single outlier stays below every threshold."""
        return self._average.value

    @property
    def recent_median(self) -> float:
        """The median change of the latest steps; unlike `average_change` it does not lag behind a jump."""
        return median(self._recent) if self._recent else 0.0

    def add(self, measured_seconds: float, predicted_seconds: float) -> None:
        if measured_seconds <= 0 or predicted_seconds <= 0:
            return
        ratio = math.log(measured_seconds / predicted_seconds)
        if len(self._baseline) < BASELINE_STEPS:
            self._baseline.append(ratio)
            return
        change = ratio - median(self._baseline)
        self._recent.append(change)
        self._average.add(math.exp(change), window=_WINDOW)


# ---- when to plan again ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplanReasons:
    """Why a new plan should be made now."""

    joined: frozenset[str] = frozenset()  # device ids that the newest plan did not consider
    drift: SustainedDrift | None = None
    measured: frozenset[str] = frozenset()  # device ids whose provisional profile or link has been measured


class ReplanTrigger:
    """Decides when to plan again in the background. One per served model; it outlives deployments."""

    def __init__(self) -> None:
        self._last_replan = -math.inf
        self._considered: set[str] = set()  # devices that the newest plan considered
        self._usable_since: dict[str, float] = {}  # other usable devices, and since when they are usable
        self._losses: dict[str, list[float]] = {}
        self._measured: set[str] = set()  # since the last plan

    def record_plan(
        self, device_ids: Collection[str], now: float, slow: Collection[str] = (), unlinked: Collection[str] = ()
    ) -> None:
        """Record that a plan was made from these devices.

        `slow`: those it left out because they had become slow; `unlinked`: because they did not reach all others. The latter
        may join as soon as they do.
        """
        self._considered = set(device_ids) - set(slow) - set(unlinked)
        self._usable_since = dict.fromkeys(unlinked, now) | dict.fromkeys(slow, now + REMEASURE_SLOW_SECONDS)

    def record_measured(self, device_ids: Collection[str]) -> None:
        """Record that devices were measured for which plans were made provisionally."""
        self._measured |= set(device_ids)

    def record_loss(self, device_id: str, now: float) -> None:
        """Record the loss of a device that was in use."""
        recent = [lost_at for lost_at in self._losses.get(device_id, []) if now - lost_at < RECENT_LOSS_SECONDS]
        self._losses[device_id] = [*recent, now]

    def reasons_to_replan(
        self, usable: Collection[str], drift: SustainedDrift | None, now: float
    ) -> ReplanReasons | None:
        """The reasons to plan again now, or None. An answer other than None starts the pause of `REPLAN_SECONDS`."""
        self._considered &= set(usable)  # a device that leaves and returns counts as new
        self._usable_since = {
            name: self._usable_since.get(name, now) for name in usable if name not in self._considered
        }
        since = self._usable_since
        joined = frozenset(each for each in since if now - since[each] >= self._required_presence_seconds(each, now))
        if now - self._last_replan < REPLAN_SECONDS or not (joined or drift or self._measured):
            return None
        self._last_replan = now
        measured, self._measured = frozenset(self._measured), set()
        return ReplanReasons(joined, drift, measured)

    def _required_presence_seconds(self, device_id: str, now: float) -> float:
        losses = sum(now - lost_at < RECENT_LOSS_SECONDS for lost_at in self._losses.get(device_id, ()))
        return min(MIN_PRESENCE_SECONDS * 2.0 ** max(losses - 1, 0), MAX_PRESENCE_SECONDS)


def describe_reasons(reasons: ReplanReasons, names: Mapping[str, str]) -> str:
    """The reasons as text. `names`: device names by id."""
    parts = [f"{names.get(device_id, device_id)} can join" for device_id in sorted(reasons.joined)]
    if reasons.measured:
        parts.append(f"{', '.join(sorted(names.get(each, each) for each in reasons.measured))}: measured")
    if reasons.drift is not None:
        if reasons.drift.links_suspect:
            parts.append("the links have changed")
        for device_id, factor in reasons.drift.factors.items():
            if not 1 / _MIN_REPORTED_FACTOR < factor < _MIN_REPORTED_FACTOR:
                parts.append(f"{names.get(device_id, device_id)} takes {factor:.2f}x its time")
    return ", ".join(parts) or "the relative speeds of the devices have changed"


def is_clearly_faster(new_seconds: float, old_seconds: float) -> bool:
    """Whether the new plan is faster by at least `MIN_PREDICTED_GAIN`. Both times must be priced under the same profile."""
    return new_seconds <= (1 - MIN_PREDICTED_GAIN) * old_seconds
