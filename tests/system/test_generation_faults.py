"""Text generation in homes of real processes that lose a worker, a device, the coordinator or a client: no token changes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.home import LOOPBACK, TestHome
from support.models import endless_decoder, save_random_model
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.reference import greedy

from hearth.client.sync import Home
from hearth.errors import QueueFull

pytestmark = pytest.mark.processes

PROMPT = [1, *range(40, 60)]
CONTEXT = 320


@pytest.fixture(scope="module")
def slow_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Deep rather than wide: starts quickly, and answers take long enough to be interrupted."""
    config = endless_decoder(
        num_hidden_layers=16, hidden_size=240, num_attention_heads=12, intermediate_size=640,
        max_position_embeddings=8192,
    )  # fmt: skip
    return save_random_model(tmp_path_factory.mktemp("slow"), config, generates=True)


@pytest.fixture(scope="module")
def running_home(
    slow_model_dir: Path, profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestHome]:
    """The home of all tests of this module, which begin with those that need the fewest devices."""
    with TestHome(tmp_path_factory.mktemp("home"), slow_model_dir, profiles) as running_home:
        yield running_home


def test_coordinator_killed_during_an_answer_changes_no_token(running_home: TestHome) -> None:
    # A greedy answer repeats itself: with more guesses it would end before the coordinator does.
    count, options = 280, ("--context", str(CONTEXT), "--speculate", "2")
    with running_home.serving("a", *options) as home:
        port = running_home.port("coordinator")
        greedy_answer = home.generate(token_ids=PROMPT, max_tokens=count, timeout_seconds=120.0)
        sampled = home.generate(token_ids=PROMPT, max_tokens=count, temperature=1.0, seed=7)
        undisturbed = home.generate(token_ids=PROMPT, max_tokens=count, temperature=1.0, seed=7)
        undisturbed.text()
        for answer in (greedy_answer, sampled):
            for _ in itertools.islice(answer, 10):
                pass
        running_home.kill("coordinator")
        running_home.start_coordinator(*options, "--port", str(port))
        assert (greedy_answer.text(), sampled.text()) == ("", "")
        assert greedy_answer.token_ids == greedy(running_home.model_dir, PROMPT, count)
        assert sampled.token_ids == undisturbed.token_ids
        assert greedy_answer.usage is not None
        assert greedy_answer.usage.num_tokens == count
        if "loading on" not in running_home.log_of_run(
            "coordinator"
        ):  # the worker was taken over, as on an idle machine
            rows = re.findall(r"a stream goes on with (\d+) rows of its KV cache", running_home.log("a"))
            assert [int(each) >= len(PROMPT) + 9 for each in rows] == [True, True]


def test_full_queue_rejects_and_killed_client_frees_its_requests(
    running_home: TestHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_COORDINATOR_QUEUE_LIMIT", "2")
    with (
        running_home.serving("a", "--strategy", "local", "--context", "8000") as home,
        _two_long_answers(running_home) as other,
    ):
        with pytest.raises(QueueFull):
            home.generate(token_ids=PROMPT, max_tokens=2).text()
        other.kill()  # without closing its connection
        wait_for("room for a request", lambda: _is_served(home))


ANSWERS = f"""
import sys
from hearth.client.sync import connect

home = connect(sys.argv[1], key=sys.argv[2])
answers = [home.generate(token_ids={PROMPT}, max_tokens=7900) for _ in range(2)]
for answer in answers:
    next(answer)
print("begun", flush=True)
sys.stdin.read()
"""


@contextmanager
def _two_long_answers(running_home: TestHome) -> Iterator[subprocess.Popen[str]]:
    """A client process that has started both answers."""
    command = [sys.executable, "-c", ANSWERS, f"{LOOPBACK}:{running_home.port('coordinator')}", str(running_home.key)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "begun\n"
            yield client
        finally:
            client.kill()


def _is_served(home: Home) -> bool:
    try:
        home.generate(token_ids=PROMPT, max_tokens=2).text()
    except QueueFull:
        return False
    return True


def test_device_lost_during_an_answer_changes_no_token(running_home: TestHome) -> None:
    count = 40
    options = ("--strategy", "hmp", "--min-devices", "2", "--context", str(CONTEXT))
    with running_home.serving("ab", *options) as home:
        pids = [pid for pid in (running_home.pid("b"), running_home.worker_pid("b")) if pid is not None]
        answers = [home.generate(token_ids=prompt, max_tokens=count) for prompt in (PROMPT, PROMPT[:5])]
        texts = [threading.Thread(target=answer.text) for answer in answers]
        for thread in texts:
            thread.start()
        wait_for("both answers to begin", lambda: all(len(answer.token_ids) > 5 for answer in answers))
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            for thread in texts:
                thread.join(120)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        expected = [greedy(running_home.model_dir, prompt, count) for prompt in (PROMPT, PROMPT[:5])]
        assert [answer.token_ids for answer in answers] == expected


def test_worker_killed_during_an_answer_changes_no_token(running_home: TestHome) -> None:
    """The worker of one of three stages dies, and starts again in the same plan."""
    count, victim = 80, "a"
    options = ("--strategy", "pipeline", "--min-devices", "3", "--context", str(CONTEXT))
    with running_home.serving("abc", *options) as home:
        pid = running_home.worker_pid(victim)
        assert pid is not None
        answer = home.generate(token_ids=PROMPT, max_tokens=count, timeout_seconds=120.0)
        for _ in itertools.islice(answer, 10):
            pass
        os.kill(pid, signal.SIGKILL)
        assert answer.text() == ""
        assert answer.token_ids == greedy(running_home.model_dir, PROMPT, count)
        plan = home.status().plan
        assert plan is not None
        assert victim in {device.name for device in plan.devices}
        assert len(plan.body.layers) == 3
        assert running_home.worker_pid(victim) not in (None, pid)
        assert home.status().failed_requests == 0
        assert "trying again" not in running_home.log_of_run("coordinator")


def test_killed_device_does_not_cost_the_kv_cache(running_home: TestHome) -> None:
    """One of three devices is lost: the copies of the others make the KV cache whole, and few rows are computed again."""
    count = 200
    options = ("--strategy", "hmp", "--min-devices", "3", "--context", str(CONTEXT))
    with running_home.serving("abc", *options) as home:
        plan = home.status().plan
        assert plan is not None
        assert plan.body.generation.kv_copies
        logged = len(running_home.log("a"))
        answer = home.generate(token_ids=PROMPT, max_tokens=count, timeout_seconds=120.0)
        for _ in itertools.islice(answer, 100):
            pass
        running_home.kill("b")
        assert answer.text() == ""
        assert answer.token_ids == greedy(running_home.model_dir, PROMPT, count)
        kept = re.search(r"a stream continues with (\d+) rows of its KV cache", running_home.log("a")[logged:])
        assert kept is not None, running_home.log("a")[logged:]
        assert int(kept[1]) >= len(PROMPT) + 100 - 40
