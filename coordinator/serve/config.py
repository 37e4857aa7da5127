"""The coordinator's settings, read once from flags and HEARTH_COORDINATOR_* variables into a frozen object."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hearth.client.connection import COORDINATOR_PORT
from hearth.validation import read_settings

ENVIRONMENT_PREFIX = "HEARTH_COORDINATOR_"
_SERVICE_STATE_DIR = Path("/var/lib/hearth-coordinator")  # of the systemd unit


class CoordinatorSettings(BaseModel):
    """Settings of `hearth serve`; they do not change while it runs."""

    model_config = ConfigDict(frozen=True)

    # Shown to users, also by agents as the holder of their lease.
    name: str = Field(default_factory=platform.node, max_length=128)
    # Holds what a restart needs: the last model and plan, profiles, app keys. Not a cache.
    state_dir: Path
    # TCP port for clients; fixed by default, so that a firewall rule can name it. 0: any free port.
    port: int = Field(default=COORDINATOR_PORT, ge=0, le=65535)
    # Local address to listen on; 0.0.0.0: all interfaces (every connection is authenticated with CURVE).
    bind_host: str = "0.0.0.0"
    # Local addresses to use for mDNS, separated by commas; empty: those of all interfaces.
    mdns_interfaces: str = ""
    # Whether to advertise over mDNS; switch off where multicast is blocked, and give clients the address.
    advertise: bool = True
    # Addresses of agents that mDNS cannot find because multicast is blocked: "host:port,host2".
    devices: str = ""
    # Most requests that may wait; one more is refused at once with QueueFull.
    queue_limit: int = Field(default=64, ge=1, le=100_000)
    # Most bytes of one request of an app, for example the arrays of an `infer`; administrators may send 64 MiB in each array.
    app_request_bytes: int = Field(default=16 << 20, ge=1 << 20, le=1 << 30)
    # Requests that one app may start per second, in the long run; more wait for their start.
    app_requests_per_second: float = Field(default=200.0, gt=0, le=1e6)
    # Seconds without a new device before the first plan is made.
    settle_seconds: float = Field(default=2.0, ge=0, le=600)
    # Number of devices that the first plan waits for.
    min_devices: int = Field(default=1, ge=1, le=256)
    # Seconds that running requests get to finish before a stop or a change of plan; systemd allows 90 s for a stop.
    drain_seconds: float = Field(default=10.0, ge=0, le=3600)
    # Off: workers exchange activations unencrypted, authenticated only by a random plan token. For measurements.
    encrypt_data_plane: bool = True

    # Address on which an HTTP gateway answers OpenAI's and Ollama's APIs: "host[:port]"; empty: none.
    http: str = ""
    # That gateway speaks TLS, with a certificate that it makes itself.
    http_tls: bool = False

    # Follow the leading coordinator of this home, and take over when it is gone.
    standby: bool = False
    # Addresses of coordinators to follow, separated by commas; empty: found over mDNS.
    leader: str = ""

    @property
    def leader_addresses(self) -> list[str]:
        return [part.strip() for part in self.leader.split(",") if part.strip()]

    @property
    def interfaces(self) -> list[str] | None:
        return [part.strip() for part in self.mdns_interfaces.split(",") if part.strip()] or None


def default_state_dir(environ: Mapping[str, str], name: str = "hearth-coordinator") -> Path:
    """The first of systemd's $STATE_DIRECTORY, else the folder of this name in the XDG state directory."""
    if "STATE_DIRECTORY" in environ:
        return Path(environ["STATE_DIRECTORY"].split(":")[0])
    base = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", ".")) / ".local/state")
    return Path(base) / name


def device_registry_dir(state_dir: Path) -> Path:
    """Where a command reads the keys of devices: `state_dir` if it has some, else the service's, if this user may read it."""
    if (state_dir / "devices.json").exists() or not os.access(_SERVICE_STATE_DIR, os.X_OK):
        return state_dir
    return _SERVICE_STATE_DIR


def load_coordinator_settings(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> CoordinatorSettings:
    """Flags override variables, which override defaults. Raises BadSetting naming the setting."""
    defaults = {"state_dir": default_state_dir(environ)}
    return read_settings(CoordinatorSettings, ENVIRONMENT_PREFIX, environ, flags, defaults)
