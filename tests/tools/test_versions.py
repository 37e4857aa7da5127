"""The comparison of two checkouts: the order of rounds, the verdict, and the interface that versions share."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from hearth.errors import BadSetting
from tools.bench.experiment import Context, make_experiment, read_settings
from tools.bench.versions import Round, VersionsRow, compare


def measured(old: list[float], new: list[float], outputs: tuple[object, object] = (None, None)) -> VersionsRow:
    """A row for sides with these seconds; the first of each is the warm-up."""
    order: list[str] = []

    def side(name: str, seconds: list[float], output: object) -> Round:
        order.append(name)
        return Round({"step": seconds[order.count(name) - 1]}, output)

    sides = (lambda: side("old", old, outputs[0]), lambda: side("new", new, outputs[1]))
    (row,) = compare("case", sides, len(old) - 1, lambda line: None)
    assert order == ["old", "new", *(["old", "new", "new", "old"] * len(old))[: 2 * (len(old) - 1)]]
    return row


def test_rounds_alternate_and_ratios_are_paired() -> None:
    row = measured([9.0, 1.0, 2.0, 4.0, 8.0], [9.0, 1.1, 2.2, 4.4, 8.8])
    assert row.ratio == pytest.approx((1.1, 1.1, 1.1))
    assert (row.old_seconds, row.same_output) == ((1.0, 2.0, 4.0, 8.0), None)
    assert not row.holds


@pytest.mark.parametrize(
    ("ratios", "outputs", "holds"),
    [
        ([0.9, 0.9, 0.9], ("a", "a"), True),
        ([0.99, 1.02, 1.03], ("a", "a"), True),
        ([1.01, 1.02, 1.03], ("a", "a"), False),  # its interval does not reach 1
        ([0.99, 1.06, 1.07], ("a", "a"), False),
        ([0.9, 0.9, 0.9], ("a", "b"), False),
    ],
)
def test_verdict_follows_ratios_and_outputs(ratios: list[float], outputs: tuple[str, str], holds: bool) -> None:
    row = measured([1.0] * 4, [1.0, *ratios], outputs)
    assert row.holds == holds
    assert row.same_output == (outputs[0] == outputs[1])
    experiment = make_experiment(read_settings("versions"))
    assert bool(experiment.summary([row]).failure) != holds


def test_runner_requests_are_compatible_with_other_versions() -> None:
    """`versions` sends these to the runners of older checkouts too: add only optional parameters, and rename none."""
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    from tools.bench.runner import Runner

    requests = {
        "load": ["plan_id", "plan", "rank", "chunks", "store", "encrypt"],
        "connect": ["plan_id", "peers"],
        "run": ["plan_id", "num_rows", "trace"],
        "generate": ["plan_id", "prompt", "num_tokens"],
        "begin_to_compute": [],
        "end_computing": [],
    }
    for name, parameters in requests.items():
        taken = inspect.signature(getattr(Runner, name)).parameters
        required = [each for each, kind in taken.items() if kind.default is inspect.Parameter.empty]
        assert list(taken)[1 : len(parameters) + 1] == parameters
        assert set(required) <= {"self", *parameters}


def test_folder_other_than_a_checkout_is_rejected(tmp_path: Path) -> None:
    experiment = make_experiment(read_settings("versions", [f"old={tmp_path}"]))
    with pytest.raises(BadSetting, match="is not a checkout"):
        next(experiment.measure(Context(tmp_path, lambda step: None)))
