"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
KeyPath = Annotated[
    Optional[Path],  # noqa: UP045 (typer reads the annotation on Python 3.10)
    typer.Option("--key", help="Key file. Default: $HEARTH_KEY, else ~/.config/hearth/key.", show_default=False),
]
Address = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--address", help="Coordinator's host[:port]. Default: found over mDNS.", show_default=False),
]
Devices = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--devices", help="Agents where multicast is blocked: host[:port],host2[:port].", show_default=False),
]
Interfaces = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--mdns-interfaces", help="Local addresses on which to speak mDNS, with commas.", show_default=False),
]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait.", min=0.1)]


def interface_list(interfaces: str | None) -> list[str] | None:
    return [part.strip() for part in (interfaces or "").split(",") if part.strip()] or None
