"""Third-party clients, each unmodified and in an environment of its own, against a home of real processes.

`make test-clients` makes the environments and names their folder in HEARTH_CLIENTS.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.homes import served
from support.chat_models import save_scripted_chat
from support.home import LOOPBACK, TestHome
from support.models import minilm
from support.profiles import MeasuredProfiles
from support.tokens import new_token

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

ENVIRONMENTS = os.environ.get("HEARTH_CLIENTS")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(ENVIRONMENTS is None, reason="HEARTH_CLIENTS names no folder: run `make test-clients`"),
]


@pytest.fixture(scope="module")
def chat_home(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """A home whose model says "hello", calls a tool, and says that the light is on."""
    call = '{"name": "turn_on", "arguments": {"name": "kitchen"}}'
    model_dir = save_scripted_chat(tmp_path_factory.mktemp("models") / "model", call, "The light is on.")
    with served(model_dir, profiles, tmp_path_factory.mktemp("home"), "--context", "320") as home:
        yield home


@pytest.fixture(scope="module")
def embedding_home(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    with served(minilm(), profiles, tmp_path_factory.mktemp("home")) as home:
        yield home


@pytest.mark.parametrize("client", ["openai", "ollama", "langchain_openai", "langchain_ollama", "litellm", "llm"])
def test_chat_client_works_unmodified(client: str, chat_home: TestHome) -> None:
    run_client(client, "text", chat_home)


@pytest.mark.parametrize("client", ["openai", "ollama", "langchain_openai", "langchain_ollama", "litellm"])
def test_embedding_client_works_unmodified(client: str, embedding_home: TestHome) -> None:
    run_client(client, "vectors", embedding_home)


def run_client(client: str, kind: str, home: TestHome) -> None:
    """Run `CLIENT_client.py` with the Python of the client's environment."""
    assert ENVIRONMENTS is not None
    python = Path(ENVIRONMENTS) / ("litellm" if client == "litellm" else "common") / "bin" / "python"
    script = Path(__file__).with_name(f"{client}_client.py")
    address = f"http://{LOOPBACK}:{home.port('coordinator', http=True)}"
    token = new_token(home, f"{client}-{kind}".replace("_", "-"))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), str(script), kind, address, token],
        env=environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
