"""Prices a plan: simulates the task graph of one step, and gives its time, its busy devices and its timeline. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from coordinator.plan.simulator import Resource, ResourceKind, Task, Timeline, simulate
from coordinator.plan.transformer.cost.pipeline_graph import pipeline_tasks
from coordinator.plan.transformer.cost.step_graph import step_tasks
from hearth.plan.model_spec import ModelSpec
from hearth.plan.parts import Prediction, WireFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.plan.transformer import LayerMode, Pipeline, TransformerBody
from hearth.wire.messages import DeviceTrace, TraceEvent

# Of equal layers this many are simulated; each further one takes as long as the last of them.
_SIMULATED_LAYERS = 2
_LAYERS_TO_SETTLE = 4  # with micro-batches in flight
_LANES: Mapping[ResourceKind, Literal["compute", "send", "receive"]] = {
    ResourceKind.COMPUTE: "compute",
    ResourceKind.SEND: "send",
    ResourceKind.RECEIVE: "receive",
}


def predict(
    spec: ModelSpec, body: TransformerBody, cluster: ClusterProfile, seq_len: int, wire: WireFormat
) -> tuple[Prediction, tuple[float, ...]]:
    """Price one step: the prediction, and each rank's busy seconds.

    Runs of equal layers are cut to a few, and what the last of them takes is added for the others: the layers of a run
    differ only at its ends. A pipeline's graph has a task for each stage and chunk, and is simulated whole.
    """
    if isinstance(body, Pipeline):
        timeline = simulate(pipeline_tasks(spec, body, cluster, seq_len, wire))
        return _prediction(timeline.makespan, timeline.busy, len(cluster.devices))
    modes = [body.mode(layer) for layer in range(spec.num_layers)]
    if body.micro_batches > 1:
        return _predict_micro_batches(spec, body, cluster, seq_len, wire, modes)
    runs = [(mode, len(list(same))) for mode, same in groupby(modes)]
    shown = [mode for mode, count in runs for _ in range(min(count, _SIMULATED_LAYERS))]
    tasks, by_layer = step_tasks(spec, body, cluster, seq_len, wire, shown)
    timeline = simulate(tasks)
    total, extra, last = timeline.makespan, dict.fromkeys(timeline.busy, 0.0), -1
    for _, count in runs:
        last += min(count, _SIMULATED_LAYERS)
        repeats = count - min(count, _SIMULATED_LAYERS)
        if repeats:
            end, before = (max((timeline.ends[i] for i in by_layer[layer]), default=0.0) for layer in (last, last - 1))
            total += repeats * (end - before)
            for task in (tasks[index] for index in by_layer[last]):
                for resource in task.resources:
                    extra[resource] += repeats * task.seconds
    all_busy = {resource: seconds + extra[resource] for resource, seconds in timeline.busy.items()}
    return _prediction(total, all_busy, len(cluster.devices))


def _predict_micro_batches(
    spec: ModelSpec,
    body: TransformerBody,
    cluster: ClusterProfile,
    seq_len: int,
    wire: WireFormat,
    modes: Sequence[LayerMode],
) -> tuple[Prediction, tuple[float, ...]]:
    """An early micro-batch runs layers ahead of a late one, so that it takes a few layers until each adds as much as the
    one before; layers that differ are simulated whole."""
    shown = 2 * _LAYERS_TO_SETTLE
    if len(set(modes)) > 1 or len(modes) <= shown:
        timeline = simulate(step_tasks(spec, body, cluster, seq_len, wire, modes)[0])
        return _prediction(timeline.makespan, timeline.busy, len(cluster.devices))
    short, long = (
        simulate(step_tasks(spec, body, cluster, seq_len, wire, modes[:count])[0]) for count in (shown // 2, shown)
    )
    repeats = (len(modes) - shown) / _LAYERS_TO_SETTLE
    busy = {key: seconds + repeats * (seconds - short.busy.get(key, 0.0)) for key, seconds in long.busy.items()}
    total = long.makespan + repeats * (long.makespan - short.makespan)
    return _prediction(total, busy, len(cluster.devices))


def _prediction(total: float, busy: Mapping[Resource, float], num_ranks: int) -> tuple[Prediction, tuple[float, ...]]:
    compute = tuple(busy.get(Resource(ResourceKind.COMPUTE, rank), 0.0) for rank in range(num_ranks))
    links = (seconds for resource, seconds in busy.items() if resource.kind is not ResourceKind.COMPUTE)
    transfer = max(links, default=0.0)
    return (
        Prediction(
            latency_seconds=total,
            compute_seconds=max(compute),
            transfer_seconds=transfer,
            bottleneck_seconds=max(*compute, transfer),
        ),
        compute,
    )


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


def predicted_timeline(
    spec: ModelSpec, body: TransformerBody, cluster: ClusterProfile, seq_len: int, wire: WireFormat
) -> tuple[DeviceTrace, ...]:
    """The simulated step in the form of a measured one, for `hearth.trace.chrome_trace`."""
    tasks = _all_tasks(spec, body, cluster, seq_len, wire)
    return _as_traces(tasks, simulate(tasks), [device.name for device in cluster.devices])


def _all_tasks(
    spec: ModelSpec, body: TransformerBody, cluster: ClusterProfile, seq_len: int, wire: WireFormat
) -> list[Task]:
    if isinstance(body, Pipeline):
        return pipeline_tasks(spec, body, cluster, seq_len, wire)
    return step_tasks(spec, body, cluster, seq_len, wire)[0]


def _as_traces(tasks: Sequence[Task], timeline: Timeline, names: Sequence[str]) -> tuple[DeviceTrace, ...]:
    events: list[list[TraceEvent]] = [[] for _ in names]

    def add(task: Task, resource: Resource, peer: int | None, start: float, end: float) -> None:
        events[resource.rank].append(
            TraceEvent(
                lane=_LANES[resource.kind], kind=task.kind, layer=task.layer, tile=task.tile, peer=peer,
                start_seconds=start, end_seconds=end, num_bytes=task.num_bytes,
            )
        )  # fmt: skip

    for task, start, end in zip(tasks, timeline.starts, timeline.ends, strict=True):
        if task.resources[0].kind is ResourceKind.COMPUTE:
            add(task, task.resources[0], task.peer, start, end)
        else:
            sender, receiver = task.resources
            add(task, sender, receiver.rank, start, start)
            add(task, receiver, sender.rank, end, end)
    return tuple(DeviceTrace(device=name, rank=rank, events=tuple(events[rank])) for rank, name in enumerate(names))
