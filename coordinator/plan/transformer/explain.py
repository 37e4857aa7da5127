"""Explain in words why a plan was chosen and why every other candidate lost. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coordinator.plan.solution import Candidate, PlanningResult
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.cost.predict import decoding_seconds
from coordinator.plan.transformer.strategies import strategy_of_body
from hearth.plan.common import VALUE_FORMAT_NAMES
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.platform.units import format_seconds

TransformerCandidate = Candidate[TransformerPlan]


@dataclass(frozen=True)
class Bottleneck:
    """Where the time of a step, or of a decoder's expected request, is spent. Durations in seconds."""

    device: str  # the busiest device
    device_seconds: float
    link: str  # the slowest link between neighbours of the ring; empty on one device
    link_seconds: float
    waiting_seconds: float  # the remaining time: round trips, and devices that wait for each other
    decoding_seconds: float = 0.0  # decoding of the expected request; the other fields cover a step (its prefill)

    @property
    def sentence(self) -> str:
        if self.decoding_seconds > self.device_seconds + self.link_seconds + self.waiting_seconds:
            return "decoding, token by token"
        if self.device_seconds >= max(self.link_seconds, self.waiting_seconds):
            return f"the compute of {self.device}"
        if self.link_seconds >= self.waiting_seconds:
            return f"the link {self.link}"
        return "waits between devices"


def plan_title(plan: TransformerPlan) -> str:
    """`hmp on attic, kitchen`."""
    return f"{plan.body.title} on {', '.join(device.name for device in plan.devices)}"


def best_of_each_strategy(planned: PlanningResult[TransformerPlan]) -> list[TransformerPlan]:
    """The chosen plan, then the fastest plan of each other strategy that fits; with replication counts as another one."""
    plans: dict[tuple[str, bool], TransformerPlan] = {}
    for each in planned.candidates:
        if each.plan is not None:
            plans.setdefault((each.plan.body.strategy, bool(each.plan.body.modes)), each.plan)
    return list(plans.values())


# ---- in words -------------------------------------------------------------------------------------------------------


def bottleneck(plan: TransformerPlan, cluster: ClusterProfile) -> Bottleneck:
    """The bottleneck of a plan that was priced with this cluster."""
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
    """The slowest link of the ring. All neighbours send about the same bytes, so the slowest link is the busiest."""
    if plan.num_ranks == 1:
        return ""
    ring = [(device, plan.devices[(rank + 1) % plan.num_ranks]) for rank, device in enumerate(plan.devices)]
    source, target = min(ring, key=lambda ends: cluster.link(ends[0].device_id, ends[1].device_id).bytes_per_second)
    return f"{source.name} → {target.name}"


def seconds_unit(plan: TransformerPlan) -> str:
    """The unit of `request_seconds`: `a step`, or `for 512 tokens of prompt and 128 of answer`."""
    generation = plan.body.generation
    if generation is None:
        return "a step"
    return f"for {generation.prompt_tokens or plan.body.seq_len} tokens of prompt and {generation.new_tokens} of answer"


def decoding_rate(plan: TransformerPlan) -> str:
    """Decoding rate of one sequence, as in `12.3 tokens/s`; empty if there is no prediction."""
    seconds = plan.predicted.decode_seconds
    return f"{1 / seconds:.3g} tokens/s" if seconds else ""


def rates_by_format(plan: TransformerPlan, cluster: ClusterProfile, num_cached_tokens: float) -> str:
    """Predicted decoding rates of a plan on several devices with each value format on its links; empty if it has no links.

    So one sees what an accuracy budget can gain: `decoding by value format: exact 9.1 tokens/s, bf16 11.8 tokens/s, ...`.
    """
    if plan.num_ranks == 1 or plan.body.generation is None:
        return ""
    used = cluster.subset(tuple(device.device_id for device in plan.devices))
    rates = []
    for values in VALUE_FORMAT_NAMES:
        layout = PlanLayout(plan.model, plan.body, used, plan.wire.model_copy(update={"values": values}))
        rates.append(
            f"{values} {1 / strategy_of_body(plan.body).decode_seconds(layout, num_cached_tokens):.3g} tokens/s"
        )
    return f"decoding by value format: {', '.join(rates)}"


def why_lost(candidate: TransformerCandidate, cluster: ClusterProfile) -> str:
    """Why a candidate lost, as in `slower by 1.35x, bound by the compute of attic`."""
    if candidate.plan is None:
        return candidate.reason
    return f"{candidate.reason}, bound by {bottleneck(candidate.plan, cluster).sentence}"


def candidate_as_json(candidate: TransformerCandidate, cluster: ClusterProfile) -> dict[str, Any]:
    """One candidate, for `--json`."""
    bound = bottleneck(candidate.plan, cluster) if candidate.plan else None
    return {
        "label": candidate.label,
        "strategy": candidate.strategy,
        "devices": list(candidate.devices),
        "predicted_seconds": candidate.seconds if candidate.plan else None,
        "busiest_device": bound.device if bound else None,
        "busiest_device_seconds": bound.device_seconds if bound else None,
        "busiest_link": (bound.link or None) if bound else None,
        "busiest_link_seconds": bound.link_seconds if bound else None,
        "decoding_seconds": bound.decoding_seconds if bound else None,
        "missing_bytes": candidate.missing_bytes,
        "why_not": why_lost(candidate, cluster) if candidate.reason else None,
    }


def why_won(planned: PlanningResult[TransformerPlan], cluster: ClusterProfile, requested: str) -> str:
    """One or two sentences about the chosen plan."""
    chosen, plan = planned.chosen, planned.plan
    others = [each for each in planned.others if each.plan is not None]
    bound = f"It is bound by {bottleneck(plan, cluster).sentence}."
    takes = f"{plan_title(plan)} takes {format_seconds(chosen.seconds)} {seconds_unit(plan)}"
    if requested != "auto":
        return f"{takes}. {requested} was asked for. {bound}"
    if not others:
        return f"{takes}. Nothing else fits. {bound}"
    comparison = "the fastest" if chosen.seconds <= others[0].seconds else "within a few percent of the fastest"
    text = f"{takes}, {comparison} of the {len(others) + 1} plans that fit. {bound}"
    alone = min((each.seconds for each in others if each.num_devices == 1), default=None)
    shared = [each for each in others if each.num_devices > 1]
    if chosen.num_devices > 1 and alone is not None:
        text += f" The fastest device alone would take {alone / chosen.seconds:.2f}x as long."
    elif chosen.num_devices > 1:
        text += " No device could hold the model alone."
    elif shared and shared[0].plan is not None:
        factor = shared[0].seconds / chosen.seconds
        text += f" The fastest on several devices, {plan_title(shared[0].plan)}, would take {factor:.2f}x as long."
    return text
