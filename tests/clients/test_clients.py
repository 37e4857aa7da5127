"""Third-party clients, each unmodified and in an environment of its own, against a home of real processes.

`make test-clients` makes the environment and names its Python in HEARTH_CLIENTS_PYTHON.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chat_models import save_scripted_chat
from support.home import LOOPBACK, TestHome, home_of
from support.models import minilm
from support.profiles import MeasuredProfiles
from support.tokens import new_token
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

PYTHON = os.environ.get("HEARTH_CLIENTS_PYTHON")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(PYTHON is None, reason="HEARTH_CLIENTS_PYTHON names no Python: run `make test-clients`"),
]


@pytest.fixture(scope="module", params=["text", "vectors"])
def served(
    request: pytest.FixtureRequest, profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, TestHome]]:
    """A home of three agents with a model of each kind, and its gateway."""
    model_dir = tmp_path_factory.mktemp("models") / "model"
    if request.param == "text":
        call = '{"name": "turn_on", "arguments": {"name": "kitchen"}}'
        save_scripted_chat(model_dir, call, "The light is on.")
    else:
        model_dir = minilm()
    options = ("--context", "320") if request.param == "text" else ()
    with home_of(
        "abc", tmp_path_factory.mktemp("home"), model_dir, profiles, *options, "--http", f"{LOOPBACK}:0"
    ) as home:
        home.ready().close()
        wait_for("the gateway", lambda: home.port("coordinator", http=True))
        yield request.param, home


@pytest.mark.parametrize("client", ["openai_client", "ollama_client"])
def test_client_works_unmodified(client: str, served: tuple[str, TestHome]) -> None:
    kind, home = served
    assert PYTHON is not None
    address = f"http://{LOOPBACK}:{home.port('coordinator', http=True)}"
    command = [
        PYTHON,
        str(Path(__file__).with_name(f"{client}.py")),
        kind,
        address,
        new_token(home, client.replace("_", "-")),
    ]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
