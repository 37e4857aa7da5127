"""Concurrent clients for minutes that cancel every third request: answers, memory, KV cache, and work for cancelled requests.

Real coordinator, agents and workers on emulated devices. Each request of a pool first runs alone; its answers under load must
be equal. The test prints its findings: `python -m pytest -m slow -s tests/system/test_soak.py`.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from support.cancel_log import CancelLog, read_cancel_log
from support.models import save_random_model
from support.soak_clients import Load, Outcome, Request, run_clients, serving_status
from support.waiting import wait_for
from typing_extensions import Self

from hearth.platform.units import format_bytes, format_seconds
from tools.bench.homes import agent_names, agent_of, agents, hub_scenario, worker_of
from tools.bench.results import COUNT, Finding, Table, all_hold, at_most, equal, findings_table, without_target
from tools.bench.stats import percentile
from tools.testbed import Testbed
from tools.testbed.cluster import what_is_missing

# Long enough to answer each request of the pool a few times.
SECONDS = float(os.environ.get("HEARTH_SOAK_SECONDS", "120"))
CLIENTS = 8  # also the sequences that the plan has room for: steps have several rows
DEVICES = 3  # so that the ring has more than two ranks
LINK_MBIT = 125.0  # real rate of every link, as in Galaxy's environments
CONTEXT = 384  # tokens per sequence: more than the longest request
MAX_PROMPT, MAX_TOKENS = 200, 150  # of a request; together less than CONTEXT, and long enough to cancel midway
POOL_SIZE = 32  # different requests: each is repeated several times under load
SEED = 20240229  # arbitrary; fixed, so that the requests can be repeated
MOST_LEFT_BYTES = 16 << 20  # largest accepted growth of a process's memory over the soak: slack of its allocator
SETTLE_SECONDS = 30.0  # most time to wait for memory to settle; after it, memory counts as kept
SETTLE_STEP_SECONDS = 2.0  # between two samples: long enough for a process to return freed memory
FREE_SECONDS = 60.0  # most time until blocks are free: a cancelled stream keeps its own for 30 s
_SAMPLE_SECONDS = 0.2  # interval of memory samples: shorter than a request, so that its peak is seen
SETTLED_BYTES = 1 << 20  # a process that shrinks by less between two samples has settled


class MemoryWatch:
    """Samples memory until the end of the block. `probes`: by name, functions that return bytes."""

    def __init__(self, probes: Mapping[str, Callable[[], int]]) -> None:
        self._probes = probes
        self.peak = self.now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def now(self) -> dict[str, int]:
        return {name: probe() for name, probe in self._probes.items()}

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            for name, num_bytes in self.now().items():
                self.peak[name] = max(self.peak[name], num_bytes)


class ProcessMemory(NamedTuple):
    """Resident memory of one process; 0 at the end: it has ended."""

    process: str
    start_bytes: int
    before_bytes: int  # after the requests alone, before the clients came
    peak_bytes: int
    end_bytes: int


# ---- the soak -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.namespaces
def test_answers_and_memory_hold_under_load_with_cancels(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    if reason := what_is_missing():
        pytest.skip(reason)
    config = decoder()
    model_dir = save_random_model(tmp_path / "model", config, generates=True)
    pool = requests(config.vocab_size)
    with agents(hub_scenario(DEVICES), tmp_path, LINK_MBIT, "--log-level", "debug") as testbed:
        coordinator = testbed.start_coordinator(
            str(model_dir), "--context", str(CONTEXT), "--sequences", str(CLIENTS), "--strategy", "hmp",
            "--min-devices", str(DEVICES),
        )  # fmt: skip
        wait_for("serving", partial(serving_status, testbed))
        running = {"coordinator": psutil.Process(coordinator.pid), **agents_and_workers(testbed)}
        with MemoryWatch({name: partial(resident_bytes, process) for name, process in running.items()}) as watch:
            start = watch.now()
            alone = run_clients(testbed, Load(requests=pool))
            before, began = watch.now(), time.monotonic()
            outcomes = run_clients(testbed, Load(requests=pool, clients=CLIENTS, seconds=SECONDS, seed=SEED))
            seconds = time.monotonic() - began
            end = settled(watch)
        logs = logs_with_free_blocks(testbed)
        failed = json.loads(testbed.hearth("status", "--json"))["failed_requests"]
    rows = [ProcessMemory(name, start[name], before[name], watch.peak[name], end[name]) for name in running]
    findings = [
        *of_answers(pool, alone, outcomes, seconds), *of_cancelled(outcomes, logs), of_blocks(logs),
        *of_processes(rows),
        equal("requests that failed, as the coordinator counts", failed, 0, COUNT),
    ]  # fmt: skip
    title = f"{CLIENTS} clients, {DEVICES} devices, {LINK_MBIT:g} Mbit/s"
    for table in (findings_table(title, findings), memory_table(rows)):
        print(f"\n{table.markdown()}")
    assert [each for each in findings if each.holds is False] == []


def decoder() -> Any:
    """A small Llama without an end token, which random weights would emit at random."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_attention_heads=12, num_key_value_heads=6, num_hidden_layers=6,
        vocab_size=16000, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def agents_and_workers(testbed: Testbed) -> dict[str, psutil.Process]:
    found = {}
    for name in agent_names(testbed):
        for kind, process in (("agent", agent_of(testbed, name)), ("worker", worker_of(testbed, name))):
            assert process is not None, f"no {kind} runs on {name}"
            found[f"{kind} on {name}"] = process
    return found


def resident_bytes(process: psutil.Process) -> int:
    """Resident memory of a process; 0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return int(process.memory_info().rss)
    return 0


def logs_with_free_blocks(testbed: Testbed) -> list[CancelLog]:
    """The logs of all ranks once all blocks of the KV cache are free: those of streams that may return are freed later."""
    until = time.monotonic() + FREE_SECONDS
    while True:
        logs = [read_cancel_log(testbed.log(f"{name}.log").splitlines()) for name in agent_names(testbed)]
        if of_blocks(logs).holds or time.monotonic() >= until:
            return logs
        time.sleep(SETTLE_STEP_SECONDS)


def settled(watch: MemoryWatch) -> dict[str, int]:
    """Memory of the processes once it no longer shrinks."""
    found, until = watch.now(), time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < until:
        time.sleep(SETTLE_STEP_SECONDS)
        before, found = found, watch.now()
        if all(found[name] >= before[name] - SETTLED_BYTES for name in found):
            break
    return found


def requests(vocab_size: int, count: int = POOL_SIZE, seed: int = SEED) -> list[Request]:
    """Requests of random lengths; every other one is sampled, with its own seed."""
    rng = random.Random(seed)
    pool = []
    for index in range(count):
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, MAX_PROMPT))]
        max_tokens = rng.randint(2, MAX_TOKENS)
        sampled = {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "seed": index} if index % 2 else {}
        pool.append({"token_ids": prompt, "max_tokens": max_tokens, **sampled})
    return pool


# ---- findings -------------------------------------------------------------------------------------------------------


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
    sampled = sum("seed" in pool[each.index] for each in completed)
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


def of_blocks(logs: Sequence[CancelLog]) -> Finding:
    """The blocks of the KV cache that are free at the end, as rank 0 has logged."""
    free, num_blocks = max((log.num_free_blocks, log.num_blocks) for log in logs)
    return equal("free blocks of the KV cache at the end", free, max(num_blocks, 1), COUNT)


def of_processes(rows: Sequence[ProcessMemory]) -> Iterator[Finding]:
    """Growth of memory, and processes that ended."""
    worst = max(rows, key=lambda row: row.end_bytes - row.before_bytes)
    grown = worst.end_bytes - worst.before_bytes
    figure = "growth of memory from before the clients to the end, worst process"
    yield at_most(figure, grown, MOST_LEFT_BYTES, format_bytes, worst.process)
    ended = [row.process for row in rows if not row.end_bytes]
    yield equal("processes that ended meanwhile", len(ended), 0, COUNT, ", ".join(ended))


def memory_table(rows: Sequence[ProcessMemory]) -> Table:
    columns = ("process", "at the start", "after the requests alone", "peak", "at the end")
    return Table.of(
        "Resident memory of each process", columns, [(row.process, *map(format_bytes, row[1:])) for row in rows]
    )


# ---- tests of the requests and findings -----------------------------------------------------------------------------

POOL: list[Request] = [
    {"token_ids": [3, 4], "max_tokens": 3},
    {"token_ids": [5], "max_tokens": 2, "temperature": 0.9, "seed": 1},
]
ALONE = [Outcome(index=0, tokens=[7, 8, 9]), Outcome(index=1, tokens=[6, 6])]


def test_requests_repeat_for_a_seed_and_alternate_greedy_and_sampled() -> None:
    pool = requests(1000, count=40, seed=3)
    assert pool == requests(1000, count=40, seed=3) != requests(1000, count=40, seed=4)
    assert all(1 <= len(each["token_ids"]) <= MAX_PROMPT and 2 <= each["max_tokens"] <= MAX_TOKENS for each in pool)
    assert ["seed" in each for each in pool] == [False, True] * 20


def test_answers_under_load_must_equal_those_alone() -> None:
    whole = Outcome(index=0, tokens=[7, 8, 9], first_token_seconds=0.5)
    part = Outcome(index=1, tokens=[6], cancelled=True)
    assert all_hold(of_answers(POOL, ALONE, [whole, part], 2.0))
    wrong = Outcome(index=0, tokens=[7, 8, 1], first_token_seconds=0.5)
    failed = Outcome(index=0, tokens=[], error="too late")
    missed = [each.figure for each in of_answers(POOL, ALONE, [wrong, part, failed], 2.0) if each.holds is False]
    assert missed == ["completed, and equal to the answer to the request alone", "errors"]


def test_work_after_a_cancel_is_a_finding() -> None:
    outcomes = [Outcome(index=1, tokens=[6], cancelled=True)]
    assert all_hold(of_cancelled(outcomes, [CancelLog(cancelled={2: 3}, steps=4), CancelLog(steps=4)]))
    late, unseen = of_cancelled(outcomes, [CancelLog(cancelled={2: 3}, steps=4), CancelLog(steps=4, late_rows=1)])
    assert (late.holds, unseen.value) == (False, 2)


def test_blocks_that_are_not_freed_are_a_finding() -> None:
    assert of_blocks([CancelLog(), CancelLog(num_blocks=9, num_free_blocks=9)]).holds
    assert not of_blocks([CancelLog(), CancelLog(num_blocks=9, num_free_blocks=8)]).holds
    assert not of_blocks([CancelLog()]).holds


def test_memory_growth_and_ended_processes_are_findings() -> None:
    steady = ProcessMemory("agent on m0", start_bytes=5, before_bytes=6, peak_bytes=9, end_bytes=7)
    assert all_hold(of_processes([steady]))
    grown = steady._replace(process="worker on m0", end_bytes=6 + MOST_LEFT_BYTES + 1)
    ended = steady._replace(process="coordinator", end_bytes=0)
    growth, gone = of_processes([steady, grown, ended])
    assert "worker on m0" in growth.measured
    assert (growth.holds, gone.holds, gone.measured) == (False, False, "1 (coordinator)")
    assert memory_table([steady]).rows == (("agent on m0", "5 B", "6 B", "9 B", "7 B"),)
