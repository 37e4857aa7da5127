"""Settings of the HTTP gateway."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel, Field

from hearth.errors import BadSetting

HTTP_PORT = 47880  # default
LOCAL_SUFFIXES = (".local", ".localhost", ".lan", ".home", ".home.arpa", ".internal")  # of names in a home's network


class HttpSettings(BaseModel, frozen=True):
    """Where the gateway listens and which coordinator it asks. `key` is the text of an app key, `address` as for a client."""

    host: str = "127.0.0.1"
    port: int = Field(default=HTTP_PORT, ge=0, le=65535)  # 0: any free port
    key: str = Field(repr=False)
    address: str | None = None
    interfaces: tuple[str, ...] | None = None
    allowed_hosts: tuple[str, ...] = ()  # names under which browsers may ask for it, besides local ones
    advertise: bool = True  # over mDNS, unless it listens on loopback only
    certificate: str | None = None  # PEM files: with both, the gateway speaks TLS
    private_key: str | None = None
    tls_folder: Path | None = None  # it speaks TLS with a certificate of its own, kept here

    @property
    def scheme(self) -> str:
        """Of its addresses: "http" or "https"."""
        return "http" if self.certificate is None and self.tls_folder is None else "https"


def check_installed(tls: bool = False) -> None:
    """Raises BadSetting if the packages of the gateway are not installed. `tls`: it makes its certificate."""
    if not all(find_spec(package) for package in ("uvicorn", "starlette", *(["cryptography"] if tls else []))):
        raise BadSetting(setting="gateway", reason="it needs more packages: pip install 'hearth-home[gateway]'")
