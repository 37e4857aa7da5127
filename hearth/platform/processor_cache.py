"""The caches of the processor, as Linux describes them."""

from __future__ import annotations

import re
from pathlib import Path

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


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
