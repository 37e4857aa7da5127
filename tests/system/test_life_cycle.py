"""The life cycle with real processes: contradictory settings, a full queue, `hearth status`, a planned stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.home import LOOPBACK, TestHome
from support.models import save_random_model, small_bert, small_decoder
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from hearth.errors import QueueFull

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def running_home(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """One device, a model that takes a good part of a second per request, and a queue of two requests."""
    config = small_bert(
        num_hidden_layers=8, hidden_size=512, num_attention_heads=8, intermediate_size=2048, max_position_embeddings=512,
    )  # fmt: skip
    model = save_random_model(tmp_path_factory.mktemp("model"), config)
    with (
        pytest.MonkeyPatch.context() as environ,
        TestHome(tmp_path_factory.mktemp("home"), model, profiles) as home,
    ):
        environ.setenv("HEARTH_COORDINATOR_QUEUE_LIMIT", "2")
        home.start_agent("a")
        home.start_coordinator("--strategy", "local")
        home.ready().close()
        yield home


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


def test_status_shows_the_phase_and_its_history(running_home: TestHome) -> None:
    with running_home.connect() as home:
        status = home.status()
    assert status.phase == "serving"
    assert [move.phase for move in status.history][-4:] == ["pushing", "loading", "warming", "serving"]
    command = [str(Path(sys.executable).parent / "hearth"), "status", "--key", str(running_home.key)]
    command += ["--address", f"{LOOPBACK}:{running_home.port('coordinator')}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "History" in shown
    assert "warm-up request completed" in shown
    told = json.loads(subprocess.run([*command, "--json"], capture_output=True, timeout=60, check=True).stdout)
    assert told["phase"] == "serving"


def test_full_queue_rejects_and_serves_queued_requests(running_home: TestHome) -> None:
    with running_home.connect() as home, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(home.hidden_states, [7] * 512) for _ in range(8)]
        outcomes = [future.exception() or future.result().shape for future in asked]
    refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
    assert refused
    assert refused[0].limit == 2
    assert [outcome for outcome in outcomes if not isinstance(outcome, QueueFull)] == [(512, 512)] * (8 - len(refused))


def test_planned_stop_and_restart_lose_no_request(running_home: TestHome) -> None:
    """Must be the last test of this home: it ends the coordinator."""
    port = running_home.port("coordinator")
    with running_home.connect() as home:
        expected = home.hidden_states([7] * 512)
        answers: list[np.ndarray] = []
        ended = threading.Event()

        def ask() -> None:
            while not ended.is_set():
                answers.append(home.hidden_states([7] * 512, timeout_seconds=120.0))

        with ThreadPoolExecutor(1) as executor:
            asking = executor.submit(ask)
            wait_for("a request to be served", lambda: len(answers) > 1)
            os.kill(running_home.pid("coordinator"), signal.SIGTERM)
            assert running_home.wait("coordinator", 60.0) == 0
            before = len(answers)
            running_home.start_coordinator("--strategy", "local", "--port", str(port))
            wait_for("requests to be served again", lambda: len(answers) > before or asking.done())
            ended.set()
            asking.result()
    assert all(np.array_equal(answer, expected) for answer in answers)
    assert "stopping: running requests finish, new ones are refused" in running_home.log("coordinator")
