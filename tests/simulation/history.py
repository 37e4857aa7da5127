"""What happened in one simulated run, and the invariants that must hold for it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

LATE_SECONDS = 0.3  # that a call may end after its deadline: a pause of the client, and a message to close a connection
# Errors of a call whose time has passed, or would have passed before another attempt.
TEMPORARY = frozenset(("DeadlineExceeded", "Unreachable", "ConnectionLost", "NotServing", "NoCoordinator"))


@dataclass(frozen=True)
class StepComputed:
    """One rank has computed one step, with tiles of all other ranks."""

    deployment: str
    plan_token: bytes
    epoch: int
    step: int
    rank: int
    num_ranks: int
    holder: str
    began: float
    ended: float
    host: str
    leaders: tuple[str, ...]  # the holders that would have run a step at the time when this one began


@dataclass
class Answer:
    """A client's call: what it sent and what came back. `ended` is None while it waits."""

    client: str
    number: int
    began: float
    ended: float | None = None
    result: str = ""  # "correct", "wrong: ...", or the code of an error
    detail: str = ""
    deserved: str = ""  # the error that the call deserves, if any
    timeout_seconds: float = math.inf
    may_fail: bool = False  # whether the time is too short to survive faults


@dataclass
class History:
    """Everything that the invariants need."""

    steps: list[StepComputed] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    revoked_devices: dict[str, float] = field(default_factory=dict)  # by name: when the revocation was confirmed
    stale_workers: list[str] = field(default_factory=list)  # that went on although another plan was taken over
    lines: list[tuple[float, str]] = field(default_factory=list)  # faults and reports, for a failing seed


def _complete_steps(history: History) -> list[list[StepComputed]]:
    """The steps that all ranks have computed, each as the records of its ranks, in the order in which they began."""
    ranks: dict[tuple[str, bytes, int, int], list[StepComputed]] = defaultdict(list)
    for step in history.steps:
        ranks[step.deployment, step.plan_token, step.epoch, step.step].append(step)
    complete = [each for each in ranks.values() if len({step.rank for step in each}) == each[0].num_ranks]
    return sorted((sorted(each, key=lambda step: step.began) for each in complete), key=lambda each: each[-1].began)


def exclusive_epochs(history: History) -> list[str]:
    """At most one plan of a deployment computes: no step of a plan begins after a step of a newer plan has begun."""
    found: list[str] = []
    by_deployment: dict[str, StepComputed] = {}
    for ranks in _complete_steps(history):
        step = ranks[-1]
        newest = by_deployment.setdefault(step.deployment, step)
        if step.epoch > newest.epoch:
            by_deployment[step.deployment] = step
        elif step.epoch < newest.epoch:
            found.append(
                f"step {step.step} of epoch {step.epoch} ({step.holder}) began at {step.began:.3f} s, "
                f"after a step of epoch {newest.epoch} ({newest.holder}) had begun at {newest.began:.3f} s"
            )
    return found


def exclusive_leaders(history: History) -> list[str]:
    """When a step begins, no coordinator but the one that runs it would run a step."""
    return [
        f"step {first.step} of epoch {first.epoch} ({first.holder}) began at {first.began:.3f} s on {first.host}, "
        f"when {', '.join(others)} would have run a step, too"
        for first, *_ in _complete_steps(history)
        if (others := set(first.leaders) - {first.holder})
    ]


def no_request_lost(history: History) -> list[str]:
    """Every call is answered once, correctly, or with the error that it deserves."""
    return [
        f"{answer.client}'s call {answer.number}, sent at {answer.began:.3f} s: "
        f"{answer.result or 'no answer'} {answer.detail} after {(answer.ended or 0) - answer.began:.1f} s"
        for answer in history.answers
        if answer.result != (answer.deserved or "correct") and not (answer.may_fail and answer.result in TEMPORARY)
    ]


def in_time(history: History) -> list[str]:
    """Every call ends by its deadline."""
    return [
        f"{answer.client}'s call {answer.number}, sent at {answer.began:.3f} s, ended after "
        f"{answer.ended - answer.began:.2f} s with {answer.result}, and had {answer.timeout_seconds:.2f} s"
        for answer in history.answers
        if answer.ended is not None and answer.ended - answer.began > answer.timeout_seconds + LATE_SECONDS
    ]


def revoked_devices_idle(history: History) -> list[str]:
    """No step begins on a device whose key was revoked before."""
    return [
        f"step {step.step} of epoch {step.epoch} ({step.holder}) began at {step.began:.3f} s on {step.host}, whose key was "
        f"revoked at {history.revoked_devices[step.host]:.3f} s"
        for ranks in _complete_steps(history)
        for step in ranks
        if step.began > history.revoked_devices.get(step.host, math.inf)
    ]
