"""A worker that hangs, while its agent and the network are well, is replaced; no request notices more than a delay."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("highspy")

from support.home import TestHome
from support.models import save_random_model, small_bert
from support.profiles import MeasuredProfiles

pytestmark = pytest.mark.processes


def test_stopped_worker_is_replaced_and_no_request_is_lost(profiles: MeasuredProfiles, tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", small_bert())
    with TestHome(tmp_path, model, profiles) as running_home:
        for name in ("a", "b"):
            running_home.start_agent(name)
        running_home.start_coordinator("--strategy", "hmp", "--min-devices", "2")
        with running_home.ready() as home:
            before = home.hidden_states([7] * 16, timeout_seconds=60.0)
            victim = running_home.worker_pid("b")
            assert victim is not None
            os.kill(victim, signal.SIGSTOP)  # its connections stay open, and its agent goes on
            began = time.monotonic()
            after = home.hidden_states([7] * 16, timeout_seconds=60.0)
            # The agent needs 1.75 s, and a peer of the worker 5 s; the request's own limit would be 45 s.
            assert time.monotonic() - began < 30.0
            assert abs(after - before).max() < 1e-4
            assert "no sign of life" in running_home.log("b")
