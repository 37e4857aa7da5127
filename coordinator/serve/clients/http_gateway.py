"""The HTTP gateway of `hearth serve --http`: a child process, with an app key of its own."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from coordinator.http.settings import HTTP_PORT, HttpSettings
from coordinator.serve.clients.trust import Trust
from coordinator.serve.config import CoordinatorSettings
from hearth.errors import BadSetting, HearthError
from hearth.platform.child import run_module
from hearth.platform.curve import fingerprint, new_keypair
from hearth.platform.disk import FILE_SECONDS, on_disk
from hearth.platform.network import local_address
from hearth.platform.security import AppKey, format_credential, load_credential, save_credential

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.5  # before it is started again; doubled each time, since its port may be in use for long
_LONGEST_PAUSE_SECONDS = 30.0


def http_address(text: str) -> tuple[str, int]:
    """Host and port of "host", "host:port" or "[v6]:port"; port 0: any free one. Raises BadSetting."""
    with suppress(ValueError):
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.netloc == text and "@" not in text and not any(map(str.isspace, text)):
            return parts.hostname, HTTP_PORT if parts.port is None else parts.port
    raise BadSetting(setting="--http", reason=f"'{text}' is not of the form host[:port]")


async def keep_http_gateway(
    settings: CoordinatorSettings, trust: Trust, client_port: int, report: Callable[[str], None]
) -> None:
    """Keep the gateway running, until cancelled. Raises BadSetting."""
    host, port = http_address(settings.http)
    key = await _own_key(settings.state_dir / "http.key", trust)
    start = HttpSettings(
        host=host, port=port, key=format_credential(key), address=local_address(settings.bind_host, client_port),
        tls_folder=settings.state_dir / "tls" if settings.http_tls else None,
        advertise=settings.advertise, interfaces=tuple(settings.interfaces) if settings.interfaces else None,
    )  # fmt: skip
    pause = _FIRST_PAUSE_SECONDS
    while True:
        result = await run_module("coordinator.http", start.model_dump_json().encode(), math.inf, report)
        log.error("the HTTP gateway %s; it is started again", result.cause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


async def _own_key(path: Path, trust: Trust) -> AppKey:
    """The gateway's app key: that of earlier runs, unless it was lost or revoked."""
    with suppress(HearthError):
        kept = await on_disk(path, FILE_SECONDS, load_credential, path)
        if isinstance(kept, AppKey) and kept.name in trust.apps.current.keys.values():
            return kept
    pair = new_keypair()
    key = AppKey(name=f"http-{fingerprint(pair.public)}", secret=pair.secret, coordinator_public=trust.keypair.public)
    trust.apps.add(key.name, pair.public)
    await on_disk(path, FILE_SECONDS, save_credential, path, key, True)
    return key
