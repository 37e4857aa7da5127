"""The agent's settings, read once from flags and HEARTH_AGENT_* variables into a frozen object."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from agent.daemon.spawner import SpareMode
from hearth.platform.discovery import AGENT_PORT
from hearth.platform.security import default_key_path
from hearth.platform.units import parse_bytes
from hearth.validation import read_settings

PREFIX = "HEARTH_AGENT_"
LINK_PORT = AGENT_PORT + 1  # next to the control port, so that a firewall rule can name one range
DATA_PORTS = (AGENT_PORT + 10, AGENT_PORT + 29)  # first and last; each worker on the device takes one


class AgentSettings(BaseModel, frozen=True):
    """The settings. Each has a flag (`--store-bytes`) and an environment variable (`HEARTH_AGENT_STORE_BYTES`)."""

    name: str = Field(default_factory=platform.node, max_length=128, description="device name shown to users")
    state_dir: Path = Field(description="directory of this device's identity; one per agent")
    store_dir: Path = Field(description="directory of the shard store; may be deleted at any time")
    store_bytes: int = Field(default=16 << 30, ge=1 << 20, description="size limit of the shard store, e.g. 8GiB")
    key_path: Path = Field(description="file with the home key")
    interface: str | None = Field(None, description="network interface or address to advertise (default: automatic)")
    bind_host: str = Field(default="0.0.0.0", description="local address to listen on; 0.0.0.0: all")
    control_port: int = Field(default=AGENT_PORT, ge=0, le=65535, description="TCP port for coordinators; 0: any free")
    link_port: int = Field(default=LINK_PORT, ge=0, le=65535, description="TCP port for other agents; 0: any free")
    data_ports: tuple[int, int] = Field(default=DATA_PORTS, description="TCP ports for workers, first-last; 0-0: any")
    percent: float | None = Field(
        None, ge=1, le=100, description="limit of a worker in per cent: of this machine's memory and of its cores"
    )
    memory_bytes: int | None = Field(None, ge=1 << 20, description="memory limit of a worker, e.g. 2GiB")
    memory_percent: float | None = Field(None, gt=0, le=100, description="memory limit in per cent of all memory")
    threads: int | None = Field(
        None, ge=1, le=1024, description="compute threads of a worker (default: physical cores)"
    )
    compute_device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="device to compute on: auto, cpu or cuda"
    )
    spare_worker: SpareMode = Field(
        default="auto",
        description="keep a process that has imported torch or onnxruntime, from which workers start at once: auto, on or off",
    )
    advertise: bool = Field(default=True, description="advertise this agent over mDNS")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="minimum level of log messages: debug, info, warning, error"
    )

    @field_validator("store_bytes", "memory_bytes", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        return parse_bytes(value) if isinstance(value, str) else value

    @field_validator("percent", "memory_percent", mode="before")
    @classmethod
    def _share(cls, value: object) -> object:
        return value.strip().removesuffix("%") if isinstance(value, str) else value

    @field_validator("data_ports", mode="before")
    @classmethod
    def _range(cls, value: object) -> object:
        if isinstance(value, str):
            first, _, last = value.partition("-")
            value = (int(first), int(last or first))
        return value

    @field_validator("data_ports")
    @classmethod
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value != (0, 0) and not 1 <= value[0] <= value[1] <= 65535:
            raise ValueError("a range of ports such as 47810-47829 is expected")
        return value


def default_directories(environ: Mapping[str, str]) -> dict[str, Any]:
    """Default directories: those set by systemd, else those of the XDG base directory specification."""
    home = environ.get("HOME", ".")
    state = environ.get("XDG_STATE_HOME") or f"{home}/.local/state"
    cache = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    return {
        "state_dir": environ.get("STATE_DIRECTORY", f"{state}/hearth-agent").split(":")[0],
        "store_dir": environ.get("CACHE_DIRECTORY", f"{cache}/hearth-agent").split(":")[0],
        "key_path": default_key_path(environ),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting. Flags that are not given are None, so that variables or defaults apply."""
    for name, field in AgentSettings.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "advertise":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=field.description)
        else:
            shown = f" (default: {field.default})" if isinstance(field.default, str | int | tuple) else ""
            parser.add_argument(flag, metavar="VALUE", default=None, help=f"{field.description}{shown}")


def load_agent_settings(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> AgentSettings:
    """Read the settings: flags override variables, variables override defaults. Raises BadSetting that names the setting."""
    return read_settings(AgentSettings, PREFIX, environ, vars(arguments), default_directories(environ))
