"""The machine and this process's share of it: its identity, the caches of its processor, the limit of open files."""

from __future__ import annotations

import hashlib
import platform
import re
import resource
from pathlib import Path

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}  # of sizes in sysfs
# As in the systemd units: far more than a home needs, so that idle connections do not shut others out.
_MAX_FILES = 65_536


def host_id(root: Path = Path("/")) -> str:
    """An id that is the same for all agents on one machine: a hash of the machine-id, which is confidential itself."""
    try:
        machine = (root / "etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    if machine in ("", "uninitialized"):  # an image before its first boot; see machine-id(5)
        machine = platform.node()
    return hashlib.sha256(f"hearth host {machine}".encode()).hexdigest()[:16]


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Size of the largest cache of the first core, shared or not; 0 where the system does not say."""
    sizes = [0]
    for path in root.glob("sys/devices/system/cpu/cpu0/cache/index*/size"):
        try:
            found = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        except OSError:
            continue
        if found is not None:
            sizes.append(int(found[1]) * _UNITS[found[2]])
    return max(sizes)


def raise_file_limit() -> None:
    """Raise this process's limit of open files, which also counts connections, as far as its user may.

    systemd's default of 1024 is little for a server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
