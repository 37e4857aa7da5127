"""mDNS discovery: advertise a service of this home, and find the services of others. zeroconf is imported on first use.

A record contains a random id, the protocol version, its addresses, a fingerprint of the server's public key, and a tag, keyed
with that public key, of all this. Only members of the home know the public key, so that a stranger cannot make a record that
counts for one of the home; the encrypted handshake proves the rest. A record does not contain the host name.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hearth.errors import BadSetting
from hearth.platform.asyncio_tools import cancel_all, start_in, with_timeout
from hearth.platform.curve import fingerprint
from hearth.protocol import PROTOCOL_VERSION

if TYPE_CHECKING:
    from zeroconf import Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

log = logging.getLogger(__name__)

AGENT_SERVICE = "_hearth._tcp.local."
COORDINATOR_SERVICE = "_hearth-coord._tcp.local."
HTTP_SERVICE = "_hearth-api._tcp.local."  # OpenAI's and Ollama's APIs
AGENT_PORT = 47800  # default TCP port of an agent

# Interval at which local addresses are compared with those in use: a device that gets an address late, or another one, is
# found again within seconds, and the comparison takes a few milliseconds.
_ADDRESS_POLL_SECONDS = 5.0
# Timeout of registering a service, which takes milliseconds on an idle computer; the attempt is repeated.
_ANNOUNCE_SECONDS = 15.0
_CLOSE_SECONDS = 5.0  # for the last packets of a program that stops, which take 0.3 s
_RESOLVE_MS = 3000  # timeout of a query for a service's address; it is repeated at the next announcement
# Records that a browser keeps and looks up at the same time, at most; the oldest go first. Anyone on the network can send them.
_MAX_RECORDS = 256
_MAX_ADDRESSES = 4  # of a record: each is one more connection to try
_MAX_FIELD_BYTES = 200  # kept of one field of a record, whose sender is untrusted; Hearth's own fields are shorter


# Returns the local addresses to use, None for all. May raise BadSetting while there is none.
FindInterfaces: TypeAlias = "Callable[[], Sequence[str] | None]"


class DiscoveredService(NamedTuple):
    """One advertised service. `hosts` are its addresses, the best one first."""

    id: str
    hosts: tuple[str, ...]
    port: int
    protocol: int
    fingerprint: str
    tag: str = ""  # keyed with the server's public key; empty: made by somebody who does not know it

    @classmethod
    def of(
        cls, public_key: str, record_id: str, hosts: Sequence[str], port: int, protocol: int = PROTOCOL_VERSION
    ) -> DiscoveredService:
        """The service of a server with this public key, which only members of its home know."""
        content = "\n".join((record_id, str(port), str(protocol), *hosts))
        tag = hashlib.blake2b(content.encode(), key=public_key.encode(), digest_size=16).hexdigest()
        return cls(record_id, tuple(hosts), port, protocol, fingerprint(public_key), tag)

    def is_of(self, public_key: str) -> bool:
        """Whether somebody who knows this public key of the server has made the record."""
        made = self.of(public_key, self.id, self.hosts, self.port, self.protocol)
        return hmac.compare_digest(self.tag.encode(), made.tag.encode())  # a stranger's tag may be any text


@asynccontextmanager
async def advertised(
    service: str,
    port: int,
    public_key: str,
    random_id: str,
    find_interfaces: FindInterfaces,
    further: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[None]:
    """Advertise one service for the duration of the block, then withdraw it.

    `public_key`: that by which members of the home know the server. `further` are fields of its record.

    `find_interfaces` returns the local addresses that are used and advertised (None: all). It is called again every
    `_ADDRESS_POLL_SECONDS`: the network may come up later than this program, and addresses change. A failure is logged, and
    the next call tries again: other programs may know the address from their settings, without mDNS.
    """
    record = _Record(service, port, public_key, random_id, further)
    failures = _Failures(f"{service} cannot be advertised")
    try:
        await record.publish(find_interfaces())
    except (OSError, asyncio.TimeoutError) as error:
        failures.tell(error)
    following = asyncio.create_task(record.follow(find_interfaces, failures))
    try:
        yield
    finally:
        await cancel_all([following])
        await record.withdraw()


class _Failures:
    """Logs why mDNS does not work: each reason once, until it works again or there is another reason."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told = ""

    def tell(self, error: Exception) -> None:
        reason = str(error) or "it took too long"
        if reason != self._told:
            log.warning("%s, trying again every %g s: %s", self._what, _ADDRESS_POLL_SECONDS, reason)
        self._told = reason

    def end(self) -> None:
        self._told = ""


class _Record:
    """An advertised record."""

    def __init__(self, service: str, port: int, public_key: str, random_id: str, further: Mapping[str, str]) -> None:
        self._further = further
        self._service = service
        self._port = port
        self._public_key = public_key
        self._random_id = random_id
        self._zeroconf: AsyncZeroconf | None = None
        self._announcing: asyncio.Future[None] | None = None  # sends the announcements
        self._addresses: list[str] = []

    async def publish(self, interfaces: Sequence[str] | None) -> None:
        """Advertise these addresses instead of the earlier ones. Raises asyncio.TimeoutError, and OSError without a network.

        The announcements go on for half a second; queries are answered from now on.
        """
        from zeroconf.asyncio import AsyncServiceInfo

        addresses = _addresses_of(interfaces)
        record = DiscoveredService.of(self._public_key, self._random_id, addresses[:_MAX_ADDRESSES], self._port)
        info = AsyncServiceInfo(
            self._service,
            f"{self._random_id}.{self._service}",
            port=self._port,
            properties={
                "id": record.id, "v": str(record.protocol), "fp": record.fingerprint, "a": ",".join(record.hosts),
                "t": record.tag, **self._further,
            },
            server=f"{self._random_id}.local.",
            parsed_addresses=addresses,
        )  # fmt: skip
        await self.withdraw()
        zeroconf = self._zeroconf = _open_zeroconf(interfaces)

        registering = zeroconf.async_register_service(info, cooperating_responders=True)
        self._announcing = asyncio.ensure_future(await with_timeout(_ANNOUNCE_SECONDS, registering))
        self._addresses = addresses

    async def follow(self, find_interfaces: FindInterfaces, failures: _Failures) -> None:
        """Publish each change of the addresses, until cancelled."""
        while True:
            await asyncio.sleep(_ADDRESS_POLL_SECONDS)
            try:
                interfaces = find_interfaces()
                if _addresses_of(interfaces) != self._addresses:
                    before = ", ".join(self._addresses) or "no address"
                    self._random_id = secrets.token_hex(8)  # others may still hold the addresses of the old name
                    await self.publish(interfaces)
                    log.info("now advertised at %s instead of %s", ", ".join(self._addresses), before)
                failures.end()
            except (OSError, BadSetting, asyncio.TimeoutError) as error:  # for instance an interface that has just gone
                failures.tell(error)
            except Exception:  # a library's: without this task, nobody would find this program at a new address
                log.exception("the addresses cannot be advertised, trying again")

    async def withdraw(self) -> None:
        """Withdraw the record."""
        zeroconf, self._zeroconf, self._addresses = self._zeroconf, None, []
        if self._announcing is not None:
            self._announcing.cancel()
        if zeroconf is not None:
            await _close(zeroconf)


class Browser:
    """Browses for services, and calls `on_found` for each new service and each change of a record.

    With `follow_addresses` it browses on interfaces that get an address later, too (needs psutil), and logs failures instead
    of raising them.
    """

    def __init__(
        self,
        service: str,
        on_found: Callable[[DiscoveredService], None],
        interfaces: Sequence[str] | None = None,
        follow_addresses: bool = False,
    ) -> None:
        self.services: dict[str, DiscoveredService] = {}
        self._service = service
        self._on_found = on_found
        self._interfaces = interfaces
        self._follow_addresses = follow_addresses
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start browsing; runs until `stop`. Raises OSError without a network, unless it follows the addresses."""
        if not self._follow_addresses:
            self._open()
            return
        failures = _Failures(f"{self._service} cannot be browsed")
        try:
            self._open()
        except OSError as error:
            failures.tell(error)
        start_in(self._tasks, self._follow(failures))

    async def stop(self) -> None:
        """Stop browsing and close the sockets."""
        await cancel_all(self._tasks)
        await self._close()

    def _open(self) -> None:
        from zeroconf.asyncio import AsyncServiceBrowser

        self._zeroconf = _open_zeroconf(self._interfaces)
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, self._service, handlers=[self._changed])

    async def _close(self) -> None:
        browser, zeroconf = self._browser, self._zeroconf
        self._browser = self._zeroconf = None
        if browser is not None:
            await browser.async_cancel()
        if zeroconf is not None:
            await _close(zeroconf)

    async def _follow(self, failures: _Failures) -> None:
        """Browse again after each change of the local addresses: the sockets are those of the addresses at their opening."""
        addresses = _addresses_of(self._interfaces)
        while True:
            await asyncio.sleep(_ADDRESS_POLL_SECONDS)
            try:
                if (found := _addresses_of(self._interfaces)) == addresses and self._browser is not None:
                    continue
                await self._close()
                self._open()
                addresses = found
                failures.end()
            except OSError as error:
                failures.tell(error)
            except Exception:  # a library's: without this task, no device at a new address would be found
                log.exception("browsing failed, trying again")

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        from zeroconf import ServiceStateChange

        if state_change is ServiceStateChange.Removed:
            self.services.pop(name.partition(".")[0], None)
            return
        if len(self._tasks) < _MAX_RECORDS:
            start_in(self._tasks, self._resolve(zeroconf, name))

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(self._service, name)
        if not await info.async_request(zeroconf, _RESOLVE_MS):
            return
        service = _parse_record(info)
        if service is not None and self.services.get(service.id) != service:
            self.services.pop(service.id, None)
            self.services[service.id] = service
            while len(self.services) > _MAX_RECORDS:
                del self.services[next(iter(self.services))]
            self._on_found(service)


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


def _addresses_of(interfaces: Sequence[str] | None) -> list[str]:
    from hearth.platform.network import all_addresses

    return list(interfaces or all_addresses())


def _open_zeroconf(interfaces: Sequence[str] | None) -> AsyncZeroconf:
    """Open the sockets of mDNS. Raises OSError, also where there is no interface."""
    from zeroconf import InterfaceChoice, IPVersion
    from zeroconf.asyncio import AsyncZeroconf

    try:
        if interfaces and all(":" not in address for address in interfaces):
            return AsyncZeroconf(interfaces=list(interfaces), ip_version=IPVersion.V4Only)
        return AsyncZeroconf(interfaces=list(interfaces) if interfaces else InterfaceChoice.All)
    except RuntimeError as error:  # zeroconf's, if no interface has an address
        raise OSError(str(error)) from None


async def _close(zeroconf: AsyncZeroconf) -> None:
    """Withdraw its services and close its sockets."""
    try:
        await with_timeout(_CLOSE_SECONDS, zeroconf.async_close())
    except asyncio.TimeoutError:
        log.warning("the sockets of mDNS were not closed within %g s", _CLOSE_SECONDS)


def _parse_record(info: AsyncServiceInfo) -> DiscoveredService | None:
    """Parse a record; None if it is not a Hearth record. The content is untrusted: any host on the network can send it."""
    fields = {
        key.decode(errors="replace"): (value or b"")[:_MAX_FIELD_BYTES].decode(errors="replace")
        for key, value in (info.properties or {}).items()
    }
    is_whole = fields.get("v", "").isdecimal() and fields.get("id") and {"fp", "a", "t"} <= fields.keys()
    if not info.port or not is_whole:
        return None
    hosts = tuple(fields["a"].split(","))[:_MAX_ADDRESSES]
    try:
        for host in hosts:
            ipaddress.ip_address(host)
    except ValueError:
        return None
    return DiscoveredService(fields["id"], hosts, info.port, int(fields["v"]), fields["fp"], fields["t"])
