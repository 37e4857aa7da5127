"""Check that a schedule, or a pipeline, is valid. Shares only data types with the planners and the simulator.

Schedules: every rule pair by pair from its definition (Moirai, constraints 4a to 8), without optimisations.
"""

from __future__ import annotations

from itertools import combinations

from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stages

# Relative to the makespan: allows for sums of floats in another order.
_TOLERANCE = 1e-9


def violations(problem: PlacementProblem, schedule: Schedule) -> list[str]:
    """Descriptions of all violations; empty for a valid schedule with the stated makespan."""
    n, devices = problem.num_operators, range(problem.num_devices)
    if not len(schedule.assignment) == len(schedule.starts) == len(schedule.ends) == n:
        return ["it does not place every operator"]
    if any(device not in devices for device in schedule.assignment):
        return ["it uses a device that does not exist"]
    slack = _TOLERANCE * max(1e-30, *schedule.ends)
    found = []
    where, starts, ends = schedule.assignment, schedule.starts, schedule.ends

    for i in range(n):
        if starts[i] < -slack:
            found.append(f"{problem.operators[i]} starts before the request")
        if abs(ends[i] - starts[i] - problem.seconds[i][where[i]]) > slack:
            found.append(f"{problem.operators[i]} does not take the time that it needs on {problem.devices[where[i]]}")
    if abs(max(ends) - schedule.makespan) > slack:
        found.append(f"the makespan is {max(ends)}, not {schedule.makespan}")

    # One operator at a time on each device.
    for device in devices:
        spans = [(starts[i], ends[i], problem.operators[i]) for i in range(n) if where[i] == device]
        found += _overlaps(spans, f"on {problem.devices[device]}", slack)

    # Every input is available: computed on the same device, or sent there.
    carried = {}
    for each in schedule.transfers:
        if (each.flow, each.device) in carried:
            found.append(f"flow {each.flow} goes to {problem.devices[each.device]} twice")
        carried[each.flow, each.device] = each
    for index, flow in enumerate(problem.flows):
        for target in flow.targets:
            pair = f"{problem.operators[flow.source]} -> {problem.operators[target]}"
            if where[target] == where[flow.source]:
                ready = ends[flow.source]
            elif (index, where[target]) in carried:
                transfer = carried[index, where[target]]
                ready = transfer.end + problem.latency[transfer.source][transfer.device]
            else:
                found.append(f"{pair}: nothing is sent to {problem.devices[where[target]]}")
                continue
            if starts[target] < ready - slack:
                found.append(f"{pair}: starts at {starts[target]}, its input is there at {ready}")

    # Transfers start on the device of their tensor, not before it is computed, and take the time of their channel.
    for each in schedule.transfers:
        flow = problem.flows[each.flow]
        name = f"the transfer of {problem.operators[flow.source]} to {problem.devices[each.device]}"
        if each.source != where[flow.source]:
            found.append(f"{name} starts on the wrong device")
        if each.start < ends[flow.source] - slack:
            found.append(f"{name} starts before there is something to send")
        if abs(each.end - each.start - flow.seconds[each.source][each.device]) > slack:
            found.append(f"{name} does not take the time that its channel needs")

    if problem.congestion:
        for device in devices:
            # Ignore transfers that take no time: edges out of a virtual source.
            real = [t for t in schedule.transfers if t.end > t.start]
            sent = [(t.start, t.end, f"flow {t.flow}") for t in real if t.source == device]
            received = [(t.start, t.end, f"flow {t.flow}") for t in real if t.device == device]
            found += _overlaps(sent, f"on the way out of {problem.devices[device]}", slack)
            found += _overlaps(received, f"on the way into {problem.devices[device]}", slack)
        for number in {number for row in problem.media for crossed in row for number in crossed}:
            crossing = [
                (t.start, t.end, f"flow {t.flow}")
                for t in schedule.transfers
                if t.end > t.start and number in problem.media[t.source][t.device]
            ]
            found += _overlaps(crossing, f"on the shared medium {number}", slack)

    # Memory from the definition: the sum over a device's operators, with shared weights counted once.
    for device in devices:
        here = {i for i in range(n) if where[i] == device}
        used = sum(problem.memory_bytes[i] for i in here)
        used += sum(group.num_bytes for group in problem.shared if here.intersection(group.operators))
        if used > problem.budget_bytes[device]:
            found.append(f"{problem.devices[device]} holds {used} of {problem.budget_bytes[device]} bytes")
    return found


def check_stages(problem: PipelineProblem, stages: Stages) -> None:
    """Raise ValueError unless the stages form a pipeline: each block once, in order, each device once, within memory."""
    if [stage.first for stage in stages] != [0, *(stage.last + 1 for stage in stages[:-1])]:
        raise ValueError("the stages leave out blocks or run them twice")
    if not stages or stages[-1].last != problem.num_blocks - 1:
        raise ValueError("the last block is in no stage")
    if any(stage.last < stage.first for stage in stages):
        raise ValueError("a stage is empty")
    if len({stage.device for stage in stages}) != len(stages):
        raise ValueError("a device has two stages")
    for stage in stages:
        if problem.stage_bytes[stage.first, stage.last] > problem.memory_bytes[stage.device]:
            raise ValueError(f"blocks {stage.first} to {stage.last} do not fit on device {stage.device}")


def _overlaps(spans: list[tuple[float, float, str]], where: str, slack: float) -> list[str]:
    """Descriptions of the pairs that overlap in time."""
    return [
        f"{a} and {b} overlap {where}"
        for (start, end, a), (other_start, other_end, b) in combinations(spans, 2)
        if start < other_end - slack and other_start < end - slack
    ]
