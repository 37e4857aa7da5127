"""Hearth runs neural networks on the small computers of a home as if they were one machine.

An app needs a few lines; this one shows an embedding model and a generating model::

    with hearth.connect() as home:
        vectors = home.embed(["Turn on the kitchen light."])
        for token in home.generate("Once upon a time"):
            print(token.text, end="", flush=True)

Importing this package is fast and does not load torch. `hearth.client` documents the calls, `hearth.errors` the errors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["AsyncHome", "HearthError", "Home", "__version__", "connect", "connect_async"]

if TYPE_CHECKING:
    from hearth.client.home import AsyncHome, connect_async
    from hearth.client.sync import Home, connect
    from hearth.errors import HearthError


_MODULES = {
    "HearthError": "hearth.errors", "AsyncHome": "hearth.client.home", "connect_async": "hearth.client.home",
    "Home": "hearth.client.sync", "connect": "hearth.client.sync",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the client on first use, so that `import hearth` itself stays fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'hearth' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)
