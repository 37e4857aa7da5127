"""What happened in one simulated run, and the invariants that must hold for it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise


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
    """At most one plan of a deployment computes at any time: an epoch that has computed is never followed by an older one."""
    found = []
    complete: dict[tuple[str, bytes, int, int], list[StepComputed]] = defaultdict(list)
    for step in history.steps:
        complete[step.deployment, step.plan_token, step.epoch, step.step].append(step)
    spans = sorted(
        (max(each.ended for each in ranks), min(each.began for each in ranks), epoch, step, ranks[0].holder)
        for (_, _, epoch, step), ranks in complete.items()
        if len({each.rank for each in ranks}) == ranks[0].num_ranks
    )
    for (ended, _, epoch, step, holder), (later, began, next_epoch, next_step, next_holder) in pairwise(spans):
        if next_epoch < epoch:
            found.append(
                f"step {next_step} of epoch {next_epoch} ({next_holder}) ended at {later:.3f} s, after step {step} of "
                f"epoch {epoch} ({holder}) at {ended:.3f} s"
            )
        elif (next_epoch, next_holder) != (epoch, holder) and began < ended:
            found.append(
                f"step {next_step} of epoch {next_epoch} ({next_holder}) began at {began:.3f} s, before step {step} of "
                f"epoch {epoch} ({holder}) ended at {ended:.3f} s"
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
