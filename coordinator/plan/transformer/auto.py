"""The best strategy under the simulator, including "one device is faster", with the reason each other one lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.plan.transformer.planners.exact import ExactPlanner
from coordinator.plan.transformer.planners.pipeline import PipelinePlanner
from coordinator.plan.transformer.refine.micro_batches import in_micro_batches
from coordinator.plan.transformer.refine.replicate import replicate, rough_seconds
from coordinator.plan.transformer.request import PlanRequest, missing_bytes, on_subset, price
from coordinator.plan.transformer.ring import best_ring
from coordinator.plan.transformer.shares import body_of, capacity, row_capacity
from hearth.errors import BadPlan, BadSetting, ModelDoesNotFit
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, largest_remainder, num_grains
from hearth.plan.parts import Alternative
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import ShareStrategy, Strategy, TransformerBody
from hearth.platform.units import format_bytes

_SHARING: tuple[Strategy, ...] = ("hmp", "sp", "megatron-tp")
_MAX_LEAVE_ONE_OUT = 6
_STEP = 1.35
_A_HAIR = 1.04  # one more device is one more that can fail, and predictions are off by more than that
_MICRO_BATCH_FROM = 2
_REPLICATE_FROM = 2  # plans; each costs some twenty simulations


class AutoPlanner:
    """Tries `local` on every device, every other strategy on the fastest two, three, ... devices, and a pipeline on the
    devices that suit it best."""

    name = "auto"

    def plan(self, request: PlanRequest) -> TransformerPlan:
        plans: list[tuple[str, TransformerPlan]] = []
        failures: list[tuple[str, ModelDoesNotFit]] = []
        for label, make in _candidates(request):
            try:
                plans.append((label, make()))
            except ModelDoesNotFit as error:
                failures.append((label, error))
        if not plans:
            least = min(failures, key=lambda failure: failure[1].missing_bytes)
            raise least[1]
        plans += self._replicating(request, plans)
        plans += self._in_micro_batches(request, plans)
        best_label, best = _choose(plans)
        lost = [
            Alternative(
                strategy=label,
                predicted_seconds=seconds_of(plan),
                reason=_slower(seconds_of(plan), seconds_of(best)),
            )
            for label, plan in sorted(plans, key=lambda plan: seconds_of(plan[1]))
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
        if len(request.cluster.devices) > 1 and not request.attention_by_rows:
            lost.append(Alternative(strategy="sp", predicted_seconds=None, reason=request.why_not_by_rows))
        planner = f"{self.name}: {best.planner}"
        return best.model_copy(update={"planner": planner, "alternatives": tuple(lost)})

    def _replicating(
        self, request: PlanRequest, plans: list[tuple[str, TransformerPlan]]
    ) -> list[tuple[str, TransformerPlan]]:
        """The most promising `hmp` plans, with spare memory spent on less traffic.

        With that, more devices pay than without: what is slower sharded may be the fastest in the end.
        """
        subsets = [
            (on_subset(request, tuple(device.device_id for device in plan.devices)), plan)
            for _, plan in plans
            if plan.body.strategy == "hmp"
        ]
        found = []
        for subset, plan in sorted(subsets, key=lambda each: rough_seconds(*each))[:_REPLICATE_FROM]:
            better = replicate(subset, plan)
            if better is not plan:
                found.append((f"hmp replicating on {len(plan.devices)} devices", better))
        return found

    def _in_micro_batches(
        self, request: PlanRequest, plans: list[tuple[str, TransformerPlan]]
    ) -> list[tuple[str, TransformerPlan]]:
        """The most promising tensor-parallel plans, with a decoder's prompt in several parts at once."""
        sharing = [each for each in plans if each[1].num_ranks > 1 and each[1].body.strategy in ("hmp", "megatron-tp")]
        parallel = sorted(sharing, key=lambda each: seconds_of(each[1]))
        found = []
        for label, plan in parallel[:_MICRO_BATCH_FROM]:
            better = in_micro_batches(request, plan)
            if better is not plan:
                found.append((f"{label}, {better.body.micro_batches} micro-batches", better))
        return found


def _choose(plans: list[tuple[str, TransformerPlan]]) -> tuple[str, TransformerPlan]:
    """The fastest; of those that are as fast but for a hair, the one on the fewest devices."""
    least = min(seconds_of(plan) for _, plan in plans)
    close = [found for found in plans if seconds_of(found[1]) <= _A_HAIR * least]
    return min(close, key=lambda found: (found[1].num_ranks, seconds_of(found[1])))


def _counts(num_devices: int) -> list[int]:
    """How many of the fastest devices are tried: each number of a few, and ever larger steps beyond."""
    counts = {num_devices}
    count = 2
    while count < num_devices:
        counts.add(count)
        count = max(count + 1, round(count * _STEP))
    return sorted(count for count in counts if count >= 2)


def plan_strategy(request: PlanRequest, strategy: Strategy) -> TransformerPlan:
    """The best plan of one strategy over all the request's devices (`local`: over its one device).

    `hmp` is Galaxy's: every group sharded. Raises ModelDoesNotFit, BadSetting for `sp` where a decoder rules it out.
    """
    if strategy == "pipeline":
        return PipelinePlanner().plan(request)
    request = replace(request, cluster=best_ring(request.cluster))
    if strategy in ("hmp", "megatron-tp"):
        return ExactPlanner(strategy).plan(request)
    if strategy == "local" and len(request.cluster.devices) > 1:
        raise BadPlan(reason="the strategy local takes exactly one device")
    if strategy == "sp" and not request.attention_by_rows:
        raise BadSetting(setting="--strategy", reason=f"sp {request.why_not_by_rows}")
    bodies = [_whole(request, strategy, rows) for rows in _splits(request)]
    missing = [missing_bytes(request, body) for body in bodies]
    if min(missing):
        raise ModelDoesNotFit(model=request.spec.name, missing_bytes=min(missing))
    plans = [price(request, body, "rows") for body, lacks in zip(bodies, missing, strict=True) if not lacks]
    return min(plans, key=seconds_of)


def _splits(request: PlanRequest) -> list[tuple[float, ...]]:
    """Rows in equal parts, and by speed where devices differ."""
    speeds = [row_capacity(request, device.blocks) for device in request.cluster.devices]
    equal = (1.0,) * len(speeds)
    return [equal] if max(speeds) <= 1.05 * min(speeds) else [equal, tuple(speed / sum(speeds) for speed in speeds)]


def _whole(request: PlanRequest, strategy: ShareStrategy, rows: tuple[float, ...]) -> TransformerBody:
    """All weights on one device, or (sp) everywhere; the vocabulary in equal parts.

    A decoder decodes with a share of them on every device, and caches the keys and values of it: by how fast they read.
    """
    spec, num_ranks = request.spec, len(request.cluster.devices)
    everything, evenly = [1.0, *[0.0] * (num_ranks - 1)], [1.0] * num_ranks
    if request.generation is not None:
        rates = [device.blocks.decode_seconds_per_byte for device in request.cluster.devices]
        everything = evenly = [1.0 / rate for rate in rates] if min(rates) > 0 else evenly
    body = body_of(
        request,
        strategy,
        largest_remainder(everything, spec.num_kv_heads),
        largest_remainder(everything, num_grains(spec.ffn_size, COLUMN_GRAIN)),
        largest_remainder(evenly, num_grains(spec.vocab_size, VOCABULARY_GRAIN)),
        rows,
    )
    return body.model_copy(update={"overlap": strategy != "sp"})


def _candidates(request: PlanRequest) -> Iterator[tuple[str, Callable[[], TransformerPlan]]]:
    """What is worth pricing: a label, and how to plan it."""
    devices = request.cluster.devices
    for device in devices:
        alone = on_subset(request, (device.device_id,))
        yield f"local on {device.name}", partial(plan_strategy, alone, "local")
    fastest = sorted(devices, key=lambda device: -capacity(request, device.blocks))
    for count in _counts(len(devices)):
        chosen = {device.device_id for device in fastest[:count]}
        subset = on_subset(request, tuple(d.device_id for d in devices if d.device_id in chosen))
        where = f"on {count} devices" if count < len(devices) else f"on all {count} devices"
        for strategy in _SHARING:
            if strategy == "sp" and not request.attention_by_rows:
                continue
            yield f"{strategy} {where}", partial(plan_strategy, subset, strategy)
        if count <= request.spec.num_layers:
            yield f"pipeline {where}", partial(PipelinePlanner().on_some, request, count)
    if 2 < len(devices) <= _MAX_LEAVE_ONE_OUT:  # the slow link may belong to a fast device
        for left_out in devices:
            rest = on_subset(request, tuple(d.device_id for d in devices if d is not left_out))
            if left_out is not fastest[-1]:
                yield f"hmp without {left_out.name}", partial(plan_strategy, rest, "hmp")


def _slower(seconds: float, best_seconds: float) -> str:
    return (
        f"slower by {seconds / best_seconds:.2f}x"
        if seconds > best_seconds
        else "no faster worth mentioning, on more devices"
    )
