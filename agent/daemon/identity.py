"""Identity of this device: a key pair, and a random id that is bound to the hardware so that a cloned SD card is detected."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import zmq
from pydantic import BaseModel, Field, model_validator

from hearth.errors import BadSetting
from hearth.files import FolderInUse, locked_folder, write_atomically
from hearth.platform.curve import KeyPair, new_keypair

log = logging.getLogger(__name__)

# Files that differ between boards. The machine-id is not among them, because it is copied with an SD card.
_HARDWARE_FILES = (
    "sys/class/dmi/id/product_uuid",
    "sys/class/dmi/id/product_serial",
    "proc/device-tree/serial-number",
    "sys/firmware/devicetree/base/serial-number",
)
# Buses of permanent network hardware. USB is not among them: plugging in an adapter must not change the identity.
_BUILT_IN_BUSES = ("pci", "platform", "virtio", "vmbus", "xen")
_PERMANENT_ADDRESS = "0"  # NET_ADDR_PERM in the kernel's netdevice.h; other values: random, copied or set by software


class Identity(BaseModel, frozen=True, hide_input_in_errors=True):
    """The identity, saved in the state directory. `hardware` is the fingerprint of the board that it was made on."""

    device_id: str = Field(min_length=1, max_length=256)
    hardware: str
    public_key: str
    secret_key: str = Field(repr=False)

    @model_validator(mode="after")
    def _check_keys(self) -> Identity:
        try:
            public = zmq.curve_public(self.secret_key.encode()).decode()
        except zmq.ZMQError:
            public = ""
        if public != self.public_key:
            raise ValueError("the keys are not a pair")
        return self

    @property
    def keypair(self) -> KeyPair:
        return KeyPair(self.public_key, self.secret_key)


def hardware_fingerprint(root: Path = Path("/")) -> str:
    """A hash of serial numbers and MAC addresses of built-in wired interfaces. It is the same at every boot.

    Wireless addresses are excluded, because network managers randomise them.
    """
    identifiers = [_read_text(root / name) for name in _HARDWARE_FILES]
    lines = _read_text(root / "proc/cpuinfo").splitlines()
    identifiers += [line for line in lines if line.lower().startswith("serial")]
    for interface in sorted((root / "sys/class/net").glob("*")):
        bus = (interface / "device/subsystem").resolve().name  # virtual interfaces have no device
        wireless = (interface / "phy80211").exists() or (interface / "wireless").exists()
        permanent = _read_text(interface / "addr_assign_type") == _PERMANENT_ADDRESS
        if bus in _BUILT_IN_BUSES and permanent and not wireless:
            identifiers.append(_read_text(interface / "address"))
    return hashlib.sha256("\n".join(identifiers).encode()).hexdigest()


@contextmanager
def load_identity(state_dir: Path, root: Path = Path("/")) -> Iterator[Identity]:
    """Load the identity from `state_dir`, or create it; the directory is locked for the duration of the block.

    Raises BadSetting if another agent uses the directory (naming its pid), or if it cannot be read or written.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_folder(state_dir))
            identity = _load_or_create(state_dir / "identity.json", hardware_fingerprint(root))
        except FolderInUse as other:
            reason = f"another agent (pid {other.pid}) uses {state_dir}"
            raise BadSetting(setting="--state-dir", reason=reason) from None
        except OSError as error:
            raise BadSetting(setting="--state-dir", reason=str(error)) from None
        yield identity


def _load_or_create(path: Path, hardware: str) -> Identity:
    try:
        saved = Identity.model_validate_json(path.read_bytes())
        if saved.hardware == hardware:
            return saved
        log.warning("this state directory comes from another device (a copied card?); this one gets a new identity")
        path.replace(path.with_suffix(".other-device"))
    except FileNotFoundError:
        pass
    except ValueError:
        log.warning("%s cannot be read and was kept aside; this device gets a new identity", path)
        path.replace(path.with_suffix(".unreadable"))
    public, secret = new_keypair()
    created = Identity(device_id=secrets.token_hex(8), hardware=hardware, public_key=public, secret_key=secret)
    write_atomically(path, created.model_dump_json(), private=True)
    return created


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip("\0\n ")
    except OSError:
        return ""
