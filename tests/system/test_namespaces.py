"""Three devices, each in its own network namespace: mDNS, links and rings over a virtual network."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.models import minilm
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

from agent.daemon.identity import load_identity
from tools.testbed import EmulatedDevice, Scenario, Testbed
from tools.testbed.cluster import what_is_missing

pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytestmark = pytest.mark.namespaces

NAMES = ("one", "two", "three")
SCENARIO = Scenario(
    name="test-home",
    scale_links=False,
    devices=tuple(EmulatedDevice(name=name, cpu_share=0.3, instruction_set="native", mbit=1000) for name in NAMES),
)


@pytest.mark.thorough
def test_home_in_namespaces_discovers_devices_serves_and_traces(profiles: MeasuredProfiles, tmp_path: Path) -> None:
    if reason := what_is_missing():
        pytest.skip(reason)
    model_dir = minilm()
    trace = tmp_path / "trace.json"
    with Testbed(SCENARIO, tmp_path / "home") as testbed:

        def hearth(*arguments: str) -> str | None:
            """Run on another device than the coordinator's, which it must discover."""
            done = subprocess.run(
                testbed.command("two", "hearth", *arguments),
                capture_output=True, text=True, timeout=180, check=False, env={**os.environ, **testbed.environment()},
            )  # fmt: skip
            return done.stdout if done.returncode == 0 else None

        def serving() -> dict[str, Any] | None:
            status = hearth("status", "--json")
            found = json.loads(status) if status else None
            return found if found and found["state"].startswith("serving") else None

        for name in NAMES:
            # Full speed: this test is about the network.
            testbed.cgroups[name].set_cpu_share(len(os.sched_getaffinity(0)))
        try:
            ids = []
            for name in NAMES:
                with load_identity(testbed.folder / name / "state") as identity:
                    ids.append(identity.device_id)
            profiles.copy_to(testbed.folder / "coordinator" / "profiles", model_dir, ids)
            for name in NAMES:
                testbed.start_agent(name)  # default ports, which do not collide between namespaces
            testbed.start_coordinator(str(model_dir), "--strategy", "hmp", "--min-devices", "3")
            wait_for("serving", lambda: "\nserving " in testbed.log("coordinator.log"))
            status = wait_for("serving", serving)
            assert [device["name"] for device in status["plan"]["devices"]] != []
            hosts = {f"{testbed.address(name)}:47800" for name in NAMES}
            assert {device["host"] for device in status["devices"]} == hosts
            answer = hearth("embed", "Turn on the light.", "It is dark.", "--json", "--trace", str(trace))
            assert answer is not None
        except AssertionError as error:
            logs = "\n".join(f"{log.name}:\n{log.read_text(errors='replace')}" for log in testbed.folder.glob("*.log"))
            raise AssertionError(f"{error}\n{logs}") from None
    assert len(json.loads(answer)["embeddings"]) == 2
    bars = [bar for bar in json.loads(trace.read_text())["traceEvents"] if bar["ph"] == "X"]
    assert {bar["cat"] for bar in bars} >= {"compute", "transfer"}
    assert len([bar for bar in bars if bar["cat"] == "transfer"]) >= 6 * 4 * 3  # layers, phases, tiles
