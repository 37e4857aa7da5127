"""`hearth demo --json`, as a program reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.models import minilm
from support.waiting import WAIT_LIMIT_SECONDS

pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytestmark = pytest.mark.processes


@pytest.mark.thorough
def test_demo_prints_json_and_equals_transformers() -> None:
    program = str(Path(sys.executable).parent / "hearth")
    command = [program, "demo", "--model", str(minilm()), "--json", "--num-devices", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    differences = ["max_abs_difference", "latency_seconds", "single_device_latency_seconds"]
    assert list(result) == ["devices", "links", "plan", "answers", *differences]
    assert len(result["devices"]) == 2
    assert len(result["links"]) == 2
    assert result["plan"]["body"]["strategy"] == "hmp"
    assert 0 < result["max_abs_difference"] <= 1e-5
    nearest = {answer["text"]: answer["command"] for answer in result["answers"]}
    assert nearest["I am freezing, can you make it warmer?"] == "Set the heating to 21 degrees."
