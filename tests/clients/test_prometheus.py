"""A real Prometheus server scrapes a home of three agents: counts are right, and no counter falls over a change of plan.

Needs Debian's `prometheus` (2.42), which brings `promtool`. HEARTH_PROMETHEUS names a folder with both that is not in PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.chat_models import save_scripted_chat
from support.home import LOOPBACK, TestHome, home_of
from support.profiles import MeasuredProfiles
from support.tokens import new_token
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

SEARCHED = os.pathsep.join(filter(None, (os.environ.get("HEARTH_PROMETHEUS"), os.environ.get("PATH"))))
PROMETHEUS, PROMTOOL = (shutil.which(each, path=SEARCHED) for each in ("prometheus", "promtool"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(
        PROMETHEUS is None or PROMTOOL is None, reason="prometheus is not here: apt-get install prometheus"
    ),
]

NUM_REQUESTS = 20


@contextmanager
def prometheus(folder: Path, target: str, token: str) -> Iterator[str]:
    """A server that scrapes every second; yields its address."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    config = folder / "prometheus.yml"
    (folder / "token").write_text(token)
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        "  - job_name: hearth\n"
        f"    authorization: {{credentials_file: {folder / 'token'}}}\n"
        f"    static_configs: [{{targets: ['{target}']}}]\n"
    )
    assert PROMETHEUS is not None
    server = subprocess.Popen(
        [
            PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={LOOPBACK}:{port}",
        ],
        stdout=subprocess.DEVNULL, stderr=(folder / "prometheus.log").open("wb"),
    )  # fmt: skip
    try:
        yield f"http://{LOOPBACK}:{port}"
    finally:
        server.terminate()
        server.wait(30)


def query(address: str, expression: str) -> list[Any]:
    """The result of an instant query; empty while the server is not ready."""
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            found: list[Any] = json.load(response)["data"]["result"]
            return found
    except OSError:
        return []


def value(address: str, expression: str) -> float | None:
    found = query(address, expression)
    return float(found[0]["value"][1]) if found else None


def test_prometheus_scrapes_with_a_token_and_no_counter_falls_over_a_loss(
    profiles: MeasuredProfiles, tmp_path: Path
) -> None:
    model_dir = save_scripted_chat(tmp_path / "model", "hello", "hello")
    options = ("--context", "320", "--strategy", "hmp", "--http", f"{LOOPBACK}:0")
    (tmp_path / "home").mkdir()
    with home_of("abc", tmp_path / "home", model_dir, profiles, *options) as home:
        ask_times(home, NUM_REQUESTS)
        token = new_token(home, "prometheus", "metrics")
        target = f"{LOOPBACK}:{home.port('coordinator', http=True)}"
        check_with_promtool(target, token)
        with prometheus(tmp_path, target, token) as address:
            served = 'sum(hearth_requests_total{outcome="served"})'
            wait_for("a scrape", lambda: value(address, 'up{job="hearth"}') == 1)
            wait_for("the count", lambda: value(address, served) == NUM_REQUESTS)
            assert value(address, "sum(hearth_device_up)") == 3
            home.kill("c")
            ask_times(home, NUM_REQUESTS)
            wait_for("the count after the loss", lambda: value(address, served) == 2 * NUM_REQUESTS)
            wait_for("the change of plan", lambda: (value(address, "sum(hearth_replans_total)") or 0) >= 1)
            assert value(address, "sum(hearth_recoveries_total)") == value(
                address, 'sum(hearth_replans_total{reason!="better_plan"})'
            )
            falls = query(address, 'resets({__name__=~"hearth_.*(_total|_count|_bucket|_sum)"}[10m]) > 0')
            assert falls == []
        check_with_promtool(target, token)


def ask_times(home: TestHome, count: int) -> None:
    with home.ready() as client:
        for _ in range(count):
            client.generate("hello", max_tokens=2).text()


def check_with_promtool(target: str, token: str) -> None:
    request = urllib.request.Request(f"http://{target}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        text = response.read()
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
