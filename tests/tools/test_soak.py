"""The soak test: its requests, parsing of logs, and findings."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.models import save_random_model, small_decoder
from support.plans import make_plan

from agent.worker.transformer.generation.facts import SequenceCancelled, StepBegun, log_fact
from coordinator.models.checkpoint.families import read_spec
from tools.bench.clients import Outcome, Request
from tools.bench.experiment import make_experiment, read_settings
from tools.bench.findings import all_hold
from tools.bench.soak import (
    MAX_PROMPT,
    MAX_TOKENS,
    MOST_LEFT_BYTES,
    ProcessMemory,
    of_answers,
    of_processes,
    read_cancel_log,
    requests,
)

# ---- the soak's requests and logs ------------------------------------------------------------------------------------


def test_requests_repeat_for_a_seed_and_alternate_greedy_and_sampled() -> None:
    pool = requests(1000, count=40, seed=3)
    assert pool == requests(1000, count=40, seed=3) != requests(1000, count=40, seed=4)
    assert all(1 <= len(each.token_ids) <= MAX_PROMPT and 2 <= each.max_tokens <= MAX_TOKENS for each in pool)
    assert [each.seed is not None for each in pool] == [False, True] * 20


def test_rows_after_a_cancel_or_release_are_late_on_every_rank() -> None:
    leader = logged(
        StepBegun(kind="prefill", rows={1: 40, 2: 7}, freed=()),
        SequenceCancelled(sequence=2, num_tokens=3),
        StepBegun(kind="decode", rows={1: 1}, freed=(2,)),
    )
    log = read_cancel_log(leader)
    assert (log.cancelled, log.steps, log.late_rows) == ({2: 3}, 2, 0)
    late = read_cancel_log([*leader, *logged(StepBegun(kind="decode", rows={1: 1, 2: 5}, freed=()))])
    assert late.late_rows == 5
    follower = read_cancel_log([leader[2], *logged(StepBegun(kind="decode", rows={2: 1, 1: 1}, freed=()))])
    assert (follower.cancelled, follower.late_rows) == ({}, 1)


def test_cancel_log_reads_the_facts_of_a_real_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    from support.engines import EngineCluster, GenerationCluster

    model_dir = save_random_model(tmp_path, small_decoder("llama"), generates=True)
    with EngineCluster(model_dir, make_plan(read_spec(model_dir), "hmp", (2, 1))) as cluster:
        home = GenerationCluster(cluster)
        home.submit([5, 6, 7], 6)
        with caplog.at_level(logging.DEBUG):
            home.run()
    log = read_cancel_log([f"{record.levelname} {record.getMessage()}" for record in caplog.records])
    assert log.steps >= 2 * 6  # the steps of both ranks; one more may free the rows of the answer
    assert (log.cancelled, log.late_rows) == ({}, 0)


def logged(*facts: StepBegun | SequenceCancelled) -> list[str]:
    """Lines of a worker's log."""
    log, records = logging.Logger("hearth.worker", logging.DEBUG), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log.addHandler(handler)
    for fact in facts:
        log_fact(log, fact)
    return [f"{record.name} {record.levelname} {record.getMessage()}" for record in records]


# ---- findings --------------------------------------------------------------------------------------------------------

POOL = [Request(token_ids=[3, 4], max_tokens=3), Request(token_ids=[5], max_tokens=2, temperature=0.9, seed=1)]
ALONE = [Outcome(index=0, tokens=[7, 8, 9]), Outcome(index=1, tokens=[6, 6])]


def test_answers_under_load_must_equal_those_alone() -> None:
    whole = Outcome(index=0, tokens=[7, 8, 9], first_token_seconds=0.5)
    part = Outcome(index=1, tokens=[6], cancelled=True)
    assert all_hold(of_answers(POOL, ALONE, [whole, part], 2.0))
    wrong = Outcome(index=0, tokens=[7, 8, 1], first_token_seconds=0.5)
    failed = Outcome(index=0, tokens=[], error="too late")
    missed = [each.figure for each in of_answers(POOL, ALONE, [wrong, part, failed], 2.0) if each.holds is False]
    assert missed == ["completed, and equal to the answer to the request alone", "errors"]


def test_memory_growth_and_ended_processes_are_findings() -> None:
    steady = ProcessMemory(process="agent on m0", start_bytes=5, before_bytes=6, peak_bytes=9, end_bytes=7)
    assert all_hold(of_processes([steady]))
    grown = steady.model_copy(update={"process": "worker on m0", "end_bytes": 6 + MOST_LEFT_BYTES + 1})
    ended = steady.model_copy(update={"process": "coordinator", "end_bytes": 0})
    growth, gone = of_processes([steady, grown, ended])
    assert "worker on m0" in growth.measured
    assert (growth.holds, gone.holds, gone.measured) == (False, False, "1 (coordinator)")


def test_summary_has_a_table_of_findings_and_one_of_memory() -> None:
    soak = make_experiment(read_settings("soak"))
    rows = [*of_processes([row := ProcessMemory(process="coordinator", start_bytes=1, before_bytes=1, peak_bytes=2,
                                                 end_bytes=1)]), row]  # fmt: skip
    saved = [soak.ROW.validate_python(each.model_dump(mode="json")) for each in rows]
    assert saved == rows
    findings, memory = soak.summary(saved).tables
    assert len(findings.rows) == 2
    assert memory.rows == (("coordinator", "1 B", "1 B", "2 B", "1 B"),)
