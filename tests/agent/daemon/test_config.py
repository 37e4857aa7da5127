"""Settings of the agent: precedence, validation, and the message for invalid ones."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("psutil")


from agent.daemon.config import AgentSettings, add_arguments, load_agent_settings
from hearth.errors import BadSetting
from hearth.files import write_atomically


def settings_of(flags: list[str], **environ: str) -> AgentSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return load_agent_settings(parser.parse_args(flags), {"HOME": "/home/u", **environ})


def test_flags_override_variables_and_variables_override_defaults() -> None:
    assert settings_of([]).control_port == 47800
    assert settings_of([], HEARTH_AGENT_CONTROL_PORT="5").control_port == 5
    assert settings_of(["--control-port", "6"], HEARTH_AGENT_CONTROL_PORT="5").control_port == 6
    assert settings_of(["--memory-bytes", "2GiB"]).memory_bytes == 2 << 30
    assert settings_of(["--data-ports", "5000-5010"]).data_ports == (5000, 5010)
    assert settings_of(["--no-advertise"]).advertise is False
    assert settings_of([], STATE_DIRECTORY="/var/lib/x").state_dir == Path("/var/lib/x")
    assert settings_of([]).store_dir == Path("/home/u/.cache/hearth-agent")


@pytest.mark.parametrize(
    "flags",
    [
        ["--control-port", "x"],
        ["--memory-bytes", "much"],
        ["--data-ports", "9-3"],
        ["--memory-percent", "120"],
        ["--compute-device", "tpu"],
        ["--log-level", "loud"],
    ],
)
def test_invalid_settings_are_named(flags: list[str]) -> None:
    with pytest.raises(BadSetting, match=flags[0]):
        settings_of(flags)


@pytest.mark.parametrize(
    ("key", "error"), [(None, "There is no key at "), ("hearth-home-1:eyJr", "The key from {} cannot be used: ")]
)
def test_agent_reports_a_missing_or_damaged_key_without_a_traceback(
    key: str | None, error: str, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    if key is not None:
        write_atomically(path, key, private=True)
    command = [sys.executable, "-m", "agent.daemon.main", "--state-dir", str(tmp_path), "--store-dir", str(tmp_path)]
    done = subprocess.run([*command, "--key-path", str(path)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"hearth-agent: {error.format(path)}")
    assert "Traceback" not in done.stderr
