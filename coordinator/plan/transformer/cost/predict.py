"""Price a plan: simulate the task graph of one step, and return its time, busy seconds and timeline. Pure."""

from __future__ import annotations

from coordinator.plan.simulator import Resource, ResourceKind, simulate
from coordinator.plan.timeline import simulated_traces
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.strategies import strategy_of_body
from hearth.plan.parts import Prediction
from hearth.plan.plan import TransformerPlan
from hearth.wire.messages import DeviceTrace


def predict(layout: PlanLayout) -> tuple[Prediction, tuple[float, ...]]:
    """Price one step: the prediction, and the compute seconds of each rank."""
    total, busy = strategy_of_body(layout.body).timing(layout)
    compute = tuple(busy.get(Resource(ResourceKind.COMPUTE, rank), 0.0) for rank in layout.ranks)
    links = (seconds for resource, seconds in busy.items() if resource.kind is not ResourceKind.COMPUTE)
    transfer = max(links, default=0.0)
    prediction = Prediction(
        latency_seconds=total,
        compute_seconds=max(compute),
        transfer_seconds=transfer,
        bottleneck_seconds=max(*compute, transfer),
    )
    return prediction, compute


def request_seconds(plan: TransformerPlan) -> float:
    """The seconds by which plans are compared: one step, or, for a decoder, a whole request of the expected length.

    The time for a prompt is that of a step, scaled by the prompt's length.
    """
    generation = plan.body.generation
    if generation is None:
        return plan.predicted.latency_seconds
    prompt_tokens = generation.prompt_tokens or plan.body.seq_len
    return plan.predicted.latency_seconds * prompt_tokens / plan.body.seq_len + decoding_seconds(plan)


def decoding_seconds(plan: TransformerPlan) -> float:
    """Seconds to decode the tokens of the expected answer; 0 for an encoder."""
    return plan.body.generation.new_tokens * plan.predicted.decode_seconds if plan.body.generation else 0.0


def predicted_step_timeline(layout: PlanLayout) -> tuple[DeviceTrace, ...]:
    """The simulated step in the form of a measured trace, for `hearth.trace.chrome_trace`."""
    tasks = strategy_of_body(layout.body).tasks(layout)
    return simulated_traces(tasks, simulate(tasks), [device.name for device in layout.cluster.devices])
