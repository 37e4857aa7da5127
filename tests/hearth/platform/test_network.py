"""Choice of the advertised network interface, the warning when only loopback is left, and ports that refuse connections."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from hearth.errors import BadSetting
from hearth.platform import network
from hearth.platform.network import (
    Interface,
    choose_address,
    choose_interface,
    default_route_holders,
    numeric_address,
    reason_to_skip,
    refuses_connections,
)

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth1\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""
LOOPBACK = Interface("lo", "127.0.0.1", False, 0, "it reaches this machine only")


def test_default_route_decides_between_equal_interfaces(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/route").write_text(ROUTES)
    holders = default_route_holders(tmp_path)
    assert holders == {"eth1"}
    found = [Interface(n, f"192.168.0.{i}", False, 1000, "", n in holders) for i, n in enumerate(("eth0", "eth1"))]
    assert choose_interface(found, None).name == "eth1"
    faster = Interface("eth2", "192.168.0.9", False, 2500, "")
    assert choose_interface([*found, faster], None).name == "eth2"
    assert default_route_holders(tmp_path / "none") == frozenset()


def test_loopback_is_used_with_a_warning_if_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: [LOOPBACK])
    with caplog.at_level(logging.WARNING):
        assert choose_address("lo") == "127.0.0.1"
        assert caplog.text == ""
        assert choose_address(None) == "127.0.0.1"
    assert "reaches this machine only" in caplog.text


@pytest.mark.parametrize(
    ("name", "address", "is_up", "used"),
    [
        ("eth0", "192.168.1.5", True, True),
        ("wlan0", "10.0.0.3", True, True),
        ("enP8p1s0", "192.168.1.9", True, True),
        ("docker0", "172.17.0.1", True, False),
        ("br-1a2b3c", "172.18.0.1", True, False),
        ("veth12ab", "172.19.0.1", True, False),
        ("l4tbr0", "192.168.55.1", True, False),
        ("usb0", "192.168.55.1", True, False),
        ("rndis0", "192.168.55.1", True, False),
        ("wg0", "10.8.0.2", True, False),
        ("eth1", "169.254.3.4", True, False),
        ("eth1", "fe80::1%eth1", True, False),
        ("eth2", "192.168.2.5", False, False),
        ("lo", "127.0.0.1", True, False),
    ],
)
def test_interfaces_are_skipped_by_name_address_and_state(name: str, address: str, is_up: bool, used: bool) -> None:
    assert (reason_to_skip(name, address, is_up) == "") is used


def interface(name: str, address: str, wireless: bool = False, speed: int = 1000) -> Interface:
    return Interface(name, address, wireless, speed, reason_to_skip(name, address, True))


def test_wired_and_fast_interfaces_are_preferred() -> None:
    found = [
        interface("docker0", "172.17.0.1", speed=10000),
        interface("wlan0", "192.168.1.7", wireless=True, speed=5000),
        interface("eth1", "192.168.1.8", speed=100),
        interface("eth0", "192.168.1.6"),
        interface("lo", "127.0.0.1"),
    ]
    assert choose_interface(found, None).name == "eth0"
    assert choose_interface(found, "wlan0").name == "wlan0"
    assert choose_interface(found, "172.17.0.1").name == "docker0"
    assert choose_interface([found[0], found[4]], None).name == "lo"
    with pytest.raises(BadSetting, match=r"no 'eth9'.*eth0 \(192.168.1.6\)"):
        choose_interface(found, "eth9")


def test_states_come_from_sysfs_where_the_driver_cannot_be_asked(tmp_path: Path) -> None:
    """Under QEMU's user emulation psutil fails for all interfaces, at the ioctl that asks for the speed of one."""
    for name, files in {
        "eth0": {"carrier": "1\n", "speed": "1000\n"},
        "br0": {"carrier": "0", "speed": "-1"},
        "down": {},
    }.items():
        folder = tmp_path / "class/net" / name
        folder.mkdir(parents=True)
        for what, text in files.items():
            (folder / what).write_text(text)

    def refused() -> dict[str, object]:
        raise OSError(38, "Function not implemented (originated from ioctl(SIOCETHTOOL))")

    found = network.link_states(refused, tmp_path)
    assert found == {"eth0": (True, 1000), "br0": (False, 0), "down": (False, 0)}


def test_states_of_this_machine_agree_between_psutil_and_sysfs() -> None:
    import psutil

    def refused() -> dict[str, object]:
        raise OSError(38, "refused")

    asked, read = network.link_states(psutil.net_if_stats), network.link_states(refused)
    assert read["lo"][0]
    assert {name: up for name, (up, _) in asked.items()} == {name: read[name][0] for name in asked}


async def test_only_a_port_where_nothing_listens_refuses_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not await refuses_connections("127.0.0.1", port, 5.0)
    assert await refuses_connections("127.0.0.1", port, 5.0)
    assert not await refuses_connections("no such computer", port, 5.0)


async def test_addresses_stay_and_names_get_one_of_ipv4_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("10.0.0.7", "fe80::1"):
        assert await numeric_address(address) == address
    found = [(socket.AF_INET6, 1, 6, "", ("fd00::7", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("10.0.0.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: found)
    assert await numeric_address("kitchen.local") == "10.0.0.7"
    del found[1]
    assert await numeric_address("kitchen.local") == "fd00::7"

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert await numeric_address("kitchen.local") == "kitchen.local"


def test_shortest_round_trip_is_that_of_the_tcp_connection_alone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            found = network.shortest_round_trip(client.fileno())
        assert found is not None
        assert 0 < found < 1
        assert client.send(b"it is still open") > 0
        descriptor = client.fileno()
    assert network.shortest_round_trip(descriptor) is None
    with (tmp_path / "file").open("w") as file:
        assert network.shortest_round_trip(file.fileno()) is None
