"""Why a plan won and every other one lost: each strategy on each number of devices, priced and put into words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.plan.transformer.cost.predict import decoding_seconds, seconds_of
from coordinator.plan.transformer.make import PlanRequest, plan_strategy
from coordinator.plan.transformer.refine.replicate import replicate
from coordinator.plan.transformer.shares import Work
from hearth.errors import ModelDoesNotFit
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.plan.transformer import STRATEGIES, Strategy
from hearth.platform.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Option:
    """One strategy on some devices: its plan, or why there is none."""

    strategy: Strategy
    devices: tuple[str, ...]  # names, in ring order
    plan: TransformerPlan | None
    missing_bytes: int = 0
    ruled_out: str = ""  # why it cannot be, where that is not for want of bytes

    @property
    def label(self) -> str:
        return f"{self.plan.body.title if self.plan else self.strategy} on {', '.join(self.devices)}"

    @property
    def seconds(self) -> float:
        return seconds_of(self.plan) if self.plan else float("inf")


@dataclass(frozen=True)
class Bottleneck:
    """What most of the time goes to: of a step, or of a decoder's expected request."""

    device: str  # the busiest one
    device_seconds: float
    link: str  # the slowest between neighbours of the ring; empty on one device
    link_seconds: float
    waiting_seconds: float  # what neither of both explains: round trips, and devices that wait for each other
    decoding_seconds: float = 0.0  # of the request that a decoder is expected to serve; its prefill is a step

    @property
    def sentence(self) -> str:
        if self.decoding_seconds > self.device_seconds + self.link_seconds + self.waiting_seconds:
            return "decoding, token by token"
        if self.device_seconds >= max(self.link_seconds, self.waiting_seconds):
            return f"the compute of {self.device}"
        if self.link_seconds >= self.waiting_seconds:
            return f"the link {self.link}"
        return "waits between devices"


def label_of(plan: TransformerPlan) -> str:
    """`hmp on attic, kitchen`."""
    return f"{plan.body.title} on {', '.join(device.name for device in plan.devices)}"


def options(request: PlanRequest, chosen: TransformerPlan) -> list[Option]:
    """The chosen plan first, then every other strategy and number of devices, the fastest first.

    Several devices are always the fastest ones for this model, which share in the plan's ring order.
    """
    ids = tuple(device.device_id for device in chosen.devices)
    found: dict[tuple[str, tuple[str, ...]], Option] = {}
    for strategy, members in _candidates(request):
        candidate = replace(request, strategy=strategy, cluster=request.cluster.subset(members))
        option = _price(candidate, strategy)
        planned = tuple(device.device_id for device in option.plan.devices) if option.plan else members
        found.setdefault((strategy, planned), option)
        if option.plan is not None and strategy == "hmp":
            better = replicate(replace(request, cluster=request.cluster.subset(planned)), option.plan)
            if better is not option.plan:
                found.setdefault((better.body.title, planned), replace(option, plan=better))
    found.pop((chosen.body.title, ids), None)
    others = sorted(found.values(), key=lambda option: (option.seconds, option.missing_bytes))
    return [Option(chosen.body.strategy, tuple(device.name for device in chosen.devices), chosen), *others]


def best_of_each_strategy(priced: Sequence[Option]) -> list[TransformerPlan]:
    """The chosen plan (the first), then the fastest of each other strategy that fits; replicating counts as one more."""
    plans: dict[tuple[str, bool], TransformerPlan] = {}
    for option in priced:
        if option.plan is not None:
            plans.setdefault((option.strategy, bool(option.plan.body.modes)), option.plan)
    return list(plans.values())


def _candidates(request: PlanRequest) -> Iterator[tuple[Strategy, tuple[str, ...]]]:
    devices, work = request.cluster.devices, Work(request)
    for device in devices:
        yield "local", (device.device_id,)
    fastest = sorted(devices, key=lambda device: work.layer(device.blocks))
    for count in range(2, len(devices) + 1):
        chosen = {device.device_id for device in fastest[:count]}
        for strategy in STRATEGIES:
            if strategy != "local":
                yield strategy, tuple(device.device_id for device in devices if device.device_id in chosen)


def _price(request: PlanRequest, strategy: Strategy) -> Option:
    names = tuple(device.name for device in request.cluster.devices)
    if strategy == "sp" and not request.attention_by_rows:
        return Option(strategy, names, None, ruled_out=request.why_not_by_rows)
    try:
        plan = plan_strategy(request, strategy)
    except ModelDoesNotFit as error:
        return Option(strategy, names, None, error.missing_bytes)
    return Option(strategy, tuple(device.name for device in plan.devices), plan)


# ---- in words -------------------------------------------------------------------------------------------------------


def bottleneck(plan: TransformerPlan, cluster: ClusterProfile) -> Bottleneck:
    """What bounds a plan that was priced under this cluster."""
    busiest = max(plan.devices, key=lambda device: device.compute_seconds)
    compute, link_seconds = busiest.compute_seconds, plan.predicted.transfer_seconds
    return Bottleneck(
        device=busiest.name,
        device_seconds=compute,
        link=_slowest_link(plan, cluster),
        link_seconds=link_seconds,
        waiting_seconds=max(plan.predicted.latency_seconds - compute - link_seconds, 0.0),
        decoding_seconds=decoding_seconds(plan),
    )


def _slowest_link(plan: TransformerPlan, cluster: ClusterProfile) -> str:
    """Neighbours of a ring send the same bytes, so that the slowest link is the busiest."""
    if plan.num_ranks == 1:
        return ""
    ring = [(device, plan.devices[(rank + 1) % plan.num_ranks]) for rank, device in enumerate(plan.devices)]
    source, target = min(ring, key=lambda ends: cluster.link(ends[0].device_id, ends[1].device_id).bytes_per_second)
    return f"{source.name} → {target.name}"


def unit_of(plan: TransformerPlan) -> str:
    """What `seconds_of` is the time of: `a step`, or `for 512 tokens of prompt and 128 of answer`."""
    generation = plan.body.generation
    if generation is None:
        return "a step"
    return f"for {generation.prompt_tokens or plan.body.seq_len} tokens of prompt and {generation.new_tokens} of answer"


def decoding_rate(plan: TransformerPlan) -> str:
    """`12.3 tokens/s` of one sequence; empty where nothing is predicted."""
    seconds = plan.predicted.decode_seconds
    return f"{1 / seconds:.3g} tokens/s" if seconds else ""


def why_lost(option: Option, chosen: TransformerPlan, cluster: ClusterProfile, asked_for: str) -> str:
    """`1.35x slower: compute of attic`. `asked_for` is the strategy that the user named, or auto."""
    if option.plan is None and option.ruled_out:
        return option.ruled_out
    if option.plan is None:
        return f"does not fit: {format_bytes(option.missing_bytes)} missing"
    if not seconds_of(chosen):
        return "no faster"
    ratio = option.seconds / seconds_of(chosen)
    if ratio < 1:
        return f"{1 / ratio:.2f}x faster, but {asked_for} was asked for" if asked_for != "auto" else "as fast"
    bound = bottleneck(option.plan, cluster).sentence
    return f"{ratio:.2f}x slower, bound by {bound}" if ratio >= 1.005 else f"as fast, bound by {bound}"


def option_as_json(option: Option, chosen: TransformerPlan, cluster: ClusterProfile, asked_for: str) -> dict[str, Any]:
    """One option for programs."""
    bound = bottleneck(option.plan, cluster) if option.plan else None
    return {
        "strategy": option.strategy,
        "devices": list(option.devices),
        "predicted_seconds": option.seconds if option.plan else None,
        "busiest_device": bound.device if bound else None,
        "busiest_device_seconds": bound.device_seconds if bound else None,
        "busiest_link": (bound.link or None) if bound else None,
        "busiest_link_seconds": bound.link_seconds if bound else None,
        "decoding_seconds": bound.decoding_seconds if bound else None,
        "missing_bytes": option.missing_bytes,
        "why_not": None if option.plan is chosen else why_lost(option, chosen, cluster, asked_for),
    }


def why_won(priced: Sequence[Option], cluster: ClusterProfile, asked_for: str) -> str:
    """One or two sentences about the chosen plan, which comes first."""
    chosen, others = priced[0], [option for option in priced[1:] if option.plan is not None]
    assert chosen.plan is not None
    bound = f"It is bound by {bottleneck(chosen.plan, cluster).sentence}."
    takes = f"takes {format_seconds(chosen.seconds)} {unit_of(chosen.plan)}"
    if asked_for != "auto":
        return f"{chosen.label} {takes}. {asked_for} was asked for. {bound}"
    if not others:
        return f"{chosen.label} {takes}. Nothing else fits. {bound}"
    text = f"{chosen.label} {takes}, the least of the {len(others) + 1} plans that fit. {bound}"
    alone = min((option.seconds for option in others if option.strategy == "local"), default=None)
    if chosen.strategy != "local" and alone is not None:
        text += f" The fastest device alone would take {alone / chosen.seconds:.2f}x as long."
    elif chosen.strategy != "local":
        text += " No device could hold the model alone."
    elif shared := [option for option in others if option.strategy != "local"]:
        text += f" Sharing, by {shared[0].label}, would take {shared[0].seconds / chosen.seconds:.2f}x as long."
    return text
