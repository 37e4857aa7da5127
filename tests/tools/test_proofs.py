"""Benchmarks with targets: requests and logs of the soak, tables of findings, and the exit code if a target is missed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import typer
from support.models import save_random_model, small_decoder
from support.plans import make_plan

from agent.worker.transformer.generation.facts import SequenceCancelled, StepBegun, log_fact
from coordinator.models.checkpoint.families import read_spec
from tools.bench import proofs
from tools.bench.findings import all_hold, as_json, at_least, at_most, equal, findings_table
from tools.bench.soak import MAX_PROMPT, MAX_TOKENS, read_ledger, requests

# ---- the soak's requests and logs ------------------------------------------------------------------------------------


def test_requests_are_the_same_for_a_seed_and_every_other_one_is_sampled() -> None:
    asks = requests(1000, count=40, seed=3)
    assert asks == requests(1000, count=40, seed=3) != requests(1000, count=40, seed=4)
    assert all(1 <= len(ask.prompt) <= MAX_PROMPT and 2 <= ask.max_tokens <= MAX_TOKENS for ask in asks)
    assert [ask.seed is not None for ask in asks] == [False, True] * 20


def test_rows_of_a_cancelled_sequence_count_from_the_step_that_follows_on_any_rank() -> None:
    leader = logged(
        StepBegun(kind="prefill", rows={1: 40, 2: 7}, freed=()),
        SequenceCancelled(sequence=2, num_tokens=3),
        StepBegun(kind="decode", rows={1: 1}, freed=(2,)),
    )
    ledger = read_ledger(leader)
    assert (ledger.cancelled, ledger.steps, ledger.late_rows) == ({2: 3}, 2, 0)
    late = read_ledger([*leader, *logged(StepBegun(kind="decode", rows={1: 1, 2: 5}, freed=()))])
    assert late.rows_after == {2: 5}
    follower = read_ledger([leader[2], *logged(StepBegun(kind="decode", rows={2: 1, 1: 1}, freed=()))])
    assert (follower.cancelled, follower.late_rows) == ({}, 1)


def test_the_ledger_reads_what_the_engine_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    from support.engines import EngineCluster, GenerationCluster

    model_dir = save_random_model(tmp_path, small_decoder("llama"), generates=True)
    with EngineCluster(model_dir, make_plan(read_spec(model_dir), "hmp", (2, 1))) as cluster:
        home = GenerationCluster(cluster)
        home.submit([5, 6, 7], 6)
        with caplog.at_level(logging.DEBUG):
            home.run()
    ledger = read_ledger([f"{record.levelname} {record.getMessage()}" for record in caplog.records])
    assert ledger.steps >= 2 * 6  # the steps of both ranks; one more may free the rows of the answer
    assert (ledger.cancelled, ledger.late_rows) == ({}, 0)


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


def test_a_figure_that_is_not_what_was_asked_ends_the_command_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [at_most("peak", 2.0, 2.0, "2", "at most 2"), at_least("rate", 3.0, 2.5, "3", "at least 2.5")]
    proofs.conclude("good", good, tmp_path / "good.json", tmp_path / "good.md")
    assert json.loads((tmp_path / "good.json").read_text())[1]["holds"] is True
    capsys.readouterr()
    bad = [*good, equal("bytes", 7, 0, "7 bytes", "0 bytes")]
    assert not all_hold(bad)
    with pytest.raises(typer.Exit) as ended:
        proofs.conclude("bad", bad, None, tmp_path / "bad.md")
    assert ended.value.exit_code == 1
    assert "| bytes | 0 bytes | 7 bytes | **no** |" in capsys.readouterr().out
    assert "**no**" in (tmp_path / "bad.md").read_text()
    assert findings_table("good", good).markdown().count("yes") == 2
    assert json.loads(as_json(bad))[2] == {
        "what": "bytes", "measured": "7 bytes", "value": 7, "asked": "0 bytes", "holds": False,
    }  # fmt: skip


@pytest.mark.parametrize("command", [proofs.push, proofs.capacity, proofs.soak])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_run(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    with pytest.raises(SystemExit) as ended:
        app(["--json", "/nowhere/rows.json"])
    assert ended.value.code == 1
    assert "there is no directory /nowhere" in capsys.readouterr().err
