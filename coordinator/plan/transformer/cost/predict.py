"""Price a plan: simulate the task graph of one step, and return its time, busy seconds and timeline. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.plan.simulator import TRANSFERS, Resource, ResourceKind, simulate, simulated_traces
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.strategies import strategy_of_body
from hearth.plan.common import Prediction
from hearth.plan.plan import TransformerPlan

if TYPE_CHECKING:
    from hearth.wire.messages import DeviceTrace


def predict(layout: PlanLayout) -> tuple[Prediction, tuple[float, ...]]:
    """Price one step: the prediction, and the compute seconds of each rank."""
    total, busy = strategy_of_body(layout.body).timing(layout)
    compute = tuple(busy.get(Resource(ResourceKind.COMPUTE, rank), 0.0) for rank in layout.ranks)
    links = (seconds for resource, seconds in busy.items() if resource.kind in TRANSFERS)
    transfer = max(links, default=0.0)
    prediction = Prediction(
        latency_seconds=total,
        compute_seconds=max(compute),
        transfer_seconds=transfer,
        bottleneck_seconds=max(*compute, transfer),
    )
    return prediction, compute


def prompt_seconds(layout: PlanLayout, step_seconds: float) -> float:
    """Seconds to prefill the expected prompt of a decoder; `step_seconds` is the time of its first step.

    Each step attends to the rows of the steps before it, so their times grow about linearly from the first to the last.
    """
    rows, limits = layout.body.seq_len, layout.body.generation
    num_tokens = (limits.prompt_tokens if limits else 0) or rows
    if num_tokens > rows:
        last_seconds, _ = strategy_of_body(layout.body).timing(layout, num_tokens - rows)
        step_seconds = (step_seconds + last_seconds) / 2
    return step_seconds * num_tokens / rows


def request_seconds(plan: TransformerPlan) -> float:
    """The seconds by which plans are compared: one step, or, for a decoder, a whole request of the expected length."""
    generation, predicted = plan.body.generation, plan.predicted
    if generation is None:
        return predicted.latency_seconds
    # A plan of an earlier version has no time of the prompt: then a multiple of its first step.
    scaled = predicted.latency_seconds * (generation.prompt_tokens or plan.body.seq_len) / plan.body.seq_len
    return (predicted.prompt_seconds or scaled) + decoding_seconds(plan)


def decoding_seconds(plan: TransformerPlan) -> float:
    """Seconds to decode the tokens of the expected answer; 0 for an encoder."""
    return plan.body.generation.new_tokens * plan.predicted.decode_seconds if plan.body.generation else 0.0


def predicted_step_timeline(layout: PlanLayout) -> tuple[DeviceTrace, ...]:
    """The simulated step in the form of a measured trace, for `hearth.trace.chrome_trace`."""
    tasks = strategy_of_body(layout.body).tasks(layout)
    return simulated_traces(tasks, simulate(tasks), [device.name for device in layout.cluster.devices])
