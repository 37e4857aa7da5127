"""A graph that neither device can hold, served in tiles by two devices whose memory limits the kernel enforces."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper
from support.onnx_models import graph, node, saved, value
from support.waiting import wait_for

from hearth.errors import HearthError
from tools.testbed import EmulatedDevice, Scenario, Testbed
from tools.testbed.cluster import what_is_missing

ort = pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python here")
pytestmark = pytest.mark.namespaces

# Of a device's processes, as the kernel enforces it, and of that for a worker. The agent and the process from which workers
# are forked take the rest. A worker takes 150 MiB and more besides its weights, and while it loads, up to 175 MiB more in
# proportion to them, by chance: so 432 MiB are too few for 320 MiB of weights, and enough for half of them.
_LIMIT_BYTES, _WORKER_BYTES = 528 << 20, 432 << 20
_ROWS, _WIDTH, _NUM_PRODUCTS = 64, 2048, 20  # 16 MiB of weights for each product
SCENARIO = Scenario(
    name="test-limits",
    scale_links=False,
    devices=tuple(
        EmulatedDevice(name=name, cpu_share=0.3, instruction_set="native", mbit=1000, memory_bytes=_LIMIT_BYTES)
        for name in ("one", "two")
    ),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Products of 64 rows with twenty matrices, each followed by Tanh."""
    nodes, weights, before = [], [], "x"
    for number in range(_NUM_PRODUCTS):
        after = "y" if number == _NUM_PRODUCTS - 1 else f"h{number}"
        nodes += [node("MatMul", f"{before} w{number}", f"product{number}"), node("Tanh", f"product{number}", after)]
        values = np.random.default_rng(number).standard_normal((_WIDTH, _WIDTH), np.float32) / _WIDTH**0.5
        weights.append(numpy_helper.from_array(values, f"w{number}"))
        before = after
    return saved(tmp_path / "products.onnx", graph(nodes, [value("x", [_ROWS, _WIDTH])], [value("y", None)], weights))


@pytest.fixture
def testbed(tmp_path: Path) -> Iterator[Testbed]:
    if reason := what_is_missing():
        pytest.skip(reason)
    with Testbed(SCENARIO, tmp_path / "home") as running:
        for name in running.cgroups:  # full speed: this test is about memory
            running.cgroups[name].set_cpu_share(len(os.sched_getaffinity(0)))
        yield running


@pytest.mark.thorough
def test_tiles_stay_below_limits_that_the_kernel_enforces(testbed: Testbed, model: Path, tmp_path: Path) -> None:
    try:
        for name in testbed.cgroups:
            testbed.start_agent(name, "--memory-bytes", f"{_WORKER_BYTES >> 20}MiB")
        testbed.start_coordinator(str(model), "--tiles", "2", "--no-learn", "--time-limit", "5", "--min-devices", "2")
        wait_for("serving", lambda: "\nserving " in testbed.log("coordinator.log"), 300.0)
        plan = json.loads(testbed.hearth("status", "--json"))["plan"]
        assert len(plan["devices"]) == 2  # one alone has no room for the weights
        inputs = {"x": np.random.default_rng(0).standard_normal((_ROWS, _WIDTH)).astype(np.float32)}
        np.savez(tmp_path / "inputs.npz", **inputs)  # type: ignore[arg-type]
        for _ in range(3):
            testbed.hearth("infer", str(tmp_path / "inputs.npz"), "--output", str(tmp_path / "outputs.npz"))
    except (AssertionError, HearthError) as error:
        logs = "\n".join(f"{log.name}:\n{log.read_text(errors='replace')}" for log in testbed.folder.glob("*.log"))
        raise AssertionError(f"{error}\n{logs}") from None
    (expected,) = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(["y"], inputs)
    assert np.abs(np.load(tmp_path / "outputs.npz")["y"] - expected).max() < 1e-4
    for name, cgroup in testbed.cgroups.items():
        assert cgroup.times_out_of_memory() == 0, name
        assert cgroup.held_bytes() < _LIMIT_BYTES
