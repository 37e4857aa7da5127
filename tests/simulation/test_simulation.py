"""Schedules of faults on simulated homes: the invariants hold in each of them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from simulation.command import ENVIRONMENT
from simulation.run import run_schedule
from simulation.schedule import LONG_SECONDS, Fault, generate

TESTS = Path(__file__).parents[1]
NUM_SCHEDULES = 2000 if "CI" in os.environ else 100  # `make simulate` runs 100,000
NUM_PARTS = 4  # tests, so that all cores take part; each imports all programs again


def run(*arguments: str, module: str = "simulation.run") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
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


@pytest.mark.slow
def test_deliberate_defects_are_noticed() -> None:
    ended = run(module="simulation.mutations")
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


@pytest.mark.slow
def test_nothing_grows_while_devices_come_and_go() -> None:
    ended = run("--hours", "0.5", module="simulation.churn")
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


@pytest.fixture
def abandoned_tasks_end() -> Iterator[None]:
    """Tasks of killed processes never end; Python reports that once they are collected."""
    yield
    gc.collect()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("abandoned_tasks_end")
def test_a_stopped_coordinator_frees_its_agents_at_once() -> None:
    """Also while another agent does not answer."""
    unreachable = Fault(at=5.0, kind="kill agent", host="d0", seconds=6.9)
    schedule = replace(generate(0), seconds=LONG_SECONDS, num_devices=2, faults=(unreachable,), thorough=False)
    assert run_schedule(schedule).violations == ()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("abandoned_tasks_end")
@pytest.mark.parametrize("seed", [31726, 38048, 41098, 51490, 52742, 53916, 64713, 66765, 88675])
def test_seeds_that_have_failed(seed: int) -> None:
    """Their causes are mended; each needed a coincidence that the first 2000 seeds do not contain."""
    assert run_schedule(generate(seed)).violations == ()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("abandoned_tasks_end")
@pytest.mark.parametrize("seed", range(10))
def test_jumps_of_the_wall_clock_by_a_year_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that a program reads it, also within one process."""
    jumps, real = Random(seed), time.time_ns

    def jumping_ns() -> int:
        return real() + jumps.choice((-1, 0, 1)) * 365 * 86400 * 10**9

    monkeypatch.setattr(time, "time_ns", jumping_ns)
    monkeypatch.setattr(time, "time", lambda: jumping_ns() / 1e9)
    assert run_schedule(generate(seed)).violations == ()
