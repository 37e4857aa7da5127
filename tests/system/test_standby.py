"""A standby takes over from a coordinator that was killed: no call fails, the workers go on, the leader stands by."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_model
from support.home import LOOPBACK, TestHome
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

from hearth.client.sync import connect

pytestmark = pytest.mark.processes
TOKENS = list(range(5, 17))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small")


def test_standby_takes_over_the_running_workers(model_dir: Path, profiles: MeasuredProfiles, tmp_path: Path) -> None:
    with TestHome(tmp_path, model_dir, profiles) as home:
        for name in ("a", "b", "c"):
            home.start_agent(name)
        home.start_coordinator("--strategy", "hmp", "--min-devices", "3", "--pin", "--as", "small")
        with home.ready() as client:
            expected = client.hidden_states(TOKENS)
        leader = f"{LOOPBACK}:{home.port('coordinator')}"
        home.start_coordinator("--standby", "--leader", leader, model=False, name="standby")
        wait_for("the copy of the state", lambda: "the standby of coordinator\n" in home.log("standby"), 30.0)
        shown = home.run("status", name="standby", check=True).stdout
        assert "this is the standby of coordinator" in shown
        workers = [home.worker_pid(name) for name in ("a", "b", "c")]
        addresses = [leader, f"{LOOPBACK}:{home.port('standby')}"]
        answers: list[tuple[float, float]] = []
        failures: list[Exception] = []
        stop = threading.Event()

        def ask() -> None:
            with connect(",".join(addresses), key=home.key) as client:
                while not stop.is_set():
                    began = time.monotonic()
                    try:
                        assert np.allclose(client.hidden_states(TOKENS, timeout_seconds=10.0), expected, atol=1e-5)
                        answers.append((began, time.monotonic()))
                    except Exception as error:  # checked below, in the main thread
                        failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            wait_for("answers", lambda: len(answers) >= 3, 30.0)
            killed, killed_at = time.monotonic(), time.time()
            home.kill("coordinator")
            wait_for("answers of the standby", lambda: failures or any(began > killed for began, _ in answers), 60.0)
        finally:
            stop.set()
            thread.join()
        assert failures == []
        with connect(addresses[1], key=home.key) as client:
            (served,) = client.models()
            assert (served.deployment, served.pinned) == ("small", True)
            events = client.events(follow=False)
            ended = [each.unix_seconds for each in events if each.event.kind == "request_ended"]
        assert min(ended) < killed_at  # of requests that the leader answered
        for name in ("a", "b", "c"):
            assert "coordinator has ended: its connection is closed" in home.log(name)
        print(f"pause: {min(ended for began, ended in answers if began > killed) - killed:.2f} s")
        assert [home.worker_pid(name) for name in ("a", "b", "c")] == workers
        home.start_coordinator("--leader", addresses[1], model=False)
        wait_for("the old leader to stand by", lambda: "the standby of standby" in home.log("coordinator"), 30.0)
        os.kill(home.pid("standby"), signal.SIGTERM)  # a planned stop hands over
        wait_for("the old leader to take over", lambda: "took over from standby" in home.log("coordinator"), 30.0)
        assert home.wait("standby") == 0
        with connect(f"{LOOPBACK}:{home.port('coordinator')}", key=home.key) as client:
            client.wait_ready(30.0)
            assert np.allclose(client.hidden_states(TOKENS), expected, atol=1e-5)
        assert [home.worker_pid(name) for name in ("a", "b", "c")] == workers
