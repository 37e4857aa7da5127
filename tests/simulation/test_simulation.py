"""Schedules of faults on simulated homes: the invariants hold in each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NUM_SCHEDULES = 200
NUM_PARTS = 8  # tests, so that all cores take part


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))}
    return subprocess.run(
        [sys.executable, "-m", "simulation.run", *arguments], env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_invariants_hold_under_random_faults(part: int) -> None:
    first = part * NUM_SCHEDULES // NUM_PARTS
    ended = run("--seeds", f"{first}:{first + NUM_SCHEDULES // NUM_PARTS}")
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


def test_a_seed_repeats_exactly() -> None:
    first, second = (run("--seeds", "4:6", "--verbose").stdout.rsplit("\n", 2)[0] for _ in range(2))
    assert "calls" in first
    assert first.partition("schedules,")[0] == second.partition("schedules,")[0]
