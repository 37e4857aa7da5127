"""The log of cancelled sequences, which the soak test reads."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.cancel_log import read_cancel_log
from support.models import save_random_model, small_decoder
from support.plans import make_plan

from agent.worker.tracing import SequenceCancelled, SequenceResumed, StepBegun, log_fact
from coordinator.models.checkpoint.families import read_spec


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


def test_rows_of_a_resumed_sequence_are_not_late() -> None:
    resumed = logged(
        SequenceCancelled(sequence=1, num_tokens=3),
        SequenceResumed(sequence=1),
        StepBegun(kind="decode", rows={1: 1}, freed=()),
    )
    assert read_cancel_log(resumed).late_rows == 0


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
    assert log.num_free_blocks == log.num_blocks > 0


def logged(*facts: StepBegun | SequenceCancelled) -> list[str]:
    """Lines of a worker's log."""
    log, records = logging.Logger("hearth.worker", logging.DEBUG), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log.addHandler(handler)
    for fact in facts:
        log_fact(log, fact)
    return [f"{record.name} {record.levelname} {record.getMessage()}" for record in records]
