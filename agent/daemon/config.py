"""The agent's settings: read once, from flags and HEARTH_AGENT_* variables, into a frozen object."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from hearth.platform.discovery import AGENT_PORT
from hearth.platform.security import default_key_path
from hearth.platform.settings import read_settings
from hearth.platform.units import parse_bytes

PREFIX = "HEARTH_AGENT_"
LINK_PORT = AGENT_PORT + 1
DATA_PORTS = (AGENT_PORT + 10, AGENT_PORT + 29)


class AgentSettings(BaseModel, frozen=True):
    """Every setting is a flag (`--store-bytes`) and a variable (`HEARTH_AGENT_STORE_BYTES`)."""

    name: str = Field(default_factory=platform.node, max_length=128, description="name shown to people")
    state_dir: Path = Field(description="identity of this device; one agent each")
    store_dir: Path = Field(description="where shard chunks are kept; may be deleted at any time")
    store_bytes: int = Field(default=16 << 30, ge=1 << 20, description="most that the store may hold, e.g. 8GiB")
    key_path: Path = Field(description="file with the home key")
    interface: str | None = Field(None, description="network interface or address to advertise (default: chosen)")
    bind_host: str = Field(default="0.0.0.0", description="local address to listen on; CURVE guards every one")
    control_port: int = Field(default=AGENT_PORT, ge=0, le=65535, description="TCP port for coordinators; 0: any")
    link_port: int = Field(default=LINK_PORT, ge=0, le=65535, description="TCP port for measuring links; 0: any")
    data_ports: tuple[int, int] = Field(default=DATA_PORTS, description="TCP ports for workers, first-last; 0-0: any")
    percent: float | None = Field(
        None, ge=1, le=100, description="most of this machine that a worker may use: of its memory and its cores"
    )
    memory_bytes: int | None = Field(None, ge=1 << 20, description="most that a worker may use, e.g. 2GiB")
    memory_percent: float | None = Field(None, gt=0, le=100, description="the same as a share of all memory")
    threads: int | None = Field(None, ge=1, le=1024, description="threads that compute (default: physical cores)")
    compute_device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="what computes")
    advertise: bool = Field(default=True, description="whether to advertise over mDNS")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="what is logged")

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


def defaults(environ: Mapping[str, str]) -> dict[str, Any]:
    """Directories as systemd gives them, else by the XDG rules."""
    home = environ.get("HOME", ".")
    state = environ.get("XDG_STATE_HOME") or f"{home}/.local/state"
    cache = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    return {
        "state_dir": environ.get("STATE_DIRECTORY", f"{state}/hearth-agent").split(":")[0],
        "store_dir": environ.get("CACHE_DIRECTORY", f"{cache}/hearth-agent").split(":")[0],
        "key_path": default_key_path(environ),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting; what is not given comes from the environment or the defaults."""
    for name, field in AgentSettings.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "advertise":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=field.description)
        else:
            shown = f" (default: {field.default})" if isinstance(field.default, str | int | tuple) else ""
            parser.add_argument(flag, metavar="VALUE", default=None, help=f"{field.description}{shown}")


def load_settings(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> AgentSettings:
    """Flags win over variables, variables over defaults. Raises BadSetting that names the setting."""
    return read_settings(AgentSettings, PREFIX, environ, vars(arguments), defaults(environ))
