"""The processes that a benchmark measures with."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import wait_for

from tools.bench.drive import EngineRunners


def test_a_runner_computes_until_told_to_stop() -> None:
    pytest.importorskip("torch")
    from tools.bench.runner import Runner

    runner = Runner("127.0.0.1")
    for _ in range(2):
        runner.begin_to_compute()
        layers = runner._layers
        assert layers is not None
        before = layers.num_runs
        wait_for("two layers", lambda before=before, layers=layers: layers.num_runs >= before + 2)  # type: ignore[misc]
        runner.end_computing()
        assert runner._computing is not None
        assert not runner._computing.is_alive()


class _RecordedRunners(EngineRunners):
    """Runners without processes that record their calls in order."""

    def __init__(self, devices: tuple[str, ...], all_busy: bool) -> None:
        self._devices = devices if all_busy else ()
        self._plans = {"plan": SimpleNamespace(devices=[SimpleNamespace(name="b")])}  # type: ignore[dict-item]
        self.called: list[tuple[str, tuple[str, ...]]] = []

    def call_each(self, requests: Mapping[str, Mapping[str, Any]], seconds: float = 0.0) -> dict[str, dict[str, Any]]:
        self.called += [(str(request["do"]), tuple(requests)) for request in list(requests.values())[:1]]
        answer = {
            "began": 1.0, "ended": 3.0, "sums": [1.0], "sent_bytes": 0,
            "raw_bytes": 0, "lz4_saved_bytes": 0, "trace": [],
        }  # fmt: skip
        return dict.fromkeys(requests, answer)


def test_devices_without_a_part_in_a_step_compute_meanwhile() -> None:
    runners = _RecordedRunners(("a", "b", "c"), all_busy=True)
    assert runners.run("plan", 8).seconds == 2.0
    assert runners.called == [("begin_to_compute", ("a", "c")), ("run", ("b",)), ("end_computing", ("a", "c"))]
    runners = _RecordedRunners(("a", "b", "c"), all_busy=False)
    runners.run("plan", 8)
    assert runners.called == [("run", ("b",))]
