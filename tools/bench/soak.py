"""Soak test: concurrent clients for minutes, with every third request cancelled; checks answers, memory and leftovers.

Uses the real coordinator, agents and workers on a testbed. Each request of a pool first runs alone; its answers under load
must be equal. The work that ranks did for cancelled requests is read from the facts in their debug logs
(`agent.worker.transformer.generation.facts`).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated

import psutil
from pydantic import Field, TypeAdapter

from agent.worker.transformer.generation.facts import FACT_PREFIX, SequenceCancelled, StepBegun
from coordinator.models.checkpoint.families import read_spec
from hearth.platform.units import format_bytes, format_seconds
from tools.bench.client_runner import ClientRunner
from tools.bench.clients import Ask, Outcome
from tools.bench.findings import Finding, at_most, equal, table
from tools.bench.stats import percentile
from tools.bench.watch import MemoryWatch, agent_of, resident_bytes, worker_of
from tools.testbed import Testbed

CONTEXT = 384  # tokens per sequence
MAX_PROMPT, MAX_TOKENS = 200, 150  # of a request
# Largest growth of a process's memory over the soak: allows for slack of its allocator.
MOST_LEFT_BYTES = 16 << 20
_POOL = 32  # different requests
_SEED = 20240229  # arbitrary; fixed, so that the requests can be repeated
_SETTLE_SECONDS = 30.0  # most time for memory to settle
_SOAK_MARGIN_SECONDS = 300.0  # added to the soak's duration for its timeout
_FACT: TypeAdapter[StepBegun | SequenceCancelled] = TypeAdapter(
    Annotated[StepBegun | SequenceCancelled, Field(discriminator="fact")]
)


@dataclass
class Ledger:
    """One rank's log entries on cancelled sequences."""

    cancelled: dict[int, int] = field(default_factory=dict)  # by sequence: tokens chosen before the cancel
    steps: int = 0
    rows_after: Counter[int] = field(default_factory=Counter)  # by sequence: rows computed after its end

    @property
    def late_rows(self) -> int:
        return sum(self.rows_after.values())


def read_ledger(lines: Sequence[str]) -> Ledger:
    """Read a rank's log. Rows computed for a sequence after its cancel or its release count as late.

    Rank 0 logs each cancel; every rank logs the sequences of each step and those released before it. Sequence numbers are
    never reused.
    """
    ledger = Ledger()
    gone: set[int] = set()
    for fact in _facts_in(lines):
        if isinstance(fact, SequenceCancelled):
            ledger.cancelled[fact.sequence] = fact.num_tokens
            gone.add(fact.sequence)
        else:
            ledger.steps += 1
            gone.update(fact.freed)
            ledger.rows_after.update({sequence: rows for sequence, rows in fact.rows.items() if sequence in gone})
    return ledger


def _facts_in(lines: Iterable[str]) -> Iterator[StepBegun | SequenceCancelled]:
    """The facts in a process's log. Raises pydantic's ValidationError for facts of another version."""
    for line in lines:
        _, mark, text = line.partition(FACT_PREFIX)
        if mark:
            yield _FACT.validate_json(text)


def requests(vocab_size: int, count: int = _POOL, seed: int = _SEED) -> list[Ask]:
    """Requests of random lengths; every other one is sampled, with its own seed."""
    chance = random.Random(seed)
    pool = []
    for index in range(count):
        prompt = [chance.randrange(3, vocab_size) for _ in range(chance.randint(1, MAX_PROMPT))]
        max_tokens = chance.randint(2, MAX_TOKENS)
        sampled = {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "seed": index} if index % 2 else {}
        pool.append(Ask.model_validate({"prompt": prompt, "max_tokens": max_tokens, **sampled}))
    return pool


class SoakBench:
    """Runs on a started testbed with agents, at log level debug, on all devices except the hub."""

    def __init__(
        self, testbed: Testbed, model_dir: Path, clients: int, seconds: float, report: Callable[[str], None]
    ) -> None:
        self._testbed, self._model_dir, self._report = testbed, model_dir, report
        self._num_clients, self._seconds = clients, seconds
        self._names = [d.name for d in testbed.scenario.devices if d.name != testbed.scenario.coordinator_device]
        self._clients = ClientRunner(testbed)

    def __enter__(self) -> SoakBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clients.__exit__(kind, error, trace)

    def run(self) -> tuple[list[Finding], str]:
        """The findings, and a table with the memory of every process."""
        self._report("planning, pushing and loading")
        coordinator = self._testbed.start_coordinator(
            str(self._model_dir), "--context", str(CONTEXT), "--sequences", str(self._num_clients), "--strategy", "hmp",
            "--min-devices", str(len(self._names)),
        )  # fmt: skip
        self._clients.ready()
        processes = self._processes(psutil.Process(coordinator.pid))
        pool = requests(read_spec(self._model_dir).vocab_size)
        with MemoryWatch(processes) as watch:
            self._report(f"{len(pool)} requests, one after the other")
            alone = self._clients.answers(pool, together=False)
            before = watch.now()
            self._report(f"{self._num_clients} clients for {self._seconds:g} s")
            began = time.monotonic()
            answered = self._clients.call(
                "soak", self._seconds + _SOAK_MARGIN_SECONDS, asks=[each.model_dump() for each in pool],
                clients=self._num_clients, seconds=self._seconds, seed=_SEED,
            )  # fmt: skip
            seconds = time.monotonic() - began
            end = self._settled(watch)
        outcomes = [Outcome.model_validate(each) for each in answered["outcomes"]]
        status = self._clients.ready_status(_SETTLE_SECONDS)
        ledgers = {name: read_ledger(self._testbed.log(f"{name}.log").splitlines()) for name in self._names}
        findings = [
            *self._of_answers(pool, alone, outcomes, seconds),
            *self._of_cancelled(outcomes, ledgers),
            *self._of_processes(processes, before, end, status["failed_requests"]),
        ]
        return findings, _memory_table(watch.start, before, watch.peak, end)

    def _processes(self, coordinator: psutil.Process) -> dict[str, psutil.Process]:
        found = {"coordinator": coordinator}
        for name in self._names:
            for what, process in (("agent", agent_of(self._testbed, name)), ("worker", worker_of(self._testbed, name))):
                if process is not None:
                    found[f"{what} on {name}"] = process
        return found

    @staticmethod
    def _settled(watch: MemoryWatch) -> dict[str, int]:
        """Memory of the processes once it no longer shrinks."""
        found, until = watch.now(), time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until:
            time.sleep(2.0)
            before, found = found, watch.now()
            if all(found[name] >= before[name] - (1 << 20) for name in found):
                break
        return found

    # ---- what is said ----------------------------------------------------------------------------------------------

    def _of_answers(
        self, pool: Sequence[Ask], alone: Sequence[Outcome], outcomes: Sequence[Outcome], seconds: float
    ) -> list[Finding]:
        completed = [each for each in outcomes if not each.cancelled and not each.error]
        cancelled = [each for each in outcomes if each.cancelled]
        errors = [each.error for each in (*alone, *outcomes) if each.error]
        whole = [each for each in completed if each.tokens == alone[each.ask].tokens]
        begun = [each for each in cancelled if each.tokens == alone[each.ask].tokens[: len(each.tokens)]]
        sampled = sum(1 for each in completed if pool[each.ask].seed is not None)
        tokens = sum(len(each.tokens) for each in outcomes)
        first = [each.first_token_seconds for each in completed if each.first_token_seconds is not None]
        waits = "; ".join(f"{share:.0%}: {format_seconds(percentile(first, share))}" for share in (0.5, 0.95))
        return [
            Finding(
                what=f"requests of {self._num_clients} clients on {len(self._names)} devices in {seconds:.0f} s",
                measured=f"{len(outcomes)}, {tokens} tokens ({tokens / seconds:.0f} a second); first token {waits}",
                value=len(outcomes),
            ),
            equal("completed, and equal to the answer that the request gets alone", len(whole), len(completed),
                  f"{len(whole)} of {len(completed)} ({len(completed) - sampled} greedy, {sampled} sampled with a seed)",
                  "all"),
            equal("given up midway, and equal so far", len(begun), len(cancelled),
                  f"{len(begun)} of {len(cancelled)} ({len(cancelled) / max(len(outcomes), 1):.0%} of all)", "all"),
            equal("errors", len(errors), 0, f"{len(errors)} {'; '.join(sorted(set(errors)))[:300]}".strip(), "none"),
        ]  # fmt: skip

    @staticmethod
    def _of_cancelled(outcomes: Sequence[Outcome], ledgers: Mapping[str, Ledger]) -> list[Finding]:
        leaders = [ledger for ledger in ledgers.values() if ledger.cancelled]
        cancelled = sum(len(ledger.cancelled) for ledger in leaders)
        computed = sum(sum(ledger.cancelled.values()) for ledger in leaders)
        seen = sum(len(each.tokens) for each in outcomes if each.cancelled)
        late = sum(ledger.late_rows for ledger in ledgers.values())
        steps = max(ledger.steps for ledger in ledgers.values())
        return [
            equal("rows computed for a request after rank 0 took its cancel, on any rank", late, 0,
                  f"{late}, in {steps} steps with {cancelled} cancels at rank 0", "none"),
            Finding(
                what="tokens chosen for these that their clients did not take: on the way, or before the cancel came",
                measured=f"{computed - seen} ({(computed - seen) / max(cancelled, 1):.1f} of each)",
                value=computed - seen,
            ),
        ]  # fmt: skip

    @staticmethod
    def _of_processes(
        processes: Mapping[str, psutil.Process], before: Mapping[str, int], end: Mapping[str, int], failed: int
    ) -> list[Finding]:
        left = {name: end[name] - before[name] for name in before}
        most = max(left, key=lambda name: left[name])
        ended = [name for name, process in processes.items() if not process.is_running() or not resident_bytes(process)]
        return [
            at_most("memory at the end over that before the clients came, the worst process", left[most], MOST_LEFT_BYTES,
                    f"{format_bytes(left[most])} ({most})", f"at most {format_bytes(MOST_LEFT_BYTES)}"),
            equal("processes that ended meanwhile", len(ended), 0, ", ".join(ended) or "none", "none"),
            equal("requests that failed, as the coordinator counts", failed, 0, str(failed), "none"),
        ]  # fmt: skip


def _memory_table(
    start: Mapping[str, int], before: Mapping[str, int], peak: Mapping[str, int], end: Mapping[str, int]
) -> str:
    rows = [(name, *(format_bytes(each[name]) for each in (start, before, peak, end))) for name in start]
    return "\n" + table(("resident", "at the start", "after the single runs", "peak", "at the end"), rows)
