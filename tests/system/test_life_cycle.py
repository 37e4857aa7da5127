"""The life cycle with real processes: settings that contradict each other, a planned stop, the history in `hearth status`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support.home import LOOPBACK, TestHome
from support.models import save_random_model, small_bert, small_decoder
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from hearth.errors import NotServing

pytestmark = pytest.mark.processes


def test_settings_that_contradict_each_other_end_hearth_serve_with_status_2(known: Path, tmp_path: Path) -> None:
    """Before, it tried again for ever; systemd does not start it again at this status."""
    model = save_random_model(tmp_path / "model", small_decoder("llama"), generates=True)
    with TestHome(tmp_path, model, known) as house:
        house.start_coordinator("--strategy", "sp", "--context", "64", "--seq-len", "16", "--min-devices", "1")
        wait_for(
            "a first attempt", lambda: "trying again: No device" in house.log("coordinator")
        )  # it waits for devices
        house.start_agent("a")
        house.start_agent("b")
        assert house.wait("coordinator", 120.0) == 2
        assert "error: The setting --strategy cannot be used: sp needs a context" in house.log("coordinator")


def test_a_planned_stop_lets_a_running_request_finish(known: Path, tmp_path: Path) -> None:
    config = small_bert(
        num_hidden_layers=8, hidden_size=512, num_attention_heads=8, intermediate_size=2048, max_position_embeddings=512,
    )  # fmt: skip
    with TestHome(tmp_path, save_random_model(tmp_path / "model", config), known) as house:
        house.start_agent("a")
        house.start_coordinator("--strategy", "local")
        with house.ready() as home:
            expected = home.hidden_states([7] * 512)
            answers: list[np.ndarray] = []
            refused: list[NotServing] = []
            began = threading.Event()

            def ask() -> None:
                while True:
                    began.set()
                    try:
                        answers.append(home.hidden_states([7] * 512, timeout_seconds=60.0))
                    except NotServing as error:
                        refused.append(error)
                        return

            asking = threading.Thread(target=ask)
            asking.start()
            began.wait(30)
            wait_for("a request to be served", lambda: len(answers) > 1)
            os.kill(house.pid("coordinator"), signal.SIGTERM)
            asking.join(60)
            assert house.wait("coordinator", 60.0) == 0
        assert all(np.array_equal(answer, expected) for answer in answers)
        assert "stopping" in str(refused[0])
        assert "stopping: running requests finish, no new ones are taken" in house.log("coordinator")


def test_status_shows_the_phase_and_how_it_came_to_it(known: Path, tmp_path: Path) -> None:
    with TestHome(tmp_path, save_random_model(tmp_path / "model", small_bert()), known) as house:
        house.start_agent("a")
        house.start_coordinator()
        with house.ready() as home:
            status = home.status()
        assert status.phase == "serving"
        assert [move.phase for move in status.history][-4:] == ["pushing", "loading", "warming", "serving"]
        command = [str(Path(sys.executable).parent / "hearth"), "status", "--key", str(house.key)]
        command += ["--address", f"{LOOPBACK}:{house.port('coordinator')}"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert "History" in shown
        assert "a first request ran" in shown
        told = json.loads(subprocess.run([*command, "--json"], capture_output=True, timeout=60, check=True).stdout)
        assert told["phase"] == "serving"
