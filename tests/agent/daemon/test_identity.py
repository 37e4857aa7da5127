"""Device identity: the hardware fingerprint, the identity file, and its lock."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from agent.daemon.identity import hardware_fingerprint, load_identity
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
        ("usb", "0", False),  # a USB adapter
        ("pci", "0", True),  # a Wi-Fi address that is randomised at each boot
        ("platform", "1", False),  # a board without a fixed address generates one at each boot
        ("pci", "3", False),  # set by a network manager
    ],
)
def test_removable_and_random_addresses_are_ignored(bus: str, assign_type: str, wireless: bool, tmp_path: Path) -> None:
    add_interface(tmp_path, "eth0", "02:00:00:00:00:01", "pci")
    before = hardware_fingerprint(tmp_path)
    add_interface(tmp_path, "x0", "02:00:00:00:00:02", bus, assign_type, wireless)
    assert hardware_fingerprint(tmp_path) == before


def test_built_in_interface_address_changes_the_fingerprint(tmp_path: Path) -> None:
    add_interface(tmp_path / "a", "eth0", "02:00:00:00:00:01", "platform")
    add_interface(tmp_path / "b", "eth0", "02:00:00:00:00:02", "platform")
    assert hardware_fingerprint(tmp_path / "a") != hardware_fingerprint(tmp_path / "b")


def test_unreadable_state_directory_is_a_bad_setting(tmp_path: Path) -> None:
    (tmp_path / "identity.json").mkdir()
    with pytest.raises(BadSetting, match="--state-dir"), load_identity(tmp_path):
        pass


def board(root: Path, serial: str) -> Path:
    (root / "proc/device-tree").mkdir(parents=True)
    (root / "proc/device-tree/serial-number").write_text(serial + "\0")
    return root


def test_identity_persists_until_the_card_moves_to_another_board(tmp_path: Path) -> None:
    mine, other = board(tmp_path / "mine", "1000"), board(tmp_path / "other", "2000")
    state = tmp_path / "state"
    with load_identity(state, mine) as first:
        pass
    with load_identity(state, mine) as again:
        assert again == first
    shutil.copytree(state, tmp_path / "clone")
    with load_identity(tmp_path / "clone", other) as cloned:
        assert (tmp_path / "clone/identity.other-device").exists()
        assert cloned.device_id != first.device_id
        assert cloned.keypair != first.keypair
    assert hardware_fingerprint(mine) != hardware_fingerprint(other)


def test_each_state_directory_has_its_own_device_id(tmp_path: Path) -> None:
    with load_identity(tmp_path / "a") as a, load_identity(tmp_path / "b") as b:
        assert a.device_id != b.device_id


def test_state_directory_is_locked_by_one_agent(tmp_path: Path) -> None:
    with load_identity(tmp_path), pytest.raises(BadSetting, match=f"pid {os.getpid()}"), load_identity(tmp_path):
        pass


@pytest.mark.parametrize(
    "damage",
    [
        lambda fields: "",
        lambda fields: json.dumps(fields)[:-20],
        lambda fields: json.dumps({**fields, "device_id": ""}),
        lambda fields: json.dumps({**fields, "secret_key": "x"}),
        lambda fields: json.dumps({**fields, "secret_key": "\N{SNOWMAN}" * 40}),
        lambda fields: json.dumps({**fields, "secret_key": " " * 40}),
        lambda fields: json.dumps({**fields, "public_key": "0" * 40}),
    ],
    ids=["empty", "truncated", "no-id", "short-key", "no-ascii", "no-z85", "no-pair"],
)
def test_damaged_identity_file_is_renamed_and_replaced(damage: Callable[[dict[str, str]], str], tmp_path: Path) -> None:
    with load_identity(tmp_path) as first:
        pass
    damaged = damage(json.loads((tmp_path / "identity.json").read_text()))
    (tmp_path / "identity.json").write_text(damaged)
    with load_identity(tmp_path) as identity:
        assert identity.device_id != first.device_id
    assert (tmp_path / "identity.unreadable").read_text() == damaged


@pytest.mark.parametrize("failure", [errno.EROFS, errno.ENOSPC], ids=["read-only", "full"])
def test_identity_is_loaded_from_a_disk_that_has_become_full_or_read_only(
    failure: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_identity(tmp_path) as first:
        pass
    opened = os.open

    def open_(path: str | Path, flags: int, *mode: int) -> int:
        if failure == errno.EROFS and flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            raise OSError(failure, os.strerror(failure))
        return opened(path, flags, *mode)

    def write(*_: object) -> None:
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(os, "open", open_)
    for name in ("pwrite", "truncate"):
        monkeypatch.setattr(os, name, write)
    with load_identity(tmp_path) as again:
        assert again == first
        with pytest.raises(BadSetting, match="another agent"), load_identity(tmp_path):
            pass
