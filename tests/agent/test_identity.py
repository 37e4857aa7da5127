"""What changes the hardware fingerprint, and what must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.identity import hardware_fingerprint, load_identity
from hearth.errors import BadSetting


def add_interface(
    root: Path, name: str, address: str, bus: str, assign_type: str = "0", wireless: bool = False
) -> None:
    folder = root / "sys/class/net" / name
    (folder / "device").mkdir(parents=True)
    (root / "sys/bus" / bus).mkdir(parents=True, exist_ok=True)
    (folder / "device/subsystem").symlink_to(root / "sys/bus" / bus)
    (folder / "address").write_text(f"{address}\n")
    (folder / "addr_assign_type").write_text(f"{assign_type}\n")
    if wireless:
        (folder / "phy80211").mkdir()


@pytest.mark.parametrize(
    ("bus", "assign_type", "wireless"),
    [
        ("usb", "0", False),  # an adapter is plugged in
        ("pci", "0", True),  # a wireless address, randomised at the next boot
        ("platform", "1", False),  # a board without an address of its own makes one up at every boot
        ("pci", "3", False),  # set by a network manager
    ],
)
def test_addresses_that_come_and_go_do_not_change_the_device(
    bus: str, assign_type: str, wireless: bool, tmp_path: Path
) -> None:
    add_interface(tmp_path, "eth0", "02:00:00:00:00:01", "pci")
    before = hardware_fingerprint(tmp_path)
    add_interface(tmp_path, "x0", "02:00:00:00:00:02", bus, assign_type, wireless)
    assert hardware_fingerprint(tmp_path) == before


def test_another_built_in_interface_is_another_device(tmp_path: Path) -> None:
    add_interface(tmp_path / "a", "eth0", "02:00:00:00:00:01", "platform")
    add_interface(tmp_path / "b", "eth0", "02:00:00:00:00:02", "platform")
    assert hardware_fingerprint(tmp_path / "a") != hardware_fingerprint(tmp_path / "b")


def test_a_state_directory_that_cannot_be_read_is_a_bad_setting(tmp_path: Path) -> None:
    (tmp_path / "identity.json").mkdir()
    with pytest.raises(BadSetting, match="--state-dir"), load_identity(tmp_path):
        pass
