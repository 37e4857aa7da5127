"""Run by `test_clients.py` in an environment of its own: the command `llm`, unmodified, against the gateway.

Arguments: the kind of the served model, the address, a token. It raises if something is not as it must be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import openai

FUNCTION = """
def turn_on(name: str) -> str:
    "Turn on a light."
    return "done"
"""


SCHEMA = json.dumps(
    {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
)


def llm(*arguments: str) -> str:
    """The output of the command."""
    command = [str(Path(sys.executable).parent / "llm"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def check_text(address: str, token: str, model: str, folder: Path) -> None:
    """A model of the configuration file, whole and streamed; a tool that it runs by itself."""
    entry = {
        "model_id": "home",
        "model_name": model,
        "api_base": address,
        "supports_tools": True,
        "supports_schema": True,
        "api_key_name": "home",
    }
    (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
    llm("keys", "set", "home", "--value", token)
    assert llm("-m", "home", "hello") == "hello"
    assert llm("-m", "home", "--no-stream", "hello") == "hello"
    assert llm("-m", "home", "--functions", FUNCTION, "Light, please.") == "The light is on."
    assert set(json.loads(llm("-m", "home", "--no-stream", "--schema", SCHEMA, "Is it on?"))) == {"on"}


if __name__ == "__main__":
    kind, address, token = sys.argv[1:]
    assert kind == "text"
    (model,) = [each.id for each in openai.OpenAI(base_url=f"{address}/v1", api_key=token).models.list()]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        check_text(f"{address}/v1", token, model, Path(folder))
