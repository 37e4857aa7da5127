"""Static peers and mDNS records."""

from __future__ import annotations

import asyncio

import pytest

from hearth.client.home import endpoint_of
from hearth.errors import BadSetting
from hearth.platform.discovery import (
    AGENT_SERVICE,
    COORDINATOR_SERVICE,
    Browser,
    DiscoveredService,
    advertised,
    find_coordinator,
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
    assert endpoint_of("box") == "tcp://box:47830"
    for nonsense in ("", "a:b", "a:0", "a:99999", ":5", "two words"):
        with pytest.raises(BadSetting, match="address"):
            parse_static_peers(nonsense)


def test_mdns_finds_services_and_reveals_only_required_fields() -> None:
    async def scenario() -> None:
        found: asyncio.Queue[DiscoveredService] = asyncio.Queue()
        browser = Browser(AGENT_SERVICE, found.put_nowait, ["127.0.0.1"])
        await browser.start()
        try:
            async with (
                advertised(AGENT_SERVICE, 4711, "f" * 16, "1234abcd", ["127.0.0.1"]),
                advertised(COORDINATOR_SERVICE, 4712, "e" * 16, "5678abcd", ["127.0.0.1"]),
            ):
                first = await asyncio.wait_for(found.get(), 20)
                while first.id != "1234abcd":  # another agent may run on this machine
                    first = await asyncio.wait_for(found.get(), 20)
                assert first == DiscoveredService("1234abcd", ("127.0.0.1",), 4711, PROTOCOL_VERSION, "f" * 16)
                assert (await find_coordinator("e" * 16, 20, ["127.0.0.1"])).port == 4712  # type: ignore[union-attr]
                assert await find_coordinator("0" * 16, 0.3, ["127.0.0.1"]) is None
        finally:
            await browser.stop()

    asyncio.run(scenario())
