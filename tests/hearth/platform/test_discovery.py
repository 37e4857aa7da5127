"""Static peers and mDNS records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.waiting import until
from zeroconf import DNSText
from zeroconf._cache import DNSCache

from hearth.client.connection import endpoints_of
from hearth.errors import BadSetting
from hearth.platform import discovery
from hearth.platform.curve import fingerprint
from hearth.platform.discovery import (
    AGENT_SERVICE,
    COORDINATOR_SERVICE,
    Browser,
    DiscoveredService,
    advertised,
    parse_static_peers,
)
from hearth.protocol import PROTOCOL_VERSION


def test_static_peers_table() -> None:
    assert parse_static_peers("a, b:1234,[fe80::1]:5,[::1]") == (
        ("a", 47800),
        ("b", 1234),
        ("fe80::1", 5),
        ("::1", 47800),
    )
    assert endpoints_of("box, [::1]:5") == ("tcp://box:47830", "tcp://[::1]:5")
    for nonsense in ("", "a:b", "a:0", "a:99999", ":5", "two words"):
        with pytest.raises(BadSetting, match="address"):
            parse_static_peers(nonsense)


@asynccontextmanager
async def browsing(**options: bool) -> AsyncIterator[Callable[[int], Awaitable[DiscoveredService]]]:
    """A function that waits for an agent at this port; others may run on this machine."""
    found: asyncio.Queue[DiscoveredService] = asyncio.Queue()
    browser = Browser(AGENT_SERVICE, found.put_nowait, ["127.0.0.1"], **options)

    async def search(port: int) -> DiscoveredService:
        while (service := await asyncio.wait_for(found.get(), 20)).port != port:
            pass
        return service

    await browser.start()
    try:
        yield search
    finally:
        await browser.stop()


async def test_mdns_finds_services_and_reveals_only_required_fields() -> None:
    async with (
        browsing() as found,
        advertised(AGENT_SERVICE, 4711, "one key", "1234abcd", lambda: ["127.0.0.1"]),
        advertised(COORDINATOR_SERVICE, 4712, "another key", "5678abcd", lambda: ["127.0.0.1"]),
    ):
        service = await found(4711)
        assert service[:-1] == ("1234abcd", ("127.0.0.1",), 4711, PROTOCOL_VERSION, fingerprint("one key"))
        assert service.is_of("one key")
        assert "one key" not in str(service)


@pytest.mark.parametrize(
    "change",
    [{"id": "other"}, {"hosts": ("10.0.0.9",)}, {"hosts": ("10.0.0.1", "10.0.0.9")}, {"port": 1}, {"protocol": 1},
     {"tag": ""}, {"tag": "0" * 32}, {"tag": "\ufffd"}],
)  # fmt: skip
def test_record_that_was_made_or_changed_without_the_key_is_of_nobody(change: dict[str, Any]) -> None:
    record = DiscoveredService.of("key", "id", ("10.0.0.1",), 4711)
    assert record.is_of("key")
    assert not record.is_of("other key")
    assert not record._replace(**change).is_of("key")


async def test_address_that_changes_is_advertised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a device that got its address late, or another one from the router."""
    monkeypatch.setattr(discovery, "_ADDRESS_POLL_SECONDS", 0.05)
    addresses = ["127.0.0.1"]

    async with (
        browsing() as found,
        advertised(AGENT_SERVICE, 4713, "key", "90abcdef", lambda: list(addresses)),
    ):
        assert (await found(4713)).hosts == ("127.0.0.1",)
        addresses[:] = ["127.0.0.2"]
        assert (await found(4713)).hosts == ("127.0.0.2",)


async def test_without_a_network_mdns_is_tried_again_and_the_reason_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a device that starts before its network, or whose port of mDNS another program keeps for itself."""
    monkeypatch.setattr(discovery, "_ADDRESS_POLL_SECONDS", 0.01)
    reasons = ["No interfaces to listen on", "Address already in use"]
    left = {address: [*reasons[:1], *reasons] for address in ("127.0.0.1", "127.0.0.2")}  # the first reason twice
    open_sockets = discovery._open_zeroconf

    def open_later(interfaces: list[str]) -> Any:
        if left[interfaces[0]]:
            raise OSError(left[interfaces[0]].pop(0))
        return open_sockets(interfaces)

    monkeypatch.setattr(discovery, "_open_zeroconf", open_later)
    async with (
        browsing(follow_addresses=True) as found,
        advertised(AGENT_SERVICE, 4715, "key", "90abcdef", lambda: ["127.0.0.2"]),
    ):
        await found(4715)
    told = [record.getMessage() for record in caplog.records if record.name == discovery.log.name]
    for verb in ("browsed", "advertised"):
        assert [line.rpartition(": ")[2] for line in told if f"{verb}, trying again" in line] == reasons


@pytest.mark.parametrize("raised", [OSError(19, "No such device"), RuntimeError("No interfaces to listen on")])
def test_no_network_is_an_oserror_with_its_reason(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    """zeroconf raises RuntimeError where no interface has an address."""

    def refuse(**_: Any) -> Any:
        raise raised

    monkeypatch.setattr("zeroconf.asyncio.AsyncZeroconf", refuse)
    with pytest.raises(OSError, match="No"):
        asyncio.run(Browser(AGENT_SERVICE, lambda service: None).start())


async def test_addresses_that_could_not_be_advertised_are_advertised_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_ADDRESS_POLL_SECONDS", 0.01)
    published: list[list[str]] = []
    failures: list[Exception] = [OSError("the interface is gone"), BadSetting(setting="x", reason="y"), RuntimeError()]

    async def publish(self: discovery._Record, interfaces: list[str]) -> None:
        await self.withdraw()
        if published and failures:
            raise failures.pop()
        self._addresses = interfaces
        published.append(interfaces)

    monkeypatch.setattr(discovery._Record, "publish", publish)
    addresses = ["127.0.0.1"]
    async with advertised(AGENT_SERVICE, 4714, "key", "90abcdef", lambda: list(addresses)):
        addresses[:] = ["10.0.0.2"]
        await until("the other address", lambda: len(published) == 2, 20)
    assert published == [["127.0.0.1"], ["10.0.0.2"]]


async def test_browser_opens_new_sockets_when_an_address_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_ADDRESS_POLL_SECONDS", 0.05)
    addresses = ["127.0.0.1"]
    monkeypatch.setattr("hearth.platform.network.all_addresses", lambda: list(addresses))

    browser = Browser(AGENT_SERVICE, lambda service: None, follow_addresses=True)
    await browser.start()
    try:
        first = browser._zeroconf
        await asyncio.sleep(0.2)
        assert browser._zeroconf is first
        addresses.append("127.0.0.2")
        await until("new sockets", lambda: browser._zeroconf not in (first, None))
    finally:
        await browser.stop()


async def test_service_that_cannot_be_announced_in_time_is_announced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_ADDRESS_POLL_SECONDS", 0.05)
    monkeypatch.setattr(discovery, "_ANNOUNCE_SECONDS", 0.2)
    announced: list[str] = []

    class Mdns:
        """Announces nothing at first, and does not close in time."""

        async def async_register_service(self, info: Any, **_: Any) -> asyncio.Future[None]:
            announced.append(info.name)
            if len(announced) == 1:
                await asyncio.Event().wait()
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done

        async def async_close(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(discovery, "_CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(discovery, "_open_zeroconf", lambda interfaces: Mdns())

    async with advertised(AGENT_SERVICE, 4714, "key", "90abcdef", lambda: ["127.0.0.1"]):
        await until("a second attempt", lambda: len(announced) == 2)


def test_records_that_anybody_sends_are_bounded() -> None:
    """zeroconf keeps at most 10,000: some 10 MB of them."""
    cache = DNSCache()
    for number in range(12_000):
        cache.async_add_records([DNSText(f"{number}.{AGENT_SERVICE}", 16, 1, 4500, b"x")])
    assert len(cache.names()) <= 10_000
