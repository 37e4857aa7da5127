"""Send activations exactly on links where a lossy wire format saves no time. Pure."""

from __future__ import annotations

from itertools import permutations

from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.request import PlanRequest, build_plan, on_subset
from hearth.plan.plan import TransformerPlan

_MAX_TIME_RATIO = 1.005  # a more exact output may cost 0.5 % of the time, which no user notices
# Links with rates within this ratio are decided together: the difference is measurement noise.
_SIMILAR_RATE_RATIO = 1.25
_MAX_TRIALS = 8  # sets of links tried; each is a simulation, and homes have few classes of links


def add_exact_links(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The same plan with exact activations on the fastest links, as many as cost no time according to the simulator.

    The request's cluster must contain the plan's devices. A plan whose format is exact already is returned as it is.
    """
    if request.wire.values == "exact" or plan.num_ranks == 1:
        return plan
    ids = tuple(device.device_id for device in plan.devices)
    request = on_subset(request, ids)
    rates = {
        (a, b): request.cluster.link(ids[a], ids[b]).bytes_per_second for a, b in permutations(range(plan.num_ranks), 2)
    }
    best = plan
    for min_rate in _rate_classes(list(rates.values()))[:_MAX_TRIALS]:
        links = tuple(sorted(link for link, rate in rates.items() if rate >= min_rate))
        body = plan.body.model_copy(update={"exact_links": links})
        trial = build_plan(request, body, plan.planner, plan.alternatives)
        if request_seconds(trial) > _MAX_TIME_RATIO * request_seconds(plan):
            break
        best = trial
    return best


def _rate_classes(rates: list[float]) -> list[float]:
    """The slowest rate of each class of similar rates, the fastest class first."""
    slowest: list[float] = []
    class_rate = 0.0
    for rate in sorted(rates, reverse=True):
        if slowest and class_rate <= _SIMILAR_RATE_RATIO * rate:
            slowest[-1] = rate
        else:
            slowest.append(rate)
            class_rate = rate
    return slowest
