"""The coordinator's settings: read once, from flags and HEARTH_COORDINATOR_* variables, into a frozen object."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hearth.client.home import COORDINATOR_PORT
from hearth.platform.settings import read_settings

PREFIX = "HEARTH_COORDINATOR_"


class CoordinatorSettings(BaseModel):
    model_config = ConfigDict(frozen=True)

    # Shown to people and to agents that are asked who holds their lease.
    name: str = Field(default_factory=platform.node, max_length=128)
    # The last model and plan, profiles, app keys: what a restart needs. Not a cache.
    state_dir: Path
    # TCP port for clients; fixed, so that a firewall can name it. 0 takes any free one.
    port: int = Field(default=COORDINATOR_PORT, ge=0, le=65535)
    # Local address to listen on; 0.0.0.0 is all of them (CURVE guards every one).
    bind_host: str = "0.0.0.0"
    # Local addresses on which mDNS is spoken, separated by commas; empty: the one that the choice of interface gives.
    mdns_interfaces: str = ""
    # Whether to advertise over mDNS; off where multicast is blocked and clients are given the address.
    advertise: bool = True
    # Agents where multicast is blocked: "host:port,host2".
    devices: str = ""
    # Requests that may wait; one more is refused at once rather than kept waiting.
    queue_limit: int = Field(default=64, ge=1, le=100_000)
    # Seconds without a new device before a first plan is made.
    settle_seconds: float = Field(default=2.0, ge=0, le=600)
    # A first plan waits until this many devices are there.
    min_devices: int = Field(default=1, ge=1, le=256)
    # Seconds that running requests get to finish before a stop or a change of plan; systemd waits 90 for a stop.
    drain_seconds: float = Field(default=10.0, ge=0, le=3600)
    # Off: activations travel in the clear between workers (a random plan token still guards them). For measuring.
    encrypt_data_plane: bool = True

    @property
    def interfaces(self) -> list[str] | None:
        return [part.strip() for part in self.mdns_interfaces.split(",") if part.strip()] or None


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """systemd's $STATE_DIRECTORY, else the XDG state directory."""
    if "STATE_DIRECTORY" in environ:
        return Path(environ["STATE_DIRECTORY"].split(":")[0])
    base = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", ".")) / ".local/state")
    return Path(base) / "hearth-coordinator"


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> CoordinatorSettings:
    """Flags win over variables, variables over defaults. Raises BadSetting that names the setting."""
    defaults = {"state_dir": default_state_dir(environ)}
    return read_settings(CoordinatorSettings, PREFIX, environ, flags, defaults)
