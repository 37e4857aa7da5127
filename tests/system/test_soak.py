"""Concurrent clients for minutes that cancel every third request: answers, memory, KV cache, and work for cancelled requests.

Real coordinator, agents and workers on emulated devices. Each request of a pool first runs alone; its answers under load must
be equal.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cancel_log import CancelLog, read_cancel_log
from support.models import save_random_model
from support.soak_clients import Load, Request, run_clients, serving_status, wrong_answers
from support.waiting import wait_for
from typing_extensions import Self

from hearth.platform.units import format_bytes
from tools.bench.homes import agent_names, agent_of, agents, hub_scenario, worker_of
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


@pytest.mark.slow
@pytest.mark.namespaces
def test_answers_and_memory_hold_under_load_with_cancels(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    if reason := what_is_missing():
        pytest.skip(reason)
    config = decoder()
    model_dir = save_random_model(tmp_path / "model", config, generates=True)
    pool = requests(config.vocab_size)
    with agents(hub_scenario(DEVICES, LINK_MBIT), tmp_path, "--log-level", "debug") as testbed:
        coordinator = testbed.start_coordinator(
            str(model_dir), "--context", str(CONTEXT), "--sequences", str(CLIENTS), "--strategy", "hmp",
            "--min-devices", str(DEVICES),
        )  # fmt: skip
        wait_for("serving", partial(serving_status, testbed))
        running = {"coordinator": psutil.Process(coordinator.pid), **agents_and_workers(testbed)}
        with MemoryWatch({name: partial(resident_bytes, process) for name, process in running.items()}) as watch:
            alone = run_clients(testbed, Load(requests=pool))
            before, began = watch.now(), time.monotonic()
            outcomes = run_clients(testbed, Load(requests=pool, clients=CLIENTS, seconds=SECONDS, seed=SEED))
            seconds = time.monotonic() - began
            end = settled(watch)
        logs = logs_with_free_blocks(testbed)
        failed = json.loads(testbed.hearth("status", "--json"))["failed_requests"]
    print(f"\n{len(outcomes)} requests, {sum(len(each.tokens) for each in outcomes) / seconds:.0f} tokens a second")
    for name in running:
        print(
            f"{name}: {format_bytes(before[name])}, at most {format_bytes(watch.peak[name])}, {format_bytes(end[name])}"
        )
    assert [each.error for each in (*alone, *outcomes) if each.error] == []
    assert failed == 0
    assert wrong_answers(outcomes, alone) == []
    assert sum(log.late_rows for log in logs) == 0  # computed for a request after rank 0 took its cancel, on any rank
    assert all_blocks_are_free(logs)
    assert min(end.values()) > 0, "a process has ended"
    assert {name: end[name] for name in end if end[name] > before[name] + MOST_LEFT_BYTES} == {}


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
        if all_blocks_are_free(logs) or time.monotonic() >= until:
            return logs
        time.sleep(SETTLE_STEP_SECONDS)


def all_blocks_are_free(logs: list[CancelLog]) -> bool:
    """Whether rank 0, the only one that logs them, had blocks of the KV cache and they were free at the end."""
    free, num_blocks = max((log.num_free_blocks, log.num_blocks) for log in logs)
    return free == num_blocks > 0


def settled(watch: MemoryWatch) -> dict[str, int]:
    """Memory of the processes once it no longer shrinks."""
    found, until = watch.now(), time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < until:
        time.sleep(SETTLE_STEP_SECONDS)
        before, found = found, watch.now()
        if all(found[name] >= before[name] - SETTLED_BYTES for name in found):
            break
    return found


def requests(vocab_size: int) -> list[Request]:
    """Requests of random lengths; every other one is sampled, with its own seed."""
    rng = random.Random(SEED)
    pool = []
    for index in range(POOL_SIZE):
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, MAX_PROMPT))]
        max_tokens = rng.randint(2, MAX_TOKENS)
        sampled = {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "seed": index} if index % 2 else {}
        pool.append({"token_ids": prompt, "max_tokens": max_tokens, **sampled})
    return pool
