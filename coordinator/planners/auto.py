"""The best strategy under the simulator, including "one device is faster", with the reason each other one lost."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.planners.base import PlanRequest, missing_bytes, price
from coordinator.planners.galaxy import GalaxyPlanner, capacity, on_subset
from hearth.errors import BadPlan, ModelDoesNotFit
from hearth.geometry import VOCABULARY_GRAIN, grains_to_items, largest_remainder, num_grains
from hearth.plan import Alternative, Plan, Strategy, TransformerPlan
from hearth.units import format_bytes


class AutoPlanner:
    """Tries `local` on every device, and every other strategy on the fastest two, three, ... devices."""

    name = "auto"

    def plan(self, request: PlanRequest) -> Plan:
        plans: list[tuple[str, Plan]] = []
        failures: list[tuple[str, ModelDoesNotFit]] = []
        for label, candidate, strategy in _candidates(request):
            try:
                plans.append((label, plan_strategy(candidate, strategy)))
            except ModelDoesNotFit as error:
                failures.append((label, error))
        if not plans:
            least = min(failures, key=lambda failure: failure[1].missing_bytes)
            raise least[1]
        best_label, best = min(plans, key=lambda plan: plan[1].predicted.total_seconds)
        lost = [
            Alternative(
                strategy=label,
                predicted_seconds=plan.predicted.total_seconds,
                reason=_slower(plan.predicted.total_seconds, best.predicted.total_seconds),
            )
            for label, plan in sorted(plans, key=lambda plan: plan[1].predicted.total_seconds)
            if label != best_label
        ]
        lost += [
            Alternative(
                strategy=label,
                predicted_seconds=None,
                reason=f"does not fit: {format_bytes(error.missing_bytes)} are missing",
            )
            for label, error in failures
        ]
        return best.model_copy(update={"planner": self.name, "alternatives": tuple(lost)})


def plan_strategy(request: PlanRequest, strategy: Strategy) -> Plan:
    """A plan of one strategy over all the request's devices (`local`: over its one device)."""
    if strategy in ("hmp", "megatron-tp"):
        return GalaxyPlanner(strategy).plan(request)
    if strategy == "local" and len(request.cluster.devices) > 1:
        raise BadPlan(reason="the strategy local takes exactly one device")
    body = _even(request, strategy)
    if missing := missing_bytes(request, request.cluster, body):
        raise ModelDoesNotFit(model=request.spec.name, missing_bytes=missing)
    return price(request, request.cluster, body, "even")


def _even(request: PlanRequest, strategy: Strategy) -> TransformerPlan:
    """Everything on one device, or (sp) rows and vocabulary in equal parts and all weights everywhere."""
    spec, num_ranks = request.spec, len(request.cluster.devices)
    vocabulary = largest_remainder([1.0] * num_ranks, num_grains(spec.vocab_size, VOCABULARY_GRAIN))
    nothing = (0,) * (num_ranks - 1)
    return TransformerPlan(
        strategy=strategy,
        overlap=strategy != "sp",
        heads=(spec.num_heads, *nothing),
        columns=(spec.ffn_size, *nothing),
        row_weights=(1.0,) * num_ranks,
        vocabulary=grains_to_items(vocabulary, spec.vocab_size, VOCABULARY_GRAIN),
    )


def _candidates(request: PlanRequest) -> Iterator[tuple[str, PlanRequest, Strategy]]:
    """What is worth pricing: a label, the request on those devices, and the strategy."""
    devices = request.cluster.devices
    for device in devices:
        yield f"local on {device.name}", on_subset(request, (device.device_id,)), "local"
    fastest = sorted(devices, key=lambda device: -capacity(request.spec, device.blocks))
    for count in range(2, len(devices) + 1):
        chosen = {device.device_id for device in fastest[:count]}
        subset = on_subset(request, tuple(d.device_id for d in devices if d.device_id in chosen))
        where = f"on {count} devices" if count < len(devices) else f"on all {count} devices"
        for strategy in ("hmp", "sp", "megatron-tp"):
            yield f"{strategy} {where}", subset, strategy


def _slower(seconds: float, best_seconds: float) -> str:
    return f"slower by {seconds / best_seconds:.2f}x" if seconds > best_seconds else "as fast, but no faster"
