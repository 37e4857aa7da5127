"""The limit of open files, which also counts connections."""

from __future__ import annotations

import resource

# As in the systemd units: far more than a home needs, so that idle connections do not shut others out.
_MAX_FILES = 65_536


def raise_file_limit() -> None:
    """Raise this process's limit as far as its user may. systemd's default of 1024 is little for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
