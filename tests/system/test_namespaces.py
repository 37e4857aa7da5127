"""Three devices, each in a network namespace of its own: mDNS, links and rings across a real (if virtual) network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.home import wait_for
from support.models import minilm

from hearth.security import new_home_key, save_credential

pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytestmark = pytest.mark.namespaces

BRIDGE = "hearthbr0"
PREFIX = "10.213.7"
NAMES = ("hearth-one", "hearth-two", "hearth-three")
BIN = Path(sys.executable).parent


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """A bridge with three namespaces on it, and nothing else: no way out of this machine."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    _remove()
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for index, name in enumerate(NAMES, start=1):
            ip("netns", "add", name)
            ip("link", "add", f"hv{index}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"hv{index}", "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{PREFIX}.{index}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "route", "add", "224.0.0.0/4", "dev", "eth0")
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        _remove()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        yield
    finally:
        _remove()


def _remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


def test_a_home_over_a_network_finds_itself_and_a_request_leaves_a_trace(network: None, tmp_path: Path) -> None:
    model_dir = minilm()
    key = tmp_path / "key"
    save_credential(key, new_home_key())
    processes = []

    def start(name: str, *command: str) -> None:
        log = (tmp_path / f"{name}-{Path(command[0]).name}.log").open("wb")
        processes.append(subprocess.Popen(["ip", "netns", "exec", name, *command], stdout=log, stderr=log))

    try:
        for name in NAMES:
            start(
                name,
                *(str(BIN / "hearth-agent"), "--name", name, "--key-path", str(key), "--threads", "1"),
                *("--state-dir", str(tmp_path / name / "state"), "--store-dir", str(tmp_path / name / "store")),
            )  # default ports: every device has its own
        start(
            NAMES[0],
            *(str(BIN / "hearth"), "serve", str(model_dir), "--strategy", "hmp", "--min-devices", "3"),
            *("--key", str(key), "--state-dir", str(tmp_path / "coordinator")),
        )

        def hearth(*arguments: str) -> str | None:
            done = subprocess.run(
                ["ip", "netns", "exec", NAMES[1], str(BIN / "hearth"), *arguments, "--key", str(key)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            return done.stdout if done.returncode == 0 else None

        def serving() -> dict | None:
            status = hearth("status", "--json")
            found = json.loads(status) if status else None
            return found if found and found["state"].startswith("serving") else None

        status = wait_for("serving", serving, 90.0)
        assert [device["name"] for device in status["plan"]["devices"]] != []
        assert {device["host"] for device in status["devices"]} == {f"{PREFIX}.{i}:47800" for i in (1, 2, 3)}
        trace = tmp_path / "trace.json"
        answer = hearth("embed", "Turn on the light.", "It is dark.", "--json", "--trace", str(trace))
        assert answer is not None
        assert len(json.loads(answer)["embeddings"]) == 2
        bars = [bar for bar in json.loads(trace.read_text())["traceEvents"] if bar["ph"] == "X"]
        assert {bar["cat"] for bar in bars} >= {"compute", "transfer"}
        assert len([bar for bar in bars if bar["cat"] == "transfer"]) >= 6 * 4 * 3  # layers, phases, tiles
    except AssertionError as error:
        logs = "\n".join(f"{log.name}:\n{log.read_text(errors='replace')}" for log in tmp_path.glob("*.log"))
        raise AssertionError(f"{error}\n{logs}") from None
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(15)
