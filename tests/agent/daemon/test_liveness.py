"""The verdict on a worker's life, from its signs and from what the kernel says about its process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.waiting import wait_for

from agent.daemon.liveness import (
    BUSY_SILENT_SECONDS,
    LOADING_SILENT_SECONDS,
    MAX_THREADS,
    SILENT_SECONDS,
    STOPPED_SECONDS,
    TICK_SECONDS,
    Liveness,
    ProcessSample,
    parse_process,
)
from hearth.wire.messages import WorkerProgress

ASLEEP = ProcessSample(cpu_seconds=1.0, waits_for_processor=False, stopped=False)
STOPPED = ProcessSample(cpu_seconds=1.0, waits_for_processor=False, stopped=True)
STARVED = ProcessSample(cpu_seconds=1.0, waits_for_processor=True, stopped=False)
IDLE = WorkerProgress()


def seconds_until_hang(sample: ProcessSample | None, loading: bool = False, limit: float = 60.0) -> float | None:
    """How long a worker may be silent while its process looks like this; None: for at least `limit`."""
    life = Liveness().after_sign(IDLE).after_tick(0.0, sample)
    for tick in range(1, int(limit / TICK_SECONDS)):
        life = life.after_tick(TICK_SECONDS, sample)
        if life.hang(loading):
            return tick * TICK_SECONDS
    return None


def busy(life: Liveness, seconds: float) -> Liveness:
    """Silence while the process uses the processor."""
    for _ in range(int(seconds / TICK_SECONDS)):
        used = life.sample.cpu_seconds if life.sample else 0.0
        life = life.after_tick(TICK_SECONDS, ProcessSample(used + 0.1, waits_for_processor=False, stopped=False))
    return life


def test_silent_process_hangs_after_the_limit_without_processor_time_and_sooner_if_it_is_stopped() -> None:
    assert seconds_until_hang(ASLEEP) == SILENT_SECONDS
    assert seconds_until_hang(STOPPED) == STOPPED_SECONDS < SILENT_SECONDS


def test_loading_worker_may_wait_longer_for_its_disk_but_not_be_stopped() -> None:
    assert seconds_until_hang(ASLEEP, loading=True) == LOADING_SILENT_SECONDS
    assert seconds_until_hang(STOPPED, loading=True) == STOPPED_SECONDS


@pytest.mark.parametrize("sample", [STARVED, None])
def test_process_that_waits_for_a_processor_has_the_longer_limit(sample: ProcessSample | None) -> None:
    assert seconds_until_hang(sample) == BUSY_SILENT_SECONDS
    assert seconds_until_hang(sample, loading=True) is None


def test_process_that_uses_the_processor_has_the_longer_limit() -> None:
    assert busy(Liveness(), BUSY_SILENT_SECONDS - TICK_SECONDS).hang(loading=False) is None
    assert "although it uses the processor" in (busy(Liveness(), BUSY_SILENT_SECONDS).hang(loading=False) or "")
    assert busy(Liveness(), 10 * BUSY_SILENT_SECONDS).hang(loading=True) is None


def test_signs_of_life_reset_the_silence() -> None:
    life = Liveness()
    for _ in range(100):
        life = life.after_sign(IDLE).after_tick(1.0, ASLEEP).after_tick(1.0, ASLEEP)
        assert life.hang(loading=False) is None


def test_stall_of_the_agent_itself_is_not_the_workers_silence() -> None:
    life = Liveness().after_sign(IDLE).after_tick(0.0, ASLEEP).after_tick(3600.0, ASLEEP)
    assert life.hang(loading=False) is None
    assert life.silent_seconds == 2 * TICK_SECONDS


def test_step_that_computes_past_its_limit_is_a_hang_and_waits_for_peers_do_not_count() -> None:
    waiting = WorkerProgress(step=7, step_seconds=40.0, busy_seconds=1.0, limit_seconds=4.5)
    assert Liveness().after_sign(waiting).hang(loading=False) is None
    computing = WorkerProgress(step=7, step_seconds=40.0, busy_seconds=4.6, limit_seconds=4.5)
    assert "computed step 7" in (Liveness().after_sign(computing).hang(loading=False) or "")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_process_state_is_read_from_proc() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:

        def sample() -> ProcessSample:
            stat = Path(f"/proc/{child.pid}/stat").read_text()
            return parse_process(stat, [stat], os.sysconf("SC_CLK_TCK"))

        wait_for("the use of the processor", lambda: sample().cpu_seconds >= 0.05, 20)
        assert sample().waits_for_processor
        assert not sample().stopped
        child.send_signal(19)
        wait_for("the stop", lambda: sample().stopped, 20)
        stopped = sample()
        assert not stopped.waits_for_processor
        assert stopped.cpu_seconds == sample().cpu_seconds
    finally:
        child.kill()
        child.wait()


def test_command_names_with_spaces_and_parentheses_are_skipped() -> None:
    stat = "42 (a) R (b) S " + " ".join(["0"] * 10) + " 150 50 0 0 0 0 7 " + " ".join(["0"] * 30)
    assert parse_process(stat, [], 100) == ProcessSample(
        cpu_seconds=2.0, waits_for_processor=False, stopped=False, num_threads=7
    )


def test_process_with_too_many_threads_is_ended_also_while_it_loads() -> None:
    many = replace(ASLEEP, num_threads=MAX_THREADS + 1)
    assert Liveness().after_tick(0.0, replace(ASLEEP, num_threads=MAX_THREADS)).hang(loading=True) is None
    assert "threads" in (Liveness().after_tick(0.0, many).hang(loading=True) or "")
