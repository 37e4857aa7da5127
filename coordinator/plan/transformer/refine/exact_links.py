"""Where a lossy wire format buys no time: those links carry activations exactly. Pure."""

from __future__ import annotations

from itertools import permutations

from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.plan.transformer.request import PlanRequest, on_subset, price
from hearth.plan.plan import TransformerPlan

_A_HAIR = 1.005  # of the step that a more exact output may cost
_SAME_RATE = 1.25  # links whose rates differ by less are decided together: it is the measurement that differs
_MOST_TRIALS = 8  # each is a simulation


def exact_where_free(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The same plan with exact activations on the fastest links, as many as the simulator says cost nothing.

    The request's cluster must hold the plan's devices. Nothing changes where the format is exact already.
    """
    if request.wire.values == "exact" or plan.num_ranks == 1:
        return plan
    ids = tuple(device.device_id for device in plan.devices)
    request = on_subset(request, ids)
    rates = {
        (a, b): request.cluster.link(ids[a], ids[b]).bytes_per_second for a, b in permutations(range(plan.num_ranks), 2)
    }
    best = plan
    for least in _classes(list(rates.values()))[:_MOST_TRIALS]:
        links = tuple(sorted(link for link, rate in rates.items() if rate >= least))
        body = plan.body.model_copy(update={"exact_links": links})
        trial = price(request, body, plan.planner, plan.alternatives)
        if seconds_of(trial) > _A_HAIR * seconds_of(plan):
            break
        best = trial
    return best


def _classes(rates: list[float]) -> list[float]:
    """The slowest rate of each class of like rates, the fastest class first."""
    least: list[float] = []
    newest = 0.0
    for rate in sorted(rates, reverse=True):
        if least and newest <= _SAME_RATE * rate:
            least[-1] = rate
        else:
            least.append(rate)
            newest = rate
    return least
