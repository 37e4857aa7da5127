"""`hearth learn` on real processes: plans are tried beside the deployed one, and what was learnt survives a restart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.graphs import save_two_branch_model
from support.home import LOOPBACK, TestHome
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

from hearth.client.sync import Home
from hearth.wire.messages import Learning

pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python here")
pytestmark = pytest.mark.processes

IMAGE = {"image": np.ones((1, 3, 64, 64), np.float32)}
OPTIONS = ("--min-devices", "2", "--time-limit", "1")


def learn(home: TestHome) -> Learning:
    """Run `hearth learn` until nothing is left to try; returns what it prints."""
    arguments = [
        "--minutes",
        "2",
        "--key",
        str(home.key),
        "--address",
        f"{LOOPBACK}:{home.port('coordinator')}",
        "--json",
    ]
    command = [sys.executable, "-m", "coordinator.cli.app", "learn", str(home.model_dir), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    return Learning.model_validate_json(done.stdout)


def trial_workers(home: Home) -> list[str]:
    workers = [each for device in home.devices().devices for each in device.workers]
    return [each.deployment for each in workers if each.deployment.endswith(".trial")]


def test_small_model_is_tried_on_the_other_device(profiles: MeasuredProfiles, tmp_path: Path) -> None:
    """One device is the best plan; the other, which has the weights for a loss, is as good and must be tried."""
    # Computing, of which both devices have the same profile, takes over 20 times what is measured of each (messages,
    # encryption), so that their prices differ by less than the trials' 10 % however loud the machine was at that moment.
    model = save_two_branch_model(tmp_path / "model.onnx", channels=96, size=64)
    with TestHome(tmp_path / "home", model, profiles) as home:
        with home.serving("ab", *OPTIONS) as client:
            wait_for("plans for a loss", lambda: client.status().redundancy.startswith("yes"))
            found = learn(home)
            assert found.trials
            assert {each.outcome for each in found.trials} <= {"not better", "deployed"}
            client.infer(IMAGE)
            wait_for("the end of all workers under trial", lambda: not trial_workers(client))
            assert (client.status().failed_requests, client.status().last_error) == (0, "")
        with home.serving("ab", *OPTIONS) as client:
            learning = client.status().learning
            assert learning is not None
            assert learning.trials[: len(found.trials)] == found.trials
        with home.serving("ab", *OPTIONS, "--no-learn") as client:
            assert client.status().learning is None
        with home.serving("ab", *OPTIONS, "--strategy", "doppler", "--learn", "1s") as client:
            wait_for("a policy that has learnt", lambda: "episodes in 1.00 s; kept in " in home.log("coordinator"))
            assert client.infer(IMAGE)
