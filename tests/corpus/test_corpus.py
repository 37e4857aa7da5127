"""The current tree against the recorded corpus: plans, the command line, messages, outputs bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import pytest
from corpus.cases import Case
from corpus.check import by_option, check_cli, check_messages, check_plans
from corpus.compare import Difference, Intended, differences, not_intended
from corpus.plans import PARTS, check_case, compare_case, run_case, subset_of
from corpus.store import load, load_intended


def unintended(part: str, found: Iterable[tuple[str, list[Difference]]]) -> list[str]:
    """Unintended differences, one line each."""
    intended = load_intended()
    return [f"{case}: {each}" for case, every in found for each in not_intended(part, case, every, intended)]


GROUPS = [
    (part, list(cases))
    for part in PARTS
    for _, cases in groupby(subset_of(part), key=lambda case: case.name.partition("-")[0])
]


@pytest.mark.parametrize(("part", "cases"), GROUPS, ids=[f"{part}-{cases[0].name}" for part, cases in GROUPS])
def test_plans_equal_the_record(part: str, cases: list[Case]) -> None:
    recorded = load(f"{part}.json.gz")
    assert not unintended(part, ((case.name, check_case(case, recorded[case.name])) for case in cases))


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_all_plans_equal_the_record(part: str) -> None:
    assert not unintended(part, check_plans(part))


def test_command_line_equals_the_record() -> None:
    assert not unintended("cli", check_cli())


def test_messages_equal_version_1_except_intended_changes() -> None:
    assert not unintended("messages", check_messages())


OUTPUTS = load("outputs.json.gz")


def family_of(case: str) -> str:
    return case.partition("-")[0]


@pytest.mark.parametrize("family", sorted(set(map(family_of, OUTPUTS["cases"]))))
def test_outputs_equal_the_record(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    pytest.importorskip("transformers")
    from corpus.exactness import compare_outputs, machine, names, outputs_of

    recorded, same = OUTPUTS["cases"], OUTPUTS["machine"] == machine()
    assert set(names()) == recorded.keys()
    cases = [name for name in names() if family_of(name) == family]
    found = ((name, compare_outputs(name, recorded[name], outputs_of(name, tmp_path), same)) for name in cases)
    assert not unintended("outputs", found)
    if not same:
        pytest.skip("close to what was recorded; bits were not compared: another processor, or other libraries")


def test_corpus_covers_strategies_and_errors() -> None:
    for part, strategies in (("transformers", 6), ("graphs", 7)):
        recorded = load(f"{part}.json.gz")
        assert len({name.partition("-")[0] for name in recorded}) >= 40
        chosen = [record["plan"]["strategy"] for record in recorded.values() if "plan" in record]
        assert len(set(chosen)) >= strategies - 1  # `auto` is no plan's strategy
        assert 0 < len(recorded) - len(chosen) < len(recorded) / 3


# ---- the checker ------------------------------------------------------------------------------------------------------


def test_differences_have_paths() -> None:
    recorded = {"a": [1, {"b": 2.0}], "c": None, "same": 1.0}
    found = differences(recorded, {"a": [1, {"b": 2.0000001}], "d": None, "same": 1.0 + 1e-15})
    assert [each.path for each in found] == ["a.1.b", "c", "d"]
    assert differences([1, 2], [1, 2, 3])
    assert differences(1, True)
    assert differences({"a": None}, {})


def test_each_option_differs_for_itself() -> None:
    recorded, found = (
        by_option({"parameters": [{"names": [name], "default": value} for name, value in each]})
        for each in (
            [("model", 1), ("--port", 1), ("--key", 1)],
            [("--address", 1), ("model", 1), ("--port", 2), ("--key", 1)],
        )
    )
    assert [each.path for each in differences(recorded, found)] == ["parameters.--address", "parameters.--port.default"]


def test_intended_difference_is_covered_and_marked_as_used() -> None:
    found = differences({"plan": {"x": 1, "y": 2}}, {"plan": {"x": 2, "y": 3}})
    entry, other = (Intended("graphs", "0?-*", path, "because") for path in ("plan.x", "plan.z"))
    used: set[Intended] = set()
    assert [each.path for each in not_intended("graphs", "01-net", found, [entry, other], used)] == ["plan.y"]
    assert used == {entry}
    assert len(not_intended("graphs", "11-net", found, [entry])) == 2


@pytest.mark.parametrize("path", [("plan", "devices", 0, "memory", "weights"), ("plan", "strategy"), ("alternatives",)])
def test_changed_record_is_detected(path: tuple[str | int, ...]) -> None:
    _, (case, *_) = GROUPS[1]
    record = run_case(case)
    assert compare_case(record, run_case(case)) == []
    tampered = place = run_case(case)
    for step in path[:-1]:
        place = place[step]  # type: ignore[index]
    place[path[-1]] = "something else"  # type: ignore[index]
    assert [each.path for each in compare_case(record, tampered)] == [".".join(map(str, path))]


def test_plan_of_a_timed_out_search_may_be_1_percent_slower() -> None:
    def record(seconds: float) -> dict[str, object]:
        plan = {
            "kind": "graph",
            "objective": "latency",
            "predicted": {"latency_seconds": seconds},
            "segments": [seconds],
        }
        return {"digest": "", "plan": plan, "ended": "clock"}

    assert compare_case(record(1.0), record(1.009)) == []
    assert compare_case(record(1.0), record(0.5)) == []
    assert [each.path for each in compare_case(record(1.0), record(1.02))] == ["seconds"]
