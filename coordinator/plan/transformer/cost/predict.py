"""Prices a plan: simulates the task graph of one step, and gives its time, its busy devices and its timeline. Pure."""

from __future__ import annotations

from coordinator.plan.simulator import Resource, ResourceKind, simulate
from coordinator.plan.timeline import traces_of
from coordinator.plan.transformer.cost.layout import Layout
from coordinator.plan.transformer.strategies import strategy_of
from hearth.plan.parts import Prediction
from hearth.plan.plan import TransformerPlan
from hearth.wire.messages import DeviceTrace


def predict(layout: Layout) -> tuple[Prediction, tuple[float, ...]]:
    """Price one step: the prediction, and each rank's busy seconds."""
    total, busy = strategy_of(layout.body).timing(layout)
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


def seconds_of(plan: TransformerPlan) -> float:
    """What plans are compared by: one step; of a decoder, the request that is expected of it, all its tokens.

    A prompt of another length than a step counts as so many steps, or as such a part of one.
    """
    generation = plan.body.generation
    if generation is None:
        return plan.predicted.latency_seconds
    prompt_tokens = generation.prompt_tokens or plan.body.seq_len
    return plan.predicted.latency_seconds * prompt_tokens / plan.body.seq_len + decoding_seconds(plan)


def decoding_seconds(plan: TransformerPlan) -> float:
    """Of the tokens that a decoder is expected to add to a prompt; 0 for an encoder."""
    return plan.body.generation.new_tokens * plan.predicted.decode_seconds if plan.body.generation else 0.0


def predicted_timeline(layout: Layout) -> tuple[DeviceTrace, ...]:
    """The simulated step in the form of a measured one, for `hearth.trace.chrome_trace`."""
    tasks = strategy_of(layout.body).tasks(layout)
    return traces_of(tasks, simulate(tasks), [device.name for device in layout.cluster.devices])
