"""Which of several equal interfaces is advertised, and what is said when only loopback is left."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hearth import interfaces
from hearth.interfaces import Interface, choose, choose_address, default_route_holders

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth1\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""
LOOPBACK = Interface("lo", "127.0.0.1", True, False, 0, "it reaches this machine only")


def test_of_equal_interfaces_the_default_routes_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/route").write_text(ROUTES)
    holders = default_route_holders(tmp_path)
    assert holders == {"eth1"}
    found = [
        Interface(n, f"192.168.0.{i}", True, False, 1000, "", n in holders) for i, n in enumerate(("eth0", "eth1"))
    ]
    assert choose(found, None).name == "eth1"
    faster = Interface("eth2", "192.168.0.9", True, False, 2500, "")
    assert choose([*found, faster], None).name == "eth2"
    assert default_route_holders(tmp_path / "none") == frozenset()


def test_loopback_is_used_with_a_word_when_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(interfaces, "interfaces", lambda: [LOOPBACK])
    with caplog.at_level(logging.WARNING):
        assert choose_address("lo") == "127.0.0.1"
        assert caplog.text == ""
        assert choose_address(None) == "127.0.0.1"
    assert "reaches this machine only" in caplog.text
