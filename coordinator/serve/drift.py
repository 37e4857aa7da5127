"""When a deployed plan no longer fits its devices: they drifted, or one came. Pure: steps and `now` are arguments."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from hearth.plan.plan import Plan

BASELINE_STEPS = 5  # counted steps that say what is normal for this plan on these devices
SUSTAINED_STEPS = 5  # counted steps in a row for which a drift must last: a household is busy for seconds now and then
COMPUTE_DRIFT = 1.25  # a device this many times slower or faster than normal shifts the balance of a plan
TOTAL_DRIFT = 1.30  # as much for a whole step, which varies more: Wi-Fi
MIN_GAIN = 0.10  # a new plan must promise this share: moving costs seconds without service
REPLAN_SECONDS = 60.0  # measuring and planning disturb; never more often than this
STAY_SECONDS = 10.0  # a device that comes must stay this long before a plan counts on it ...
MAX_STAY_SECONDS = 640.0  # ... twice as long for each time that it was lost lately, up to this
LOST_LATELY_SECONDS = 3600.0
LOOK_AGAIN_SECONDS = 600.0  # after which a device that was left out as slow is measured again

_WORTH_SAYING = 1.1
_WEIGHT = 0.3  # of the newest step: a jump is believed to 88 % after six steps
_LARGEST_MOVE = math.log(2.0)  # of one step, so that a single outlier, however large, stays below every threshold


@dataclass(frozen=True)
class Finding:
    """A drift that matters. With `links_suspect`, steps drifted as a whole but no device did."""

    factors: Mapping[str, float] = field(default_factory=dict)  # by device id: how many times the seconds of before
    links_suspect: bool = False


class DriftMonitor:
    """Compares the steps (or requests) of one deployed plan with its predictions, and with its own first ones.

    Only the change of measured/predicted counts, not its level: a systematic error of the simulator is no drift.
    """

    def __init__(self, plan: Plan) -> None:
        self.finding: Finding | None = None  # what is so after the latest step
        self._plan = plan
        self._is_first = True
        self.rebase()

    def rebase(self) -> None:
        """What is measured from now on is normal."""
        self.finding = None
        self._devices = {device.device_id: _Ratio() for device in self._plan.devices}
        self._total = _Ratio()
        self._compute_drifted = self._total_drifted = 0  # counted steps in a row

    def observe(self, share: float, compute_seconds: Sequence[float], total_seconds: float | None) -> Finding | None:
        """Take one step or request: each rank's busy time, and its whole time if it did not wait for others.

        `share` is its size relative to the predicted one. Less than half of that says too little; so does the first, which
        warms up. A rank that reports no time is left out. Returns the finding while there is one.
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
        """Whether any device changed by itself, or against the others: that shifts the balance as well."""
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
        # While a compute drift is beginning, it may be what makes the whole step drift.
        if self._total_drifted >= SUSTAINED_STEPS and not self._compute_drifted and self._plan.num_ranks > 1:
            return Finding(links_suspect=True)
        return None


class _Ratio:
    """Measured/predicted of one thing as a change against its baseline, in logarithms: twice and half weigh the same."""

    def __init__(self) -> None:
        self.change = 0.0  # exponentially weighted
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=SUSTAINED_STEPS)

    @property
    def settled(self) -> float:
        """The change as the latest steps agree on it; the weighted one still comes from where it was."""
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


# ---- whether to plan anew -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reasons:
    """Why a new plan should be made now."""

    joined: frozenset[str] = frozenset()  # device ids that no plan has counted on yet
    finding: Finding | None = None


class Watch:
    """Says when to plan anew in the background. One per server: it outlives deployments."""

    def __init__(self) -> None:
        self._last_replan = -math.inf
        self._known: set[str] = set()  # devices that the newest plan could have used
        self._since: dict[str, float] = {}  # the others, and since when they have been usable
        self._losses: dict[str, list[float]] = {}

    def planned(self, device_ids: Collection[str], now: float, slow: Collection[str] = ()) -> None:
        """A plan was made from these devices. `slow` are those that it left out since they drifted."""
        self._known = set(device_ids) - set(slow)
        self._since = dict.fromkeys(slow, now + LOOK_AGAIN_SECONDS)

    def lost(self, device_id: str, now: float) -> None:
        """A device was lost while it was in use."""
        recent = [then for then in self._losses.get(device_id, []) if now - then < LOST_LATELY_SECONDS]
        self._losses[device_id] = [*recent, now]

    def due(self, usable: Collection[str], finding: Finding | None, now: float) -> Reasons | None:
        """The reasons to plan anew now, if any; the pause until the next such answer begins with it."""
        self._known &= set(usable)  # one that goes away is new again when it comes back
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
    """The reasons for people. `names` are of devices by id."""
    parts = [f"{names.get(device_id, device_id)} can join" for device_id in sorted(reasons.joined)]
    if reasons.finding is not None:
        if reasons.finding.links_suspect:
            parts.append("the links have changed")
        for device_id, factor in reasons.finding.factors.items():
            if not 1 / _WORTH_SAYING < factor < _WORTH_SAYING:
                parts.append(f"{names.get(device_id, device_id)} takes {factor:.2f}x its time")
    return ", ".join(parts) or "the devices have changed against each other"


def pays(new_seconds: float, old_seconds: float) -> bool:
    """Whether a step of the new plan is enough faster than one of the old plan, both priced under one profile."""
    return new_seconds <= (1 - MIN_GAIN) * old_seconds
