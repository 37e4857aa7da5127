"""Kind `soak`: concurrent clients for minutes, with every third request cancelled; checks answers, memory and leftovers.

Uses the real coordinator, agents and workers on a testbed. Each request of a pool first runs alone; its answers under load
must be equal. The work that ranks did for cancelled requests is read from the facts in their debug logs
(`agent.worker.transformer.generation.facts`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agent.worker.transformer.generation.facts import FACT_PREFIX, SequenceCancelled, StepBegun
from coordinator.models.checkpoint.families import read_spec
from hearth.platform.units import format_bytes, format_seconds
from tools.bench.clients import Outcome, Request
from tools.bench.experiment import Context, Experiment
from tools.bench.findings import COUNT, Finding, at_most, equal, findings_summary, without_target
from tools.bench.homes import GenerationClients, Model, agent_names, agents, decoder_directory, hub_scenario
from tools.bench.results import Summary, Table
from tools.bench.stats import percentile
from tools.bench.watch import MemoryWatch, agent_of, resident_bytes, worker_of
from tools.testbed import Testbed

CONTEXT = 384  # tokens per sequence: more than the longest request
MAX_PROMPT, MAX_TOKENS = 200, 150  # of a request; together less than CONTEXT, and long enough to cancel midway
# Target: largest growth of a process's memory over the soak. Allows for slack of its allocator.
MOST_LEFT_BYTES = 16 << 20
_POOL = 32  # different requests: each is repeated several times under load
_SEED = 20240229  # arbitrary; fixed, so that the requests can be repeated
_SETTLE_SECONDS = 30.0  # most time to wait for memory to settle; after it, memory counts as kept
_SETTLE_STEP_SECONDS = 2.0  # between two samples: long enough for a process to return freed memory
_SETTLED_BYTES = 1 << 20  # a process that shrinks by less between two looks has settled
_FACT: TypeAdapter[StepBegun | SequenceCancelled] = TypeAdapter(
    Annotated[StepBegun | SequenceCancelled, Field(discriminator="fact")]
)


class ProcessMemory(BaseModel):
    """Resident memory of one process. `before`: after the single runs, before the clients came; 0 at the end: it has ended."""

    model_config = ConfigDict(frozen=True)

    process: str
    start_bytes: int
    before_bytes: int
    peak_bytes: int
    end_bytes: int


class Soak(Experiment):
    """Concurrent clients that cancel a third of their requests."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(Finding | ProcessMemory)

    model: Model
    devices: int = Field(3, ge=2, le=4)
    clients: int = Field(8, ge=1, le=64)
    seconds: float = Field(120.0, ge=1)
    mbit: float = Field(125.0, ge=1)  # real rate of every link

    def measure(self, context: Context) -> Iterator[Finding | ProcessMemory]:
        scenario = hub_scenario(self.devices)
        with (
            agents(scenario, context.folder, self.mbit, "--log-level", "debug") as testbed,
            GenerationClients(testbed) as clients,
        ):
            context.report("making the model")
            model_dir = decoder_directory(self.model, context.folder, "float32")
            context.report("planning, pushing and loading")
            coordinator = testbed.start_coordinator(
                str(model_dir), "--context", str(CONTEXT), "--sequences", str(self.clients), "--strategy", "hmp",
                "--min-devices", str(self.devices),
            )  # fmt: skip
            clients.served_plan()
            pids = {"coordinator": coordinator.pid, **_pids(testbed)}
            pool = requests(read_spec(model_dir).vocab_size)
            with MemoryWatch({name: partial(resident_bytes, pid) for name, pid in pids.items()}) as watch:
                context.report(f"{len(pool)} requests, one after the other")
                alone = clients.generate(pool, together=False)
                before = watch.now()
                context.report(f"{self.clients} clients for {self.seconds:g} s")
                began = time.monotonic()
                outcomes = clients.soak(pool, self.clients, self.seconds, _SEED)
                seconds = time.monotonic() - began
                end = _settled(watch)
            failed = clients.ready_status(_SETTLE_SECONDS)["failed_requests"]
            logs = [read_cancel_log(testbed.log(f"{name}.log").splitlines()) for name in agent_names(testbed)]
        rows = [
            ProcessMemory(process=name, start_bytes=watch.start[name], before_bytes=before[name],
                          peak_bytes=watch.peak[name], end_bytes=end[name])
            for name in pids
        ]  # fmt: skip
        yield from of_answers(pool, alone, outcomes, seconds)
        yield from of_cancelled(outcomes, logs)
        yield from of_processes(rows)
        yield equal("requests that failed, as the coordinator counts", failed, 0, COUNT)
        yield from rows

    def summary(self, rows: Sequence[Finding | ProcessMemory]) -> Summary:
        findings = [row for row in rows if isinstance(row, Finding)]
        processes = [row for row in rows if isinstance(row, ProcessMemory)]
        cells = [
            (row.process, *map(format_bytes, (row.start_bytes, row.before_bytes, row.peak_bytes, row.end_bytes)))
            for row in processes
        ]
        columns = ("process", "at the start", "after the single runs", "peak", "at the end")
        title = f"{self.clients} clients, {self.devices} devices, {self.mbit:g} Mbit/s"
        return findings_summary(title, findings, Table.of("Resident memory of each process", columns, cells))


def _pids(testbed: Testbed) -> dict[str, int]:
    """The agents and workers, by name."""
    found = {}
    for name in agent_names(testbed):
        for kind, process in (("agent", agent_of(testbed, name)), ("worker", worker_of(testbed, name))):
            if process is not None:
                found[f"{kind} on {name}"] = process.pid
    return found


def _settled(watch: MemoryWatch) -> dict[str, int]:
    """Memory of the processes once it no longer shrinks."""
    found, until = watch.now(), time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < until:
        time.sleep(_SETTLE_STEP_SECONDS)
        before, found = found, watch.now()
        if all(found[name] >= before[name] - _SETTLED_BYTES for name in found):
            break
    return found


# ---- requests ---------------------------------------------------------------------------------------------------------


def requests(vocab_size: int, count: int = _POOL, seed: int = _SEED) -> list[Request]:
    """Requests of random lengths; every other one is sampled, with its own seed."""
    rng = random.Random(seed)
    pool = []
    for index in range(count):
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, MAX_PROMPT))]
        max_tokens = rng.randint(2, MAX_TOKENS)
        sampled = {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "seed": index} if index % 2 else {}
        pool.append(Request.model_validate({"token_ids": prompt, "max_tokens": max_tokens, **sampled}))
    return pool


# ---- the log of cancelled sequences -----------------------------------------------------------------------------------


@dataclass
class CancelLog:
    """What one rank has logged about cancelled sequences."""

    cancelled: dict[int, int] = field(default_factory=dict)  # by sequence: tokens chosen before the cancel
    steps: int = 0
    late_rows: int = 0  # rows computed for a sequence after its cancel or its release


def read_cancel_log(lines: Iterable[str]) -> CancelLog:
    """Read a rank's log.

    Rank 0 logs each cancel; every rank logs the sequences of each step and those released before it. Sequence numbers are
    never reused.
    """
    log = CancelLog()
    ended: set[int] = set()
    for fact in _facts_in(lines):
        if isinstance(fact, SequenceCancelled):
            log.cancelled[fact.sequence] = fact.num_tokens
            ended.add(fact.sequence)
        else:
            log.steps += 1
            ended.update(fact.freed)
            log.late_rows += sum(rows for sequence, rows in fact.rows.items() if sequence in ended)
    return log


def _facts_in(lines: Iterable[str]) -> Iterator[StepBegun | SequenceCancelled]:
    """The facts in a process's log. Raises pydantic's ValidationError for facts of another version."""
    for line in lines:
        _, prefix, text = line.partition(FACT_PREFIX)
        if prefix:
            yield _FACT.validate_json(text)


# ---- findings ---------------------------------------------------------------------------------------------------------


def of_answers(
    pool: Sequence[Request], alone: Sequence[Outcome], outcomes: Sequence[Outcome], seconds: float
) -> Iterator[Finding]:
    """Speed, and equality with the answers to the same requests alone."""
    completed = [each for each in outcomes if not each.cancelled and not each.error]
    cancelled = [each for each in outcomes if each.cancelled]
    tokens = sum(len(each.tokens) for each in outcomes)
    first = [each.first_token_seconds for each in completed if each.first_token_seconds is not None] or [0.0]
    waits = "; ".join(f"{share:.0%}: {format_seconds(percentile(first, share))}" for share in (0.5, 0.95))
    detail = f"{tokens} tokens, {tokens / seconds:.0f} a second; first token {waits}"
    yield without_target(f"requests in {seconds:.0f} s", len(outcomes), COUNT, detail)
    whole = sum(each.tokens == alone[each.index].tokens for each in completed)
    sampled = sum(pool[each.index].seed is not None for each in completed)
    detail = f"{len(completed) - sampled} greedy, {sampled} sampled with a seed"
    yield equal("completed, and equal to the answer to the request alone", whole, len(completed), COUNT, detail)
    begun = sum(each.tokens == alone[each.index].tokens[: len(each.tokens)] for each in cancelled)
    detail = f"{len(cancelled) / max(len(outcomes), 1):.0%} of all"
    yield equal("cancelled midway, and equal so far", begun, len(cancelled), COUNT, detail)
    errors = [each.error for each in (*alone, *outcomes) if each.error]
    yield equal("errors", len(errors), 0, COUNT, "; ".join(sorted(set(errors)))[:300])


def of_cancelled(outcomes: Sequence[Outcome], logs: Sequence[CancelLog]) -> Iterator[Finding]:
    """The work that was done for cancelled requests."""
    chosen = [tokens for log in logs for tokens in log.cancelled.values()]
    late, steps = sum(log.late_rows for log in logs), max(log.steps for log in logs)
    detail = f"in {steps} steps with {len(chosen)} cancels at rank 0"
    yield equal("rows computed for a request after rank 0 took its cancel, on any rank", late, 0, COUNT, detail)
    unseen = sum(chosen) - sum(len(each.tokens) for each in outcomes if each.cancelled)
    figure = "tokens chosen for these that their clients did not take: on the way, or before the cancel came"
    yield without_target(figure, unseen, COUNT, f"{unseen / max(len(chosen), 1):.1f} of each")


def of_processes(rows: Sequence[ProcessMemory]) -> Iterator[Finding]:
    """Growth of memory, and processes that ended."""
    worst = max(rows, key=lambda row: row.end_bytes - row.before_bytes)
    grown = worst.end_bytes - worst.before_bytes
    figure = "growth of memory from before the clients to the end, worst process"
    yield at_most(figure, grown, MOST_LEFT_BYTES, format_bytes, worst.process)
    ended = [row.process for row in rows if not row.end_bytes]
    yield equal("processes that ended meanwhile", len(ended), 0, COUNT, ", ".join(ended))
