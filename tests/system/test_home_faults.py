"""Homes of real processes that stop, or lose a worker or a device, and those with limits: queue, memory, disk, multicast."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.home import LOOPBACK, TestHome, home_of
from support.models import save_random_model, small_bert, small_decoder
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from hearth.client.sync import Home, connect
from hearth.errors import ModelDoesNotFit, QueueFull

pytestmark = pytest.mark.processes

TOKENS = list(range(5, 45))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), small_bert())


@pytest.fixture(scope="module")
def slow_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a request takes a good part of a second and can be interrupted."""
    config = small_bert(
        num_hidden_layers=8, hidden_size=512, num_attention_heads=8, intermediate_size=2048, max_position_embeddings=512,
    )  # fmt: skip
    return save_random_model(tmp_path_factory.mktemp("slow"), config)


@pytest.fixture(scope="module")
def slow_home(
    slow_model_dir: Path, profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestHome]:
    """For tests that begin with those that need the fewest devices."""
    with TestHome(tmp_path_factory.mktemp("slow_home"), slow_model_dir, profiles) as running_home:
        yield running_home


@pytest.fixture(scope="module")
def queue_of_two(slow_home: TestHome) -> TestHome:
    """One device, and a queue of two requests."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("HEARTH_COORDINATOR_QUEUE_LIMIT", "2")
        slow_home.start_agent("a")
        slow_home.start_coordinator("--strategy", "local")
        slow_home.ready().close()
    return slow_home


def test_status_shows_the_phase_and_its_history(queue_of_two: TestHome) -> None:
    with queue_of_two.connect() as home:
        status = home.status()
    assert status.phase == "serving"
    assert [move.phase for move in status.history][-4:] == ["pushing", "loading", "warming", "serving"]
    shown = queue_of_two.run("status", check=True).stdout
    assert "History" in shown
    assert "warm-up request completed" in shown
    told = json.loads(queue_of_two.run("status", "--json", check=True).stdout)
    assert told["phase"] == "serving"


def test_full_queue_rejects_and_serves_queued_requests(queue_of_two: TestHome) -> None:
    with queue_of_two.connect() as home, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(home.hidden_states, [7] * 512) for _ in range(8)]
        outcomes = [future.exception() or future.result().shape for future in asked]
    refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
    assert refused
    assert refused[0].limit == 2
    assert [outcome for outcome in outcomes if not isinstance(outcome, QueueFull)] == [(512, 512)] * (8 - len(refused))


def test_planned_stop_and_restart_lose_no_request(queue_of_two: TestHome) -> None:
    """The last test of the home with this queue: it ends the coordinator."""
    port = queue_of_two.port("coordinator")
    with queue_of_two.connect() as home:
        expected = home.hidden_states([7] * 512)
        answers: list[np.ndarray] = []
        ended = threading.Event()

        def ask() -> None:
            while not ended.is_set():
                answers.append(home.hidden_states([7] * 512, timeout_seconds=120.0))

        with ThreadPoolExecutor(1) as executor:
            asking = executor.submit(ask)
            wait_for("a request to be served", lambda: len(answers) > 1)
            os.kill(queue_of_two.pid("coordinator"), signal.SIGTERM)
            assert queue_of_two.wait("coordinator", 60.0) == 0
            before = len(answers)
            queue_of_two.start_coordinator("--strategy", "local", "--port", str(port))
            wait_for("requests to be served again", lambda: len(answers) > before or asking.done())
            ended.set()
            asking.result()
    assert all(np.array_equal(answer, expected) for answer in answers)
    assert "stopping: running requests finish, new ones are refused" in queue_of_two.log("coordinator")
    queue_of_two.stop("coordinator", 60.0)


def test_lost_device_loses_no_request(slow_home: TestHome) -> None:
    with slow_home.serving("ab", "--strategy", "hmp", "--min-devices", "2") as home:
        # SIGSTOP rather than SIGKILL: like a device whose cable was pulled, it sends nothing.
        pids = [slow_home.pid("b"), slow_home.worker_pid("b")]
        assert all(pids)
        try:
            _harm_in_mid_request(home, lambda: [os.kill(pid, signal.SIGSTOP) for pid in pids])
            assert home.hidden_states([7] * 64, timeout_seconds=60.0).shape == (64, 512)
            plan = home.status().plan
            assert plan is not None
            assert [device.name for device in plan.devices] == ["a"]
            assert "trying again" not in slow_home.log_of_run("coordinator")
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


def test_killed_worker_loses_no_request(slow_home: TestHome) -> None:
    with slow_home.serving("abc", "--strategy", "hmp", "--min-devices", "3") as home:
        victim = slow_home.worker_pid("b")
        assert victim is not None
        _harm_in_mid_request(home, lambda: os.kill(victim, signal.SIGKILL))
        again = home.hidden_states([7] * 64, timeout_seconds=60.0)
        assert again.shape == (64, 512)
        plan = home.status().plan
        assert plan is not None
        assert {device.name for device in plan.devices} == {"a", "b", "c"}
        assert slow_home.worker_pid("b") not in (None, victim)
        # loading the plan once more was sufficient
        assert "trying again" not in slow_home.log_of_run("coordinator")


def _harm_in_mid_request(home: Home, harm: Callable[[], object]) -> None:
    """Send requests without pause, call `harm` during one, and wait for the next answers; none may fail."""
    began, ended, num_served = threading.Event(), threading.Event(), 0

    def ask() -> None:
        nonlocal num_served
        while not ended.is_set():
            began.set()
            home.hidden_states([7] * 512, timeout_seconds=60.0)
            num_served += 1

    with ThreadPoolExecutor(1) as executor:
        asking = executor.submit(ask)
        try:
            began.wait(60)
            before = num_served
            wait_for("a request to be served", lambda: num_served > before or asking.done())
            before = num_served
            harm()
            # The second answer from now is the first to a request that began after the harm.
            wait_for("requests to be served again", lambda: num_served > before + 1 or asking.done())
        finally:
            ended.set()
        asking.result()
    assert home.status().failed_requests == 0


def test_contradictory_settings_end_serve_with_status_2(profiles: MeasuredProfiles, tmp_path: Path) -> None:
    """Retrying would not help; systemd does not restart the service at this status."""
    model = save_random_model(tmp_path / "model", small_decoder("llama"), generates=True)
    with TestHome(tmp_path, model, profiles) as running_home:
        running_home.start_coordinator("--strategy", "sp", "--context", "64", "--seq-len", "16", "--min-devices", "1")
        # It waits for devices.
        wait_for("a first attempt", lambda: "trying again: No device" in running_home.log("coordinator"))
        running_home.start_agent("a")
        running_home.start_agent("b")
        assert running_home.wait("coordinator", 120.0) == 2
        assert "error: The setting --strategy cannot be used: sp needs a context" in running_home.log("coordinator")


def test_missing_bytes_are_reported_if_the_model_does_not_fit(
    model_dir: Path, profiles: MeasuredProfiles, tmp_path: Path
) -> None:
    with TestHome(tmp_path, model_dir, profiles) as running_home:
        running_home.start_agent("a", "--memory-bytes", "100MiB")
        running_home.start_coordinator()
        with running_home.connect() as home:
            state = wait_for(
                "the complaint",
                lambda: "bytes are missing" in home.readiness().state and home.readiness(),
            )
            assert not state.ready
            with pytest.raises(ModelDoesNotFit, match="bytes are missing"):
                home.hidden_states(TOKENS, timeout_seconds=1.0)


def test_full_store_is_reported_and_the_agent_survives(
    model_dir: Path, profiles: MeasuredProfiles, tmp_path: Path
) -> None:
    with TestHome(tmp_path, model_dir, profiles) as running_home:
        running_home.start_agent("a", "--store-bytes", "1MiB")
        running_home.start_coordinator()
        with running_home.connect() as home:
            wait_for("the complaint", lambda: "does not fit into the shard stores" in home.readiness().state)
            assert [device.state for device in home.devices().devices] == ["alive"]


def test_corrupt_chunk_is_detected_discarded_and_sent_again(
    model_dir: Path, profiles: MeasuredProfiles, tmp_path: Path
) -> None:
    with home_of("a", tmp_path, model_dir, profiles) as running_home:
        with running_home.ready() as home:
            before = home.hidden_states(TOKENS)
        running_home.kill("a")
        chunk = max((tmp_path / "a" / "store").glob("??/*"), key=lambda path: path.stat().st_size)
        whole = chunk.read_bytes()
        damaged = bytearray(whole)
        damaged[-1] ^= 1
        chunk.write_bytes(damaged)
        running_home.start_agent("a")
        with running_home.connect() as home:
            wait_for(
                "serving to begin again",
                lambda: "restarted" in home.status().last_error or not home.ready(),
            )
            home.wait_ready(60.0)
            assert np.array_equal(home.hidden_states(TOKENS), before)
        assert chunk.read_bytes() == whole


def test_static_addresses_replace_multicast(
    model_dir: Path, profiles: MeasuredProfiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_COORDINATOR_ADVERTISE", "false")
    with TestHome(tmp_path, model_dir, profiles) as running_home:
        running_home.start_agent("a", "--no-advertise")
        running_home.start_coordinator("--devices", f"{LOOPBACK}:{running_home.port('a')}")
        with connect(
            f"{LOOPBACK}:{running_home.port('coordinator')}", key=running_home.key, timeout_seconds=20.0
        ) as home:
            home.wait_ready(60.0)
            assert home.hidden_states(TOKENS).shape == (40, 96)
