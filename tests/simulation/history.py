"""What happened in one simulated run, and the invariants that must hold for it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


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


@dataclass
class History:
    """Everything that the invariants need."""

    steps: list[StepComputed] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)  # faults and reports, for a failing seed


def exclusive_epochs(history: History) -> list[str]:
    """At most one plan of a deployment computes: no step of a plan begins after a step of a newer plan has ended."""
    ranks: dict[tuple[str, bytes, int, int], list[StepComputed]] = defaultdict(list)
    for step in history.steps:
        ranks[step.deployment, step.plan_token, step.epoch, step.step].append(step)
    complete = [each for each in ranks.values() if len({step.rank for step in each}) == each[0].num_ranks]
    found: list[str] = []
    newest: StepComputed | None = None  # of the newest epoch that has ended a step so far
    began = [(max(step.began for step in each), 1, each[0]) for each in complete]
    ended = [(max(step.ended for step in each), 0, each[0]) for each in complete]
    for at, is_begin, step in sorted(began + ended, key=lambda event: event[:2]):
        if not is_begin and (newest is None or step.epoch > newest.epoch):
            newest = step
        elif is_begin and newest is not None and step.epoch < newest.epoch:
            found.append(
                f"step {step.step} of epoch {step.epoch} ({step.holder}) began at {at:.3f} s, "
                f"after a step of epoch {newest.epoch} ({newest.holder}) had ended"
            )
    return found


def no_request_lost(history: History) -> list[str]:
    """Every call is answered once, correctly, or with the error that it deserves."""
    return [
        f"{answer.client}'s call {answer.number}, sent at {answer.began:.3f} s: "
        f"{answer.result or 'no answer'} {answer.detail} after {(answer.ended or 0) - answer.began:.1f} s"
        for answer in history.answers
        if answer.result != (answer.deserved or "correct")
    ]
