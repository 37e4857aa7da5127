"""A home of real processes that stops, loses a worker or a device, or has limits: queue, memory, disk, no multicast."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.clients import Clients
from support.home import LOOPBACK, TestHome, plan_devices
from support.models import save_random_model, small_bert, small_decoder
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from hearth.client.sync import Home
from hearth.errors import ModelDoesNotFit, QueueFull

pytestmark = pytest.mark.processes

LONG = [7] * 512


@pytest.fixture(scope="module")
def home(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """The home of all these tests, which start its agents. Those that need the fewest come first."""
    folder = tmp_path_factory.mktemp("home")
    with TestHome(folder, folder / "slow", profiles) as home:
        yield home


@pytest.fixture(scope="module")
def contradictory(home: TestHome) -> None:
    """A coordinator with settings that exclude each other, before there are devices."""
    model = save_random_model(home.folder / "llama", small_decoder("llama"), generates=True)
    home.start_coordinator("--strategy", "sp", "--context", "64", "--seq-len", "16", model=model)


@pytest.fixture(scope="module")
def slow_home(home: TestHome) -> TestHome:
    """The home with a model so large that a request takes a good part of a second and can be interrupted."""
    config = small_bert(
        num_hidden_layers=8, hidden_size=512, num_attention_heads=8, intermediate_size=2048, max_position_embeddings=512,
    )  # fmt: skip
    save_random_model(home.model_dir, config)
    home.add_profiles(home.model_dir)
    return home


@pytest.mark.usefixtures("contradictory", "slow_home")  # the slow model is made while the coordinator waits for devices
@pytest.mark.thorough
def test_contradictory_settings_end_serve_with_status_2(home: TestHome) -> None:
    """Retrying would not help; systemd does not restart the service at this status."""
    wait_for("a first attempt", lambda: "trying again: No device" in home.log("coordinator"))
    home.start_agent("a")
    home.start_agent("b")
    assert home.wait("coordinator", 120.0) == 2
    assert "error: The setting --strategy cannot be used: sp needs a context" in home.log("coordinator")


@pytest.fixture(scope="module")
def queue_of_two(slow_home: TestHome) -> Iterator[TestHome]:
    """A model on one device, with a queue of two requests. The last of its tests ends the coordinator."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("HEARTH_COORDINATOR_QUEUE_LIMIT", "2")
        with slow_home.serving("a", "--strategy", "local"):
            environ.undo()
            yield slow_home


def test_status_shows_the_phase_and_its_history(queue_of_two: TestHome) -> None:
    with queue_of_two.connect() as home:
        status = home.status()
    assert status.phase == "serving"
    assert [move.phase for move in status.history][-4:] == ["pushing", "loading", "warming", "serving"]
    shown = queue_of_two.run("status", check=True).stdout
    assert "History" in shown
    assert "warm-up request completed" in shown
    assert json.loads(queue_of_two.run("status", "--json", check=True).stdout)["phase"] == "serving"


def test_full_queue_rejects_and_serves_queued_requests(queue_of_two: TestHome) -> None:
    with queue_of_two.connect() as home, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(home.hidden_states, LONG) for _ in range(8)]
        outcomes = [future.exception() or future.result().shape for future in asked]
    refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
    assert refused
    assert refused[0].limit == 2
    assert [outcome for outcome in outcomes if not isinstance(outcome, QueueFull)] == [(512, 512)] * (8 - len(refused))


def test_planned_stop_and_restart_lose_no_request(queue_of_two: TestHome) -> None:
    """The last test of the home with this queue: it ends the coordinator."""
    port = queue_of_two.port("coordinator")
    with queue_of_two.connect() as home:
        expected = home.hidden_states(LONG)

    def ask(home: Home) -> None:
        assert np.array_equal(home.hidden_states(LONG, timeout_seconds=120.0), expected)

    with Clients(queue_of_two, [ask]) as clients:
        clients.wait_for_answers()
        assert queue_of_two.stop("coordinator", 60.0) == 0
        queue_of_two.start_coordinator("--strategy", "local", "--port", str(port))
        clients.wait_for_answers()
    assert "stopping: running requests finish, new ones are refused" in queue_of_two.log("coordinator")


@pytest.fixture(scope="module")
def client(slow_home: TestHome) -> Iterator[Home]:
    """Of the home with three devices that compute together."""
    with slow_home.serving("abc", "--strategy", "hmp", "--min-devices", "3") as client:
        yield client


def test_killed_worker_loses_no_request(slow_home: TestHome, client: Home) -> None:
    victim = slow_home.worker_pid("b")
    assert victim is not None
    harm_in_mid_request(slow_home, lambda: os.kill(victim, signal.SIGKILL))
    assert client.hidden_states([7] * 64, timeout_seconds=60.0).shape == (64, 512)
    assert {*plan_devices(client)} == {"a", "b", "c"}
    assert slow_home.worker_pid("b") not in (None, victim)
    assert client.status().failed_requests == 0
    # loading the plan once more was sufficient
    assert "trying again" not in slow_home.log_of_run("coordinator")


def test_lost_device_loses_no_request(slow_home: TestHome, client: Home) -> None:
    # SIGSTOP rather than SIGKILL: like a device whose cable was pulled, it sends nothing.
    pids = [slow_home.pid("b"), slow_home.worker_pid("b")]
    assert all(pids)
    try:
        harm_in_mid_request(slow_home, lambda: [os.kill(pid, signal.SIGSTOP) for pid in pids])
        assert client.hidden_states([7] * 64, timeout_seconds=60.0).shape == (64, 512)
        assert {*plan_devices(client)} == {"a", "c"}
        assert client.status().failed_requests == 0
        assert "trying again" not in slow_home.log_of_run("coordinator")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def harm_in_mid_request(slow_home: TestHome, harm: Callable[[], object]) -> None:
    """Send requests without pause, call `harm` during one, and wait for the next answers; none may fail."""
    with Clients(slow_home, [lambda home: home.hidden_states(LONG, timeout_seconds=60.0)]) as clients:
        clients.wait_for_answers()
        harm()
        clients.wait_for_answers()


# ---- a device with limits -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_model(home: TestHome) -> Path:
    return save_random_model(home.folder / "small", small_bert())


@pytest.mark.thorough
def test_missing_bytes_are_reported_if_the_model_does_not_fit(home: TestHome, small_model: Path) -> None:
    home.have_agents("")
    home.start_agent("small", "--memory-bytes", "100MiB")
    home.start_coordinator(model=small_model)
    with home.connect() as client:
        wait_for("the complaint", lambda: "bytes are missing" in client.readiness().state)
        assert not client.readiness().ready
        with pytest.raises(ModelDoesNotFit, match="bytes are missing"):
            client.hidden_states([1, 2, 3], timeout_seconds=1.0)


@pytest.mark.thorough
def test_full_store_is_reported_and_static_addresses_replace_multicast(
    home: TestHome, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent survives, and serves a model for which its store has room."""
    monkeypatch.setenv("HEARTH_COORDINATOR_ADVERTISE", "false")
    tiny = save_random_model(home.folder / "tiny", small_bert(vocab_size=100))
    home.have_agents("")
    home.start_agent("full", "--store-bytes", "1MiB", "--no-advertise")
    home.start_coordinator("--devices", f"{LOOPBACK}:{home.port('full')}", model=small_model)
    home.add_profiles(tiny)
    with home.connect() as client:
        wait_for("the complaint", lambda: "does not fit into the shard stores" in client.readiness().state)
        assert [device.state for device in client.devices().devices] == ["alive"]
        client.serve_model(json.dumps({"kind": "transformer", "model_dir": str(tiny)}), "tiny")
        assert client.hidden_states(list(range(5, 45)), timeout_seconds=60.0, model="tiny").shape == (40, 96)
