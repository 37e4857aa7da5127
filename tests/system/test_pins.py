"""Two models on two devices that have memory for one each: the pinned one is served after the loss of its device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.graphs import save_two_branch_model
from support.home import TestHome
from support.waiting import wait_for

from hearth.client.sync import Home
from hearth.errors import MemoryTaken
from hearth.wire.messages import ServedModel

ort = pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python here")
pytestmark = pytest.mark.processes

IMAGE = {"image": np.random.default_rng(0).standard_normal((1, 3, 48, 48)).astype(np.float32)}


def served(client: Home) -> dict[str, ServedModel]:
    return {each.deployment: each for each in client.models()}


def test_pinned_model_takes_the_memory_that_is_left_after_a_loss(tmp_path: Path) -> None:
    model = save_two_branch_model(tmp_path / "model.onnx", channels=8, size=48, depth=2)
    (expected,) = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(["scores"], IMAGE)
    (tmp_path / "home").mkdir()
    with TestHome(tmp_path / "home", model) as home:
        home.start_agent("a")
        home.start_coordinator("--as", "other", "--no-learn")
        with home.ready(180.0) as client:
            (plan_bytes,) = [each.memory_bytes for each in client.models()]
        limit = ("--memory-bytes", str(plan_bytes * 3 // 2))
        home.stop("a")
        for name in "ab":
            home.start_agent(name, *limit)
        with home.ready(180.0) as client:
            goal = {"kind": "graph", "model_file": str(model), "learn": False, "pinned": True}
            client.serve_model(json.dumps(goal), "pinned")
            wait_for("both models", lambda: all(each.ready for each in served(client).values()), 180.0)
            (lost,) = served(client)["pinned"].devices
            (kept,) = served(client)["other"].devices
            assert {lost, kept} == {"a", "b"}
            home.kill(lost)
            wait_for("the pinned model", lambda: served(client)["pinned"].devices == (kept,), 60.0)
            assert np.abs(client.infer(IMAGE, 60.0, model="pinned")["scores"] - expected).max() < 1e-4
            missing_bytes = wait_for("what is missing", lambda: served(client)["other"].missing_bytes)
            assert 0 < missing_bytes <= plan_bytes
            with pytest.raises(MemoryTaken) as taken:
                client.infer(IMAGE, 1.0, model="other")
            assert taken.value.missing_bytes == missing_bytes
            assert taken.value.holders.startswith("pinned holds ")
            home.start_agent(lost, *limit)
            assert np.abs(client.infer(IMAGE, 60.0, model="other")["scores"] - expected).max() < 1e-4
