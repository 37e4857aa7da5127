"""A home that was serving before an upgrade serves again after it, without a command and without pushing weights."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from support.home import TestHome
from support.models import save_random_model, small_bert
from support.profiles import MeasuredProfiles

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from hearth.plan.transformer import Pipeline

pytestmark = pytest.mark.processes

TOKENS = list(range(5, 45))
# Written by the last commit with version 1 of plans and messages (ab74c37), serving `small_bert` as a pipeline.
SERVING_V1 = Path(__file__).parent / "serving_v1.json"


def test_v1_state_is_served_without_a_command(profiles: MeasuredProfiles, tmp_path: Path) -> None:
    """The names of the chunks are those of version 1, too; `test_sharding` checks their hashes."""
    model_dir = save_random_model(tmp_path / "model", small_bert())
    with TestHome(tmp_path, model_dir, profiles) as home:
        home.start_agent("a")
        home.start_agent("b")
        home.start_coordinator("--strategy", "hmp", "--min-devices", "2")  # the stores then hold all chunks
        with home.ready() as client:
            before = client.hidden_states(TOKENS)
            ids = {device.name: device.device_id for device in client.devices().devices}
        os.kill(home.pid("coordinator"), signal.SIGTERM)
        home.wait("coordinator")

        saved = json.loads(SERVING_V1.read_text())
        saved["goal"]["model_dir"] = str(model_dir)
        for device in saved["plan"]["devices"]:
            device["device_id"] = ids[device["name"]]
        saved["last_epoch"] = json.loads((tmp_path / "coordinator" / "serving.json").read_text())["last_epoch"]
        (tmp_path / "coordinator" / "serving.json").write_text(json.dumps(saved))

        home.start_coordinator(model=False)
        with home.ready() as client:
            after, plan = client.hidden_states(TOKENS), client.status().plan
        assert plan is not None
        assert isinstance(plan.body, Pipeline)
        assert plan.body.layers == tuple(saved["plan"]["body"]["layers"])
        assert [device.name for device in plan.devices] == [device["name"] for device in saved["plan"]["devices"]]
        assert np.abs(after - before).max() < 1e-5
