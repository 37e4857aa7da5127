"""Home Assistant, unmodified, against a home of three agents, all of which compute; one of them is killed meanwhile.

`make test-home-assistant` makes its environment and names the folder in HEARTH_HOME_ASSISTANT.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from clients.homes import served
from support.chat_models import save_scripted_chat
from support.home import LOOPBACK, TestHome
from support.profiles import MeasuredProfiles
from support.tokens import new_token
from typing_extensions import Self

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

FOLDER = os.environ.get("HEARTH_HOME_ASSISTANT")
SCRIPTS = Path(__file__).parent / "home_assistant"
CALL = '{"name": "intent__HassTurnOn", "arguments": {"name": "Kitchen Light"}}'
CONTEXT = 16384  # every byte is a token, and the tools and the house are some thousands of bytes
LIMIT_SECONDS = 900.0  # of a run; its loops of commands end after 240 s by themselves
KILL_AT = 4  # number of the command during which a device is killed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(FOLDER is None, reason="HEARTH_HOME_ASSISTANT names no folder: run `make test-home-assistant`"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_scripted_chat(tmp_path_factory.mktemp("models") / "model", CALL, "The light is on.", CONTEXT)


@pytest.fixture
def home(model: Path, profiles: MeasuredProfiles, tmp_path: Path) -> Iterator[TestHome]:
    with served(model, profiles, tmp_path, "--context", str(CONTEXT)) as home:
        yield home


class HomeAssistant:
    """One run of `commands.py` in Home Assistant's environment. It ends with the block, and after `LIMIT_SECONDS`."""

    def __init__(self, home: TestHome, *tests: str) -> None:
        assert FOLDER is not None
        self._copy = Path(FOLDER) / "root" / "work" / "tests"
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(SCRIPTS, self._copy)
        where = [
            f"HEARTH_ADDRESS=http://{LOOPBACK}:{home.port('coordinator', http=True)}",
            f"HEARTH_TOKEN={new_token(home, 'home-assistant')}",
        ]
        pytest_of = ["python", "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
        chosen = [f"/work/tests/commands.py::{test}" for test in tests]
        self._process = subprocess.Popen(
            [str(SCRIPTS / "environment.sh"), "run", FOLDER, "env", *where, *pytest_of, *chosen],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self._timer = threading.Timer(LIMIT_SECONDS, self._kill)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._kill()
        self._process.wait(60)

    def _kill(self) -> None:
        """Kill the script, and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def lines(self) -> Iterator[str]:
        """What it prints, as it does."""
        assert self._process.stdout is not None
        yield from self._process.stdout

    def device_is_lost(self) -> None:
        """Tell the script, which goes on for some commands."""
        (self._copy / "killed").touch()

    def wait(self) -> int:
        return self._process.wait(60)


def test_conversations_and_tasks_switch_a_light(home: TestHome) -> None:
    with HomeAssistant(home, "test_llama_cpp_conversation", "test_ollama_conversation_and_task") as run:
        output = "".join(run.lines())
        assert run.wait() == 0, output
    assert "2 passed" in output


@pytest.mark.parametrize("integration", ["llama_cpp", "ollama"])
def test_light_is_switched_while_a_device_is_lost(home: TestHome, integration: str) -> None:
    output = ""
    with HomeAssistant(home, f"test_while_a_device_is_lost[{integration}]") as run:
        for line in run.lines():
            output += line
            if line.startswith(f"command {KILL_AT}"):
                home.kill("b")
                run.device_is_lost()
            elif " after the loss" in line:
                print(line.strip())
        assert run.wait() == 0, output
    with home.connect() as client:
        plan = client.status().plan
        assert len(plan.devices) == 2
