"""The identity of the computer that a program runs on."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path


def host_id(root: Path = Path("/")) -> str:
    """An id that is the same for all agents on one machine: a hash of the machine-id, which is confidential itself."""
    try:
        machine = (root / "etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    if machine in ("", "uninitialized"):  # an image before its first boot; see machine-id(5)
        machine = platform.node()
    return hashlib.sha256(f"hearth host {machine}".encode()).hexdigest()[:16]
