"""Disks that hang under a home of real processes: a file system that is frozen holds everything that writes to it.

The experiment `faults-combined` measures how long answers pause.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.clients import Clients
from support.frozen_disk import FrozenDisk, frozen_disk
from support.graphs import save_two_branch_model
from support.home import LOOPBACK, TestHome, home_of
from support.models import save_random_model, small_bert
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from hearth.client.sync import Home
from hearth.errors import AppRevoked
from hearth.platform.security import parse_credential

pytestmark = [pytest.mark.processes, pytest.mark.thorough]

TOKENS = list(range(5, 25))


def ask(home: Home) -> None:
    assert np.isfinite(home.hidden_states(TOKENS, 170.0)).all()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model") / "bert", small_bert())


@contextmanager
def home_on_disk(folder: Path, model: Path, program: str) -> Iterator[tuple[TestHome, FrozenDisk]]:
    """A home that serves, and the disk that holds the folder of one of its programs."""
    with (
        frozen_disk(folder / "home" / program, folder / "image") as disk,
        home_of("ab", folder / "home", model, None, "--strategy", "hmp") as home,
    ):
        home.ready().close()
        yield home, disk


def test_coordinator_serves_while_its_disk_hangs(tmp_path: Path, model: Path) -> None:
    """Changes of keys and models are in force at once, and on the disk once it answers."""
    with home_on_disk(tmp_path, model, "coordinator") as (home, disk):
        lamp = home.run("key", "add-app", "lamp", check=True).stdout.strip()
        home.run("key", "add-device", "cellar", check=True)
        detector = str(save_two_branch_model(tmp_path / "detector.onnx", channels=8, size=48, depth=2))
        add = ("serve", detector, "--state-dir", str(disk.folder))
        home.run(*add, check=True)  # it is profiled now, and found as it was later
        home.run("stop", "detector", check=True)
        with home.connect(parse_credential(lamp, "lamp")) as app, Clients(home, [ask, ask]) as clients:
            clients.wait_for_answers()
            ask(app)
            with disk.frozen():
                for change in (
                    ("add-app", "radio"),
                    ("revoke", "lamp"),
                    ("add-device", "attic"),
                    ("revoke-device", "cellar"),
                ):
                    ended = home.run("key", *change)
                    assert ended.returncode == 0, ended.stderr
                    assert "warning: the disk of coordinator cannot be written" in ended.stderr
                with pytest.raises(AppRevoked):
                    ask(app)
                home.run(*add, check=True)
                home.run("stop", "detector", check=True)
                clients.wait_for_answers()
        for name, admitted, revoked in (("apps", "radio", "lamp"), ("devices", "attic", "cellar")):

            def is_written(name: str = name, admitted: str = admitted, revoked: str = revoked) -> bool:
                keys, _, rest = (disk.folder / f"{name}.json").read_text().partition("revoked")
                return admitted in keys and revoked in rest

            wait_for(f"the newest {name} on the disk", is_written)
        wait_for("the model off the disk", lambda: "detector" not in (disk.folder / "serving.json").read_text())


def test_agent_works_while_its_disk_hangs(tmp_path: Path, model: Path) -> None:
    """A standby joins meanwhile, so that the agent is asked to store which devices vote."""
    with home_on_disk(tmp_path, model, "a") as (home, disk):
        stored = disk.folder / "state" / "configuration.json"
        with Clients(home, [ask, ask]) as clients:
            clients.wait_for_answers()
            with disk.frozen():
                leader = f"{LOOPBACK}:{home.port('coordinator')}"
                home.start_coordinator("--standby", "--leader", leader, model=False, name="standby")
                wait_for("the standby", lambda: "the standby of coordinator\n" in home.log("standby"))
                voters = tmp_path / "home" / "b" / "state" / "configuration.json"
                wait_for("the configuration on the other agent", voters.exists)
                time.sleep(3.0)  # longer than a lease
                clients.wait_for_answers()
                assert not stored.exists()
                worker = home.worker_pid("b")
                assert worker is not None
                os.kill(worker, signal.SIGKILL)  # both load the plan again, within seconds
                clients.wait_for_answers(30.0)
            wait_for("the configuration", stored.exists)
            clients.wait_for_answers()
