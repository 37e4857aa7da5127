"""Settings of the HTTP gateway."""

from __future__ import annotations

from pydantic import BaseModel, Field

HTTP_PORT = 47880  # default


class HttpSettings(BaseModel, frozen=True):
    """Where the gateway listens and which coordinator it asks. `key` is the text of an app key, `address` as for a client."""

    host: str = "127.0.0.1"
    port: int = Field(default=HTTP_PORT, ge=0, le=65535)  # 0: any free port
    key: str = Field(repr=False)
    address: str | None = None
    interfaces: tuple[str, ...] | None = None
    allowed_hosts: tuple[str, ...] = ()  # names under which browsers may ask for it, besides those of `hosts`
    certificate: str | None = None  # PEM files: with both, the gateway speaks TLS
    private_key: str | None = None
