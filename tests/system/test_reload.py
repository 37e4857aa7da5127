"""Worker processes go on over changes of plan, in a home of real processes on the loopback interface."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from support.home import home_of
from support.models import save_random_model, small_bert
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

pytestmark = pytest.mark.processes

TOKENS = list(range(5, 45))


def test_survivors_of_a_killed_worker_keep_their_processes(
    profiles: MeasuredProfiles, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model_dir = save_random_model(tmp_path_factory.mktemp("model"), small_bert(num_hidden_layers=4))
    with home_of("abc", tmp_path, model_dir, profiles, "--strategy", "hmp") as running_home:
        with running_home.ready() as home:
            before = home.hidden_states(TOKENS)
            wait_for("plans made ahead", lambda: home.status().redundancy.startswith("yes, any one device"), 120)
            wait_for("chunks read ahead", lambda: "B on disk, " in home.status().redundancy, 30)
            pids = {name: running_home.worker_pid(name) for name in ("a", "b", "c")}
            victim = pids["b"]
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            again = home.hidden_states(TOKENS, timeout_seconds=60.0)  # waits for the next plan
            pause = time.monotonic() - killed
            np.testing.assert_allclose(again, before, rtol=1e-4, atol=1e-4)
            plan = home.status().plan
            assert plan is not None
            assert {device.name for device in plan.devices} == {"a", "b", "c"}  # the dead worker starts again
            assert {name: running_home.worker_pid(name) for name in ("a", "c")} == {
                name: pids[name] for name in ("a", "c")
            }
            history = [(round(each.seconds_ago, 2), each.phase) for each in home.status().history]
            print(f"pause {pause:.2f} s: {history}")
