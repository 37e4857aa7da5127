"""mDNS discovery: advertise a service of this home, and find the services of others. zeroconf is imported on first use.

A record contains a random id, the protocol version and a fingerprint of the home's public key for that role. It does not
contain the host name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from hearth.errors import BadSetting
from hearth.platform.asyncio_tools import cancel_all
from hearth.protocol import PROTOCOL_VERSION

if TYPE_CHECKING:
    from zeroconf import Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

log = logging.getLogger(__name__)

AGENT_SERVICE = "_hearth._tcp.local."
COORDINATOR_SERVICE = "_hearth-coord._tcp.local."
AGENT_PORT = 47800  # default TCP port of an agent

_RESOLVE_MS = 3000  # timeout of a query for a service's address; it is repeated at the next announcement
_MAX_FIELD_BYTES = 64  # kept of one field of a record, whose sender is untrusted; Hearth's own fields are shorter


class DiscoveredService(NamedTuple):
    """One advertised service. `hosts` are its addresses, IPv4 first."""

    id: str
    hosts: tuple[str, ...]
    port: int
    protocol: int
    fingerprint: str


@asynccontextmanager
async def advertised(
    service: str, port: int, fingerprint: str, random_id: str, interfaces: Sequence[str] | None
) -> AsyncIterator[None]:
    """Advertise one service for the duration of the block, then withdraw it.

    `interfaces` are the local addresses that are used and advertised (None: all).
    """
    from zeroconf.asyncio import AsyncServiceInfo

    from hearth.platform.interfaces import all_addresses

    info = AsyncServiceInfo(
        service,
        f"{random_id}.{service}",
        port=port,
        properties={"id": random_id, "v": str(PROTOCOL_VERSION), "fp": fingerprint},
        server=f"{random_id}.local.",
        parsed_addresses=list(interfaces or all_addresses()),
    )
    zeroconf = _open_zeroconf(interfaces)
    await (await zeroconf.async_register_service(info, cooperating_responders=True))
    try:
        yield
    finally:
        await zeroconf.async_unregister_all_services()
        await zeroconf.async_close()


class Browser:
    """Browses for services, and calls `on_found` for each new service and each change of a record."""

    def __init__(
        self, service: str, on_found: Callable[[DiscoveredService], None], interfaces: Sequence[str] | None = None
    ) -> None:
        self.services: dict[str, DiscoveredService] = {}
        self._service = service
        self._on_found = on_found
        self._interfaces = interfaces
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start browsing; runs until `stop`."""
        from zeroconf.asyncio import AsyncServiceBrowser

        self._zeroconf = _open_zeroconf(self._interfaces)
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, self._service, handlers=[self._changed])

    async def stop(self) -> None:
        """Stop browsing and close the sockets."""
        await cancel_all(self._tasks)
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            await self._zeroconf.async_close()

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        from zeroconf import ServiceStateChange

        if state_change is ServiceStateChange.Removed:
            self.services.pop(name.partition(".")[0], None)
            return
        task = asyncio.create_task(self._resolve(zeroconf, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(self._service, name)
        if not await info.async_request(zeroconf, _RESOLVE_MS):
            return
        service = _parse_record(info)
        if service is not None and self.services.get(service.id) != service:
            self.services[service.id] = service
            self._on_found(service)


async def find_coordinator(
    fingerprint: str, timeout_seconds: float, interfaces: Sequence[str] | None = None
) -> DiscoveredService | None:
    """Return the first coordinator of this home that answers, or None after the timeout."""
    answer: asyncio.Future[DiscoveredService] = asyncio.get_running_loop().create_future()

    def on_found(service: DiscoveredService) -> None:
        if service.fingerprint == fingerprint and not answer.done():
            answer.set_result(service)

    browser = Browser(COORDINATOR_SERVICE, on_found, interfaces)
    await browser.start()
    try:
        return await asyncio.wait_for(answer, timeout_seconds)
    except asyncio.TimeoutError:
        return None
    finally:
        await browser.stop()


def parse_static_peers(text: str, default_port: int = AGENT_PORT) -> tuple[tuple[str, int], ...]:
    """Parse a comma-separated list of "host", "host:port" and "[v6]:port", for networks without multicast.

    Raises BadSetting that names the invalid part.
    """
    peers = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        host, port = part, str(default_port)
        if part.startswith("["):
            host, _, rest = part[1:].partition("]")
            port = rest.removeprefix(":") or port
        elif part.count(":") == 1:
            host, port = part.split(":")
        if not host or not port.isdigit() or not 1 <= int(port) <= 65535 or any(c.isspace() for c in host):
            raise BadSetting(setting="address", reason=f"'{part}' is not of the form host or host:port")
        peers.append((host, int(port)))
    if not peers:
        raise BadSetting(setting="address", reason="it is empty")
    return tuple(peers)


def _open_zeroconf(interfaces: Sequence[str] | None) -> AsyncZeroconf:
    from zeroconf import InterfaceChoice, IPVersion
    from zeroconf.asyncio import AsyncZeroconf

    if interfaces and all(":" not in address for address in interfaces):
        return AsyncZeroconf(interfaces=list(interfaces), ip_version=IPVersion.V4Only)
    return AsyncZeroconf(interfaces=list(interfaces) if interfaces else InterfaceChoice.All)


def _parse_record(info: AsyncServiceInfo) -> DiscoveredService | None:
    """Parse a record; None if it is not a Hearth record. The content is untrusted: any host on the network can send it."""
    fields = {
        key.decode(errors="replace"): (value or b"")[:_MAX_FIELD_BYTES].decode(errors="replace")
        for key, value in (info.properties or {}).items()
    }
    if not info.port or not fields.get("v", "").isdigit() or not fields.get("id") or "fp" not in fields:
        return None
    addresses = sorted(
        set(info.parsed_addresses()), key=lambda text: (ipaddress.ip_address(text.split("%")[0]).version, text)
    )
    if not addresses:
        return None
    return DiscoveredService(fields["id"], tuple(addresses), info.port, int(fields["v"]), fields["fp"])
