"""Entry point of the HTTP gateway, `python -m coordinator.http`: reads its `HttpSettings` from stdin and serves."""

from __future__ import annotations

import logging
import sys

from coordinator.http.settings import HttpSettings
from hearth.platform.machine import raise_file_limit, unmap_freed_buffers


def main() -> int:
    """Run the gateway until SIGINT or SIGTERM. The exit status is 1 if it cannot listen."""
    unmap_freed_buffers()
    raise_file_limit()
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    settings = HttpSettings.model_validate_json(sys.stdin.buffer.read())
    from coordinator.http.server import serve

    return serve(settings)


if __name__ == "__main__":
    sys.exit(main())
