"""What the proofs of generation say: of logs, of requests, of cases; and that one that fails is not hidden."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import typer

from agent.worker.transformer.generation.facts import SequenceCancelled, StepBegun, log_fact
from hearth.errors import BadSetting
from tools.bench import proofs
from tools.bench.cases import CASES, Case, ExactnessRow, Family, chosen_cases, chosen_families, details, summary
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
    assert findings_table(good).count("yes") == 2
    assert json.loads(as_json(bad))[2] == {
        "what": "bytes", "measured": "7 bytes", "value": 7, "asked": "0 bytes", "holds": False,
    }  # fmt: skip


@pytest.mark.parametrize("command", [proofs.push, proofs.capacity, proofs.soak, proofs.exactness])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_run(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    with pytest.raises(SystemExit) as ended:
        app(["--json", "/nowhere/rows.json"])
    assert ended.value.code == 1
    assert "there is no directory /nowhere" in capsys.readouterr().err


# ---- exactness -------------------------------------------------------------------------------------------------------


def row(family: str, case: str, equal_tokens: int, largest: float) -> ExactnessRow:
    return ExactnessRow(
        family=family, what=family.upper(), num_layers=2, case=case, devices=2, tokens=8, equal_tokens=equal_tokens,
        largest_difference=largest, largest_logit=3.0,
    )  # fmt: skip


def test_a_family_holds_if_all_its_cases_do() -> None:
    rows = [row("a", "hmp 2:1", 8, 1e-5), row("a", "sp 3:1", 8, 2e-5), row("b", "hmp 2:1", 7, 1e-5)]
    lines = summary(rows).splitlines()
    assert "| A | 2 | 2 | 16 of 16 | 2.0e-05 | 3.0 | yes |" in lines
    assert "| B | 2 | 1 | 7 of 8 | 1.0e-05 | 3.0 | **no** |" in lines
    assert "| hmp 2:1 | 1.0e-05 | 1.0e-05 ! |" in details(rows)
    assert "| sp 3:1 | 2.0e-05 | - |" in details(rows)
    assert not row("a", "x", 8, 2e-3).holds


def test_an_unknown_family_or_strategy_is_named() -> None:
    with pytest.raises(BadSetting, match="'bert' is none of gpt2"):
        chosen_families("gpt2,bert")
    with pytest.raises(BadSetting, match="it is empty"):
        chosen_cases(" ,")
    assert {case.strategy for case in chosen_cases("pipeline,sp")} == {"pipeline", "sp"}
    assert {len(case.split) for case in CASES} == {1, 2, 3, 4}


def test_exactness_is_measured_and_a_wrong_weight_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    from agent.worker.transformer.shard import Shard, load_shard
    from tools.bench import exactness

    monkeypatch.setattr(exactness, "PROMPT_TOKENS", (1, 9))
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64,
    }  # fmt: skip
    bench = exactness.ExactnessBench(tmp_path, lambda what: None, num_tokens=6)
    cases = [Case("hmp", (2, 1), chunked=True)]
    with caplog.at_level(logging.DEBUG):
        (right,) = bench.measure("tiny", Family("Tiny", config, 2), cases)
    lines = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
    assert read_ledger(lines).steps >= 6  # what the soak reads is what the engine writes
    assert right.holds
    assert (right.equal_tokens, right.tokens, right.devices) == (12, 12, 2)

    def damaged(*arguments: Any) -> Shard:
        shard = load_shard(*arguments)
        shard.layers[0].norm1.weight += torch.ones_like(shard.layers[0].norm1.weight)
        return shard

    monkeypatch.setattr(exactness, "load_shard", damaged)
    (wrong,) = exactness.ExactnessBench(tmp_path / "again", lambda what: None, num_tokens=6).measure(
        "tiny", Family("Tiny", config, 2), cases
    )
    assert not wrong.holds
    assert wrong.largest_difference > 1e-3
