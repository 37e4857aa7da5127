"""A graph served by a home of real processes: equal to onnxruntime, concurrent requests, lost devices."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.graphs import save_two_branch_model
from support.home import TestHome, home_of
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

from hearth.client.sync import Home
from hearth.errors import BadRequest, HearthError

ort = pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python here")
pytestmark = pytest.mark.processes

Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some tens of milliseconds per request: worth distributing, and long enough to kill a device meanwhile."""
    return save_two_branch_model(tmp_path_factory.mktemp("model") / "two-branches.onnx", channels=48, size=96, depth=3)


@pytest.fixture(scope="module")
def running_home(
    model: Path, profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestHome]:
    options = ("--objective", "throughput", "--strategy", "pipeline-exact")
    with home_of("abc", tmp_path_factory.mktemp("home"), model, profiles, *options) as home:
        home.ready().close()
        yield home


def image(seed: int = 0) -> Arrays:
    return {"image": np.random.default_rng(seed).standard_normal((1, 3, 96, 96)).astype(np.float32)}


def reference(model: Path, inputs: Arrays) -> Arrays:
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return {"scores": session.run(["scores"], inputs)[0]}


def assert_equal(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() < 1e-4


def test_concurrent_requests_equal_onnxruntime(running_home: TestHome, model: Path) -> None:
    with running_home.connect() as home, ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(home.infer, image(seed)) for seed in range(12)]
        for seed, answer in enumerate(asked):
            assert_equal(answer.result(30), reference(model, image(seed)))
        plan = home.status().plan
    assert plan is not None
    assert plan.num_ranks > 1
    assert plan.body.objective == "throughput"


def test_invalid_input_is_named(running_home: TestHome) -> None:
    with running_home.connect() as home:
        info = home.model_info()
        assert [(each.name, each.dtype, each.shape) for each in info.inputs] == [("image", "float32", (1, 3, 96, 96))]
        right = image()["image"]
        for inputs, reason in (
            ({"picture": right}, "no input 'picture'; it takes image"),
            ({}, "input 'image' is missing"),
            ({"image": right.astype(np.float64)}, "'image' must be float32, not float64"),
            ({"image": right[:, :1]}, r"'image' must have the shape \[1, 3, 96, 96\], not \[1, 1, 96, 96\]"),
            ({"image": right.astype(complex)}, "'image' cannot be sent"),
        ):
            with pytest.raises(BadRequest, match=reason):
                home.infer(inputs)
        with pytest.raises(BadRequest, match="graph of operators"):
            home.embed(["no sentence"])
        assert home.infer(image())["scores"].shape == (1, 48)


def test_killed_worker_is_reported_and_starts_again(running_home: TestHome, model: Path) -> None:
    with running_home.connect() as home:
        plan = home.status().plan
        assert plan is not None
        victim = plan.devices[0].name
        worker = running_home.worker_pid(victim)
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
        wait_for("the loss to be seen", lambda: "worker" in home.status().last_error)
        assert_equal(home.infer(image(), timeout_seconds=60.0), reference(model, image()))
        after = home.status().plan
        assert after is not None
        assert [device.name for device in after.devices] == [device.name for device in plan.devices]
        assert running_home.worker_pid(victim) not in (None, worker)


def test_device_loss_fails_no_request(running_home: TestHome, model: Path) -> None:
    """Two devices are left for the tests that follow."""
    with running_home.connect() as home:
        plan = home.status().plan
        assert plan is not None
        load = _Load(home)
        try:
            wait_for("answers", lambda: len(load.answers) > 10)
            victim = plan.devices[-1].name
            running_home.kill(victim)
            wait_for(
                "serving to go on", lambda: load.errors or (home.ready() and home.status().plan.epoch > plan.epoch)
            )  # type: ignore[union-attr]
            count = len(load.answers)
            wait_for("answers again", lambda: len(load.answers) > count + 10)
        finally:
            load.end()
        assert load.errors == []
        after = home.status().plan
        assert after is not None
        assert victim not in [device.name for device in after.devices]
        assert_equal(home.infer(image(3)), reference(model, image(3)))


class _Load:
    """Requests from several threads, without pause."""

    threads = 8

    def __init__(self, home: Home) -> None:
        self.answers: list[float] = []
        self.errors: list[HearthError] = []
        self._home = home
        self._ending = threading.Event()
        self._running = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(self.threads)]
        for thread in self._running:
            thread.start()

    def _ask(self, seed: int) -> None:
        inputs = image(seed)
        while not self._ending.is_set():
            try:
                self._home.infer(inputs, timeout_seconds=30.0)
                self.answers.append(time.monotonic())
            except HearthError as error:
                self.errors.append(error)
                time.sleep(0.2)

    def end(self) -> None:
        self._ending.set()
        for thread in self._running:
            thread.join(40)


def test_graph_is_served_again_after_a_power_cut(running_home: TestHome) -> None:
    names = [name for name in "abc" if running_home.runs(name)]
    running_home.stop("coordinator", 60.0)
    options = ("--min-devices", "2", "--objective", "latency", "--strategy", "critical-path")
    running_home.start_coordinator(*options)
    with running_home.ready() as home:
        before, plan = home.infer(image())["scores"], home.status().plan
    for name in (*names, "coordinator"):
        running_home.kill(name)
    for name in reversed(names):
        running_home.start_agent(name)
    running_home.start_coordinator(model=False)
    with running_home.ready() as home:
        again = home.status().plan
        assert np.array_equal(home.infer(image())["scores"], before)
    assert plan is not None
    assert again is not None
    assert again.epoch > plan.epoch
    assert again.body.segments == plan.body.segments
    pushed = re.findall(r"sent ([\d.]+ \w+) of weights", running_home.log_of_run("coordinator"))
    assert pushed[-1] == "0 B"  # all chunks were in the stores
