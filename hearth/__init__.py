"""Hearth: the small computers of a home, run as one machine for neural networks.

An app needs a few lines, these for a model that embeds or for one that generates::

    with hearth.connect() as home:
        vectors = home.embed(["Turn on the kitchen light."])
        for token in home.generate("Once upon a time"):
            print(token.text, end="", flush=True)

Importing this package is quick and loads no torch; see `hearth.client` for the calls and `hearth.errors` for what they raise.
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
    """Load the client when it is first used: `import hearth` itself stays quick."""
    if name not in _MODULES:
        raise AttributeError(f"module 'hearth' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)
